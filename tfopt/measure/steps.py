"""The time of a training step: alone, or through `model.fit` with its input."""

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from numbers import Integral
from typing import Any

import keras
import tensorflow as tf

from tfopt.errors import TfoptError
from tfopt.measure.state import StatePreserver, traced
from tfopt.measure.times import StepTimes
from tfopt.model.batches import Data, as_dataset, batch_size, first_batch, is_endless, on_device, repeated
from tfopt.model.layers import graph_operations
from tfopt.model.require import require_compiled

_SAMPLES = 10
_WARMUP = 3
_Clock = Callable[[], float]


def step_time(
    model: keras.Model, data: Data, steps: int = 50, *, warmup: int = _WARMUP, clock: _Clock = time.perf_counter
) -> StepTimes:
    """Measures the training step alone, on one batch that already lies on the device.

    Use it to see what the computation costs; `fit_time` adds the input and `fit` itself. The steps are real training
    steps. Afterwards the model is as it was, bit for bit: weights, optimizer, metrics, seeds and compile settings. A
    model that was not built yet is built. (A dataset is read: one that reshuffles moves on to its next order. Give one
    batch, or a dataset of its own, where a training with a seed follows.)

    Args:
        model: A compiled model.
        data: A tf.data.Dataset of batches, whose first one is used, or one batch: (x, y[, sample_weight]).
        steps: Steps to time, in ten blocks with one wait for the device at the end of each. Choose so many that a
            block lasts 20 ms or longer, or the wait itself weighs in.
        warmup: Steps that run first and are not timed, after the very first, which is reported apart.
        clock: Seconds, monotonic.

    Returns:
        The raw samples, with their median and interval.

    Raises:
        ValueError: The model is not compiled, or `steps` or `warmup` is out of range.
        TypeError: `data` is neither a dataset nor a batch.
        tfopt.errors.PipelineError: The dataset is empty.
        tfopt.errors.UnsupportedError: The model runs eagerly, and TensorFlow cannot trace its step, so that not all it
            changes could be given back.

    Example:
        >>> print(tfopt.measure.step_time(model, dataset))
        3.21 ms a step (95 %: 3.18–3.25, 9,969 examples/s; first 0.84 s)
    """
    return StepTimer(model, data, clock=clock)(steps, warmup=warmup)


def fit_time(
    model: keras.Model,
    data: Data,
    steps: int = 50,
    *,
    warmup: int = _WARMUP,
    callbacks: Sequence[keras.callbacks.Callback] = (),
    clock: _Clock = time.perf_counter,
) -> StepTimes:
    """Measures a training step through `model.fit`: input, step and what `fit` and its callbacks do on each step.

    The model comes back as it was, as from `step_time`, whose arguments these are. `data` is repeated as often as the
    steps need it; a single batch is fed again on every step. What nothing may follow (a pipeline that copies to the
    GPU, `cache="device"`) runs in epochs instead, whose beginning is timed with the steps.

    Args:
        model: A compiled model.
        data: A tf.data.Dataset of batches, or one batch: (x, y[, sample_weight]).
        steps: Steps to time, in ten blocks.
        warmup: Steps that run first and are not timed, after the very first, which is reported apart.
        callbacks: Given to `fit`.
        clock: Seconds, monotonic.

    Returns:
        The raw samples, with their median and interval.

    Raises:
        ValueError, TypeError, tfopt.errors.PipelineError, tfopt.errors.UnsupportedError: As for `step_time`.
        ValueError: A dataset that cannot be repeated has no whole number of executions.
        tfopt.errors.TfoptError: A callback ended the fit too early.

    Example:
        >>> print(tfopt.measure.fit_time(model, dataset, steps=100))
        3.40 ms a step (95 %: 3.31–3.52, 9,412 examples/s; first 0.91 s)
    """
    return FitTimer(model, data, callbacks=callbacks, clock=clock)(steps, warmup=warmup)


class StepTimer:
    """`step_time` to be called again and again: traced and compiled once. For `interleave`.

    Args:
        model, data, clock: As for `step_time`.
        jit_compile: Whether the step runs under XLA. None: as the model was compiled.
    """

    def __init__(
        self,
        model: keras.Model,
        data: Data,
        *,
        jit_compile: bool | None = None,
        clock: _Clock = time.perf_counter,
    ):
        self._model = model
        self._clock = clock
        self._batch = on_device(model, first_batch(require_compiled(model), as_dataset(data)))
        started = clock()
        self._step, self._graph = traced(model, self._batch, jit_compile=jit_compile)
        self._first_step_seconds = clock() - started
        self._state = StatePreserver(model, also=self._graph.variables)
        self._compiled = False

    def __call__(self, steps: int = 50, *, warmup: int = _WARMUP, samples: int = _SAMPLES) -> StepTimes:
        """Runs the steps and gives the model back unchanged; arguments and result as `step_time`'s.

        Args:
            steps: Steps to time.
            warmup: Steps that run first and are not timed.
            samples: Blocks that the steps are divided into, with one wait for the device at the end of each.
        """
        block = _block(steps, warmup, samples)
        with self._state.preserved():
            self._compile()
            for _ in range(warmup):
                self._step(self._batch)
            wait()
            times = [self._time(block) for _ in range(min(steps, samples))]
        return StepTimes(
            repeats_ms=(tuple(times),),
            steps_per_sample=block,
            first_step_seconds=self._first_step_seconds,
            examples_per_step=batch_size(self._model, self._batch),
        )

    @property
    def draws_random_numbers(self) -> bool:
        """Whether the step holds random operations, such as dropout's."""
        drawing = ("Random", "TruncatedNormal", "Multinomial")
        return any(name in node.op for node in graph_operations(self._graph) for name in drawing)

    def state_after(self, steps: int) -> tuple[list[Any], list[Any]]:
        """Runs `steps` steps from the model as it is, and takes them back.

        Returns:
            What the optimizer then keeps of the gradients (momentum and the like; nothing for plain SGD), and the
            trainable weights, both as arrays.
        """
        with self._state.preserved():
            for _ in range(steps):
                self._step(self._batch)
            kept = self._model.optimizer.variables if self._model.optimizer else []
            # Counters and rates are scalars.
            slots = [variable.numpy() for variable in kept if len(variable.shape) > 0]
            return slots, [weight.numpy() for weight in self._model.trainable_variables]

    def _compile(self) -> None:
        """Runs the first step, which compiles."""
        if not self._compiled:
            started = self._clock()
            self._step(self._batch)
            wait()
            self._first_step_seconds += self._clock() - started
            self._compiled = True

    def _time(self, block: int) -> float:
        started = self._clock()
        for _ in range(block):
            self._step(self._batch)
        wait()
        return (self._clock() - started) * 1000 / block


class FitTimer:
    """`fit_time` to be called again and again: traced and compiled once. For `interleave`."""

    def __init__(
        self,
        model: keras.Model,
        data: Data,
        *,
        callbacks: Sequence[keras.callbacks.Callback] = (),
        clock: _Clock = time.perf_counter,
    ):
        self._model = model
        self._clock = clock
        self._callbacks = callbacks
        self._dataset = repeated(as_dataset(data))
        self._batch = first_batch(require_compiled(model), self._dataset)
        _, graph = traced(model, self._batch)
        self._state = StatePreserver(model, also=graph.variables)
        self._train_function: Any = None
        self._first_step_seconds = 0.0

    def __call__(self, steps: int = 50, *, warmup: int = _WARMUP, samples: int = _SAMPLES) -> StepTimes:
        """Runs the steps and gives the model back unchanged; arguments and result as `StepTimer`'s.

        With `steps_per_execution` above one, warm-up and samples are rounded up to whole executions.
        """
        block, samples, once = _block(steps, warmup, samples), min(steps, samples), self._model.steps_per_execution
        block, begin = _rounded_up(block, once), once + _rounded_up(warmup, once)
        marks = _Marks(self._clock, {once, *range(begin, begin + block * samples + 1, block)})
        with self._state.preserved():
            self._fit(begin + block * samples, marks)
        ends = [marks.passed[begin + block * number] for number in range(samples + 1)]
        return StepTimes(
            repeats_ms=(tuple((end - start) * 1000 / block for start, end in pairwise(ends)),),
            steps_per_sample=block,
            first_step_seconds=self._first_step_seconds,
            examples_per_step=batch_size(self._model, self._batch),
        )

    @property
    def train_function(self) -> Any:
        """The function that `fit` runs, compiled by the first call; None before. To fit on with, without another."""
        return self._train_function

    def _fit(self, steps: int, marks: "_Marks") -> None:
        """Fits for that many steps, with the training function of the calls before."""
        self._model.train_function = self._train_function
        callbacks = [*self._callbacks, marks]
        # What has an end is fed in epochs, and the last mark stops the fit.
        length = {"steps_per_epoch": steps} if self._goes_on() else {"epochs": steps}
        # shuffle is the dataset's own business; True would only warn.
        self._model.fit(self._dataset, **length, verbose=0, shuffle=False, callbacks=callbacks)
        if steps not in marks.passed:
            raise TfoptError(
                f"Expected fit to run {steps} steps. Found that it ended after {marks.done}: a callback stopped it. "
                "Measure without that callback."
            )
        if self._train_function is None:
            self._train_function = self._model.train_function
            self._first_step_seconds = marks.passed[self._model.steps_per_execution] - marks.started

    def _goes_on(self) -> bool:
        """Whether the dataset has no end; one with an end has to have only whole executions."""
        batches, once = int(self._dataset.cardinality()), self._model.steps_per_execution
        if is_endless(self._dataset):
            return True
        if once > 1 and (batches < 0 or batches % once):
            raise ValueError(
                f"Expected a multiple of steps_per_execution={once} batches, in a dataset that ends in a copy to a "
                f"device or has a device stage. Found {batches if batches >= 0 else 'an unknown number'}. Build it "
                "with device=None, or compile the model without steps_per_execution."
            )
        return False


class _Marks(keras.callbacks.Callback):
    """Waits for the device and reads the clock after each of the given steps; ends the fit with the last."""

    def __init__(self, clock: _Clock, due: set[int]):
        super().__init__()
        self._clock = clock
        self._due, self._last = due, max(due)
        self.started = 0.0
        self.done = 0
        self._before = 0  # this epoch
        self.passed: dict[int, float] = {}

    def on_train_begin(self, logs: Any = None) -> None:
        self.started = self._clock()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._before = self.done

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.done = self._before + batch + 1
        if self.done in self._due:
            wait()
            self.passed[self.done] = self._clock()
        if self.done >= self._last:
            self.model.stop_training = True


def wait() -> None:
    """Waits until every device of this process has done what it was given."""
    try:
        tf.test.experimental.sync_devices()
    except tf.errors.InternalError:  # so it ends under MultiWorkerMirroredStrategy, whose devices are a cluster's
        for gpu in tf.config.list_logical_devices("GPU"):
            with tf.device(gpu.name):
                tf.zeros(()).numpy()  # comes back after what was given to the GPU before


def _block(steps: int, warmup: int, samples: int) -> int:
    """How many steps make one sample."""
    for name, value, least in (("steps", steps, 1), ("warmup", warmup, 0), ("samples", samples, 1)):
        if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
            raise ValueError(f"Expected {name} to be an integer of at least {least}. Received: {name}={value!r}.")
    return max(1, steps // samples)


def _rounded_up(steps: int, to: int) -> int:
    """The least multiple of `to` that is not below `steps`."""
    return -(-steps // to) * to
