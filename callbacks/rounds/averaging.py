"""Makes the replicas' weights equal again: their mean, or an outer optimizer's step towards it."""

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfopt.callbacks.rounds.local_updates import inner, updating_locally
from tfopt.repairs.repair import alone


class Averaging:
    """Averages the weights over the replicas, and on request the optimizer's state.

    Args:
        model: A model whose optimizer is built.
        outer: An optimizer that takes the replicas' mean change as its gradient. None: their mean is what counts.
    """

    def __init__(self, model: keras.Model, outer: keras.optimizers.Optimizer | None):
        self._strategy = model.distribute_strategy
        self._trained = model.trainable_variables
        self._averaged = [*_statistics(model)]
        self._state, self._first = _state(model.optimizer)
        self._anchors: list[keras.Variable] = []
        self._outer = None
        if outer is not None:
            with self._strategy.scope():
                self._outer = type(outer).from_config(
                    outer.get_config()
                )  # made here, its variables are in all replicas
                self._outer.build(self._trained)
                self._anchors = [keras.Variable(variable, trainable=False) for variable in self._trained]
        self._run = {
            step: tf.function(lambda step=step: self._strategy.run(step), autograph=False)
            for step in (self._average_weights, self._average_state, self._remember, self._take_means)
        }

    def average(self) -> None:
        """Averages the weights, and takes the outer optimizer's step."""
        self._run[self._average_weights]()

    def level(self) -> None:
        """Makes the weights equal by their mean, without an outer step. If somebody has set them, they stay so."""
        self._run[self._take_means]()

    def average_state(self) -> bool:
        """Averages the optimizer's state; counters and the loss scale become the first replica's.

        Returns whether there is any.
        """
        if self._state or self._first:
            self._run[self._average_state]()
        return bool(self._state or self._first)

    def begin(self) -> None:
        """Takes the present weights as those that the outer optimizer starts from."""
        if self._anchors:
            self._run[self._remember]()

    def _average_weights(self) -> None:
        variables = [*self._trained, *self._averaged]
        means = _means(variables)
        if self._outer is None:
            _assign(variables, means)
        else:
            changes = [tf.cast(anchor, mean.dtype) - mean for anchor, mean in zip(self._anchors, means, strict=False)]
            _assign(self._trained, self._anchors)
            with alone(), updating_locally(self._outer):
                self._outer.apply(changes, self._trained)
            _assign(self._averaged, means[len(self._trained) :])
        for variable in self._trained:
            if variable.constraint is not None:
                variable.assign(variable.constraint(variable))
        self._remember()

    def _take_means(self) -> None:
        variables = [*self._trained, *self._averaged]
        _assign(variables, _means(variables))

    def _average_state(self) -> None:
        _assign(self._state, _means(self._state))
        first = tf.equal(_context().replica_id_in_sync_group, 0)
        own = [_read(variable) for variable in self._first]
        _assign(self._first, _summed([value * tf.cast(first, value.dtype) for value in own]))

    def _remember(self) -> None:
        for anchor, variable in zip(self._anchors, self._trained, strict=False):
            anchor.assign(variable)


def _statistics(model: keras.Model) -> Iterable[keras.Variable]:
    """What layers compute from their input while they train, such as BatchNormalization's moving averages."""
    for layer in model._flatten_layers():
        if layer.trainable:
            own = [*layer._non_trainable_variables]
            yield from (variable for variable in own if keras.backend.is_float_dtype(variable.dtype))


def _state(optimizer: Any) -> tuple[list[keras.Variable], list[keras.Variable]]:
    """The variables that differ between replicas: those to average, and those to take from the first replica."""
    own = [variable for variable in inner(optimizer).variables if variable.aggregation == "none"]
    if inner(optimizer) is optimizer:
        return own, []
    return own, [optimizer.dynamic_scale, optimizer.step_counter, inner(optimizer)._iterations]


def _assign(variables: Sequence[keras.Variable], values: Sequence[Any]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(tf.cast(value, variable.dtype))


def _means(variables: Sequence[keras.Variable]) -> list[tf.Tensor]:
    """The replicas' mean of each variable, in 32 bits at least."""
    replicas = _context().num_replicas_in_sync
    return [total / replicas for total in _summed([_read(variable) for variable in variables])]


def _read(variable: keras.Variable) -> tf.Tensor:
    with tf.device(variable.value.device):  # the all-reduce needs a tensor with a device
        value = tf.identity(variable.value)
        return tf.cast(value, tf.float32) if value.dtype in (tf.float16, tf.bfloat16) else value


def _summed(values: list[tf.Tensor]) -> list[tf.Tensor]:
    """Sums over the replicas: one all-reduce for each dtype, as TensorFlow packs only equal ones."""
    summed = dict[int, tf.Tensor]()
    for dtype in dict.fromkeys(value.dtype for value in values):  # in the same order in all processes
        these = [at for at, value in enumerate(values) if value.dtype == dtype]
        totals = _context().all_reduce(tf.distribute.ReduceOp.SUM, [values[at] for at in these])
        summed |= dict(zip(these, totals, strict=True))
    return [summed[at] for at in range(len(values))]


def _context() -> Any:
    return tf.distribute.get_replica_context()
