"""The arms of an experiment: the training as it stands, or with something changed, timed through `fit`."""

import contextlib
import io
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from tfopt.diagnosis.techniques import Change
from tfopt.diagnosis.training import Training, without_epoch_ends, writing_elsewhere
from tfopt.kernels.replacing import has_replacement
from tfopt.measure import FitTimer, StepTimer, StepTimes
from tfopt.measure.timers import wait

_SAMPLES = 3  # blocks of steps in a round, so that a hiccup in one does not count; with a wait at the end of each
_WARMUP = 2


class FitArm:
    """Times `fit` as the training stands, but for what is given; compiles in its first call.

    Args:
        training: The training.
        dataset: Instead of its own.
        without: Callbacks to leave out.
        changes: What to change in the model while the arm runs.
    """

    def __init__(
        self,
        training: Training,
        *,
        dataset: tf.data.Dataset | None = None,
        without: Sequence[keras.callbacks.Callback] = (),
        changes: Sequence[Change] = (),
    ):
        self._callbacks = [one for one in training.callbacks if one not in without]
        self._changes, self._model = changes, training.model
        self._timer = FitTimer(
            training.model,
            training.dataset if dataset is None else dataset,
            callbacks=self._callbacks,
            traced=(training.batch, training.graph),
        )

    def __call__(self, steps: int) -> StepTimes:
        """Times that many steps."""
        callbacks = self._callbacks
        with changed(self._model, self._changes), writing_elsewhere(callbacks), without_epoch_ends(callbacks), quiet():
            return self._timer(steps, warmup=_WARMUP, samples=_SAMPLES)


class StepArm:
    """Times the step alone, without `fit`, on one batch that stays in memory.

    Args:
        training: The training.
        twice: On a batch twice as large, of which half the time counts.
        changes: What to change in the model while the arm runs.
    """

    def __init__(self, training: Training, *, twice: bool = False, changes: Sequence[Change] = ()):
        self._model, self._twice, self._changes = training.model, twice, changes
        with changed(self._model, changes):
            self._timer = StepTimer(self._model, training.twice() if twice else training.resident)

    def __call__(self, steps: int) -> StepTimes:
        """Times that many steps."""
        with changed(self._model, self._changes):
            times = self._timer(steps, warmup=_WARMUP, samples=_SAMPLES)
        if not self._twice:
            return times
        halves = tuple(tuple(sample / 2 for sample in turn) for turn in times.repeats_ms)
        return replace(times, repeats_ms=halves, examples_per_step=(times.examples_per_step or 0) // 2)


class ReduceArm:
    """Times the all-reduce of the gradients alone, as the optimizer asks for it."""

    def __init__(self, training: Training, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        strategy, variables = training.model.distribute_strategy, training.model.trainable_variables
        self.mib = sum(math.prod(one.shape) * tf.as_dtype(one.dtype).size for one in variables) / 2**20

        def reduce() -> Any:
            values = [tf.convert_to_tensor(one.value) for one in variables]
            return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, values)

        self._reduce = tf.function(lambda: strategy.run(reduce), autograph=False)

    def __call__(self, steps: int) -> StepTimes:
        """Times that many of them."""
        block = max(1, steps // _SAMPLES)
        first = self._ms(_WARMUP)
        samples = tuple(self._ms(block) for _ in range(_SAMPLES))
        return StepTimes(repeats_ms=(samples,), steps_per_sample=block, first_step_seconds=first / 1000)

    def _ms(self, times: int) -> float:
        started = self._clock()
        for _ in range(times):
            self._reduce()
        wait()
        return (self._clock() - started) * 1000 / times


def one_replica(training: Training) -> Callable[[int], StepTimes] | None:
    """Times a copy of the model on one device, on one replica's share of the batch; None if there is no true copy."""
    model = training.model
    if tf.distribute.has_strategy():  # the copy would have several replicas, too
        return None
    local = model.distribute_strategy.experimental_local_results
    share = tf.nest.map_structure(lambda part: local(part)[0], training.batch)
    if any(has_replacement(layer) for layer in model._flatten_layers()):  # which a copy lacks
        return None
    try:
        copy = keras.models.clone_model(model)
        if type(copy).train_step is not type(model).train_step:  # of a Functional subclass it is no subclass
            return None
        copy.compile_from_config(model.get_compile_config())
        copy.jit_compile = model.jit_compile
        timer = StepTimer(copy, tf.data.Dataset.from_tensors(share))
        timer(1, warmup=0)
    except (TypeError, ValueError, AttributeError, RuntimeError, tf.errors.OpError):
        return None  # whatever the model's class and its config do
    return partial(timer, warmup=_WARMUP, samples=_SAMPLES)


@contextmanager
def changed(model: keras.Model, changes: Sequence[Change]) -> Iterator[None]:
    """Makes several changes for a block of code."""
    with ExitStack() as stack:
        for change in changes:
            stack.enter_context(change(model))
        yield


def quiet() -> AbstractContextManager[Any]:
    """Keeps what callbacks print from the terminal."""
    return contextlib.redirect_stdout(io.StringIO())
