"""The train function of local SGD, which `fit` calls in place of Keras' own."""

from typing import Any

import keras
import tensorflow as tf

from tfopt.callbacks.rounds.averaging import Averaging
from tfopt.callbacks.rounds.local_updates import inner, updating_locally
from tfopt.distribute.data_check.fits import counting_step
from tfopt.internals.training import reduce_per_replica
from tfopt.repairs.optimizers import ACCUMULATION, end_round
from tfopt.repairs.repair import alone


class LocalFunction:
    """Takes steps in which each replica trains by itself, and averages the weights after every few.

    Args:
        model: A compiled model whose optimizer is built.
        every: Steps in a round.
        averaging: What ends a round.
    """

    def __init__(self, model: keras.Model, every: int, averaging: Averaging):
        self._model, self._every, self._averaging = model, every, averaging
        self._strategy = model.distribute_strategy
        step: Any = self._replicas_step if model.run_eagerly else _traced(self._replicas_step)
        kind: Any = type(model)
        self._one_step = kind._autoconvert_optionals(model, step)
        self._mean_of_logs = _traced(lambda logs: reduce_per_replica(logs, self._strategy, "auto"))
        self._since = 0  # steps since the weights were averaged
        self._apart = False  # whether the optimizer's state may differ between replicas
        self.synchronizations = 0
        """How often the replicas have exchanged weights or state."""
        self.before: Any = None
        """The train function to put back after fit."""
        self._logs: Any = None

    def begin(self) -> None:
        """Begins a fit."""
        self._logs, self.synchronizations = None, 0

    def remember(self) -> None:
        """Takes the present weights as those that the next round starts from."""
        self._averaging.begin()

    def __call__(self, iterator: Any) -> Any:
        """Takes an execution's steps. Returns the logs as of the last synchronisation, the same in all workers."""
        taken = 0
        for batch in self._batches(iterator):
            taken += 1
            logs = self._one_step(batch)
            self._since, self._apart = self._since + 1, True
            if self._since == self._every:
                self._average()
                self._logs = self._mean_of_logs(logs)
        if not taken:
            raise StopIteration
        if self._logs is None:
            self._logs = self._mean_of_logs(logs)
        return self._logs

    def _batches(self, iterator: Any) -> Any:
        for _ in range(self._model.steps_per_execution):
            batch = next(iterator, None)
            if batch is None:
                return
            yield batch

    def synchronize(self) -> None:
        """Makes weights and optimizer state equal in all replicas, if they are not."""
        if self._since:
            self._average()
        self._average_state()

    def hand_back(self) -> None:
        """After a fit that an exception ended: makes all replicas equal, and gives the steps back to Keras."""
        if self._since:
            self._averaging.level()
            self._since = 0
        self._average_state()
        if self._model.train_function is self:  # not compiled again since
            self._model.train_function = self.before

    def _average_state(self) -> None:
        if self._apart:
            self.synchronizations += self._averaging.average_state()
            self._apart = False

    def end_epoch(self) -> None:
        """Makes the replicas equal; all then take the same step with gradients that accumulation left over."""
        self.synchronize()
        optimizer = inner(self._model.optimizer)

        def apply(*args: Any) -> None:
            with alone():
                optimizer.apply(*args)

        if optimizer.gradient_accumulation_steps and ACCUMULATION.installed:
            with updating_locally(self._model.optimizer):
                end_round(self._model, apply)

    def _average(self) -> None:
        self._averaging.average()
        self.synchronizations += 1
        self._since = 0

    def _replicas_step(self, data: Any) -> Any:
        def step(data: Any) -> Any:
            with alone():
                return counting_step(self._model)(data)

        with updating_locally(self._model.optimizer):
            return self._strategy.run(step, args=(data,))


def _traced(function: Any) -> Any:
    return tf.function(function, autograph=False, reduce_retracing=True)
