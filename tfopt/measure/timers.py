"""The time of a training step: alone, or through `model.fit` with its input."""

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfopt import checks
from tfopt.errors import TfoptError
from tfopt.measure.times import StepTimes
from tfopt.model.batches import (
    Data,
    as_dataset,
    batch_size,
    first_batch,
    is_endless,
    on_device,
    repeated,
    steps_at_once,
)
from tfopt.model.batches import one_batch as one_batch
from tfopt.model.layers import graph_operations, require_optimizer
from tfopt.model.state import StatePreserver, trace_train_step
from tfopt.model.state import preserved as preserved
from tfopt.model.undoing import only_looks

_SAMPLES = 10
_WARMUP = 3


@only_looks
def step_time(model: keras.Model, data: Data, steps: int = 50, *, warmup: int = _WARMUP) -> StepTimes:
    """Measures the training step alone, on one batch that is already on the device.

    Arrays (x, y) are that one batch, whatever their length: batch a data set of 3,000 rows first.

    Use it to see what the computation costs; `fit_time` adds the input and `fit` itself. The steps are real training
    steps, after which the model is unchanged, bit for bit: weights, optimizer, metrics, seeds and compile settings. A
    model that is not built yet is built. Reading a dataset that reshuffles advances it to its next order; before a
    seeded training, pass one batch or a separate dataset.

    Args:
        model: A compiled model.
        data: A tf.data.Dataset of batches, whose first one is used, or one batch: (x, y[, sample_weight]).
        steps: Steps to time, in ten blocks with one wait for the device at the end of each. Choose enough that a block
            lasts at least 20 ms, so that the wait itself does not count.
        warmup: Untimed steps after the very first one, which is reported separately.

    Returns:
        The raw samples, with their median and interval.

    Raises:
        ValueError: If the model is not compiled with an optimizer, or `steps` or `warmup` is out of range.
        TypeError: If `model` is not a Keras model, or `data` neither a dataset nor a batch.
        tfopt.errors.PipelineError: If the dataset is empty.
        tfopt.errors.UnsupportedError: If the model runs eagerly and its step cannot be traced, so that not everything
            it changes could be restored.

    Example:
        >>> print(tfopt.measure.step_time(model, dataset))
        3.21 ms a step of 32 examples (samples: 3.18–3.25, 9,969 examples/s; first 0.84 s)
    """
    return StepTimer(model, data)(steps, warmup=warmup)


@only_looks
def fit_time(
    model: keras.Model,
    data: Data,
    steps: int = 50,
    *,
    warmup: int = _WARMUP,
    callbacks: Sequence[keras.callbacks.Callback] = (),
) -> StepTimes:
    """Measures a training step through `model.fit`: the input, the step, and what `fit` and its callbacks add.

    The model comes back unchanged, as from `step_time`. `data` is repeated as needed; arrays (x, y) are one batch, fed
    whole at every step. A dataset whose last stage must stay last (a copy to the GPU, `cache="device"`) runs in epochs
    instead, whose start is timed with the steps.

    Args:
        model, data, steps, warmup: As for `step_time`.
        callbacks: Passed to `fit`.

    Returns:
        The raw samples, with their median and interval.

    Raises:
        ValueError: As for `step_time`, or if a dataset that cannot be repeated does not divide into whole executions.
        TypeError, tfopt.errors.PipelineError, tfopt.errors.UnsupportedError: As for `step_time`.
        tfopt.errors.TfoptError: If a callback stops the fit early.

    Example:
        >>> print(tfopt.measure.fit_time(model, dataset, steps=100))
        3.40 ms a step of 32 examples (samples: 3.31–3.52, 9,412 examples/s; first 0.91 s)
    """
    return FitTimer(model, data, callbacks=callbacks)(steps, warmup=warmup)


class TrainedState(NamedTuple):
    """What training steps change, as arrays."""

    slots: list[Any]
    """The optimizer's, such as momentum; none for plain SGD."""
    weights: list[Any]
    """The trainable ones."""
    updates: int
    """How many the optimizer has made. Steps whose gradients overflow make none if it scales the loss."""


class StepTimer:
    """`step_time` as an object for `interleave`: it traces and compiles once, and measures at each call.

    Args:
        model, data: As for `step_time`.
        jit_compile: Whether the step runs under XLA. None: as the model was compiled.
        clock: Seconds; `time.process_time` measures what the step takes of the CPUs. Default: time.perf_counter.
    """

    def __init__(
        self,
        model: keras.Model,
        data: Data,
        *,
        jit_compile: bool | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        require_optimizer(model)
        self._model = model
        self._clock = clock
        self._batch = on_device(model, first_batch(model, as_dataset(data)))
        started = clock()
        self._step, self._graph = trace_train_step(model, self._batch, jit_compile=jit_compile)
        self._first_step_seconds = clock() - started
        self._state = StatePreserver(model, also=self._graph.variables)
        self._compiled = False

    def __call__(self, steps: int = 50, *, warmup: int = _WARMUP, samples: int = _SAMPLES) -> StepTimes:
        """Measures once and leaves the model unchanged, as `step_time` does.

        Args:
            steps: Steps to time.
            warmup: Untimed steps before them.
            samples: How many blocks to divide the steps into, with one wait for the device at the end of each.
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
        """Whether the step has random operations, such as dropout's."""
        drawing = ("Random", "TruncatedNormal", "Multinomial")
        return any(name in node.op for node in graph_operations(self._graph) for name in drawing)

    @property
    def graph(self) -> tf.Graph:
        """The traced step."""
        return self._graph

    def results(self) -> Any:
        """Runs one step, restores the model, and returns what the step returned, as arrays."""
        with self._state.preserved():
            return tf.nest.map_structure(lambda tensor: tensor.numpy(), self._step(self._batch))

    def run_on(self, batches: Iterable[Any]) -> None:
        """Runs a step on each of these batches, of the same shapes as its own, and restores the model."""
        with self._state.preserved():
            for batch in batches:
                self._step(on_device(self._model, batch))
            wait()

    def state_after(self, steps: int) -> TrainedState:
        """Runs `steps` steps, restores the model, and returns what the steps trained."""
        with self._state.preserved():
            for _ in range(steps):
                self._step(self._batch)
            optimizer = self._model.optimizer
            kept = optimizer.variables if optimizer else []
            return TrainedState(
                # Counters and rates are scalars.
                slots=[variable.numpy() for variable in kept if len(variable.shape) > 0],
                weights=[weight.numpy() for weight in self._model.trainable_variables],
                updates=int(optimizer.iterations) if optimizer else steps,
            )

    def _compile(self) -> None:
        """Runs the first step, which compiles, unless it has run."""
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
    """`fit_time` as an object for `interleave`: it traces and compiles once, and measures at each call.

    Args:
        model, data, callbacks: As for `fit_time`.
        traced: A batch of `data` and the graph of the model's step on it, if known: then neither is made here.
    """

    def __init__(
        self,
        model: keras.Model,
        data: Data,
        *,
        callbacks: Sequence[keras.callbacks.Callback] = (),
        traced: tuple[Any, tf.Graph] | None = None,
    ):
        self._model = model
        self._callbacks = callbacks
        self._dataset = repeated(as_dataset(data))
        if traced is None:
            require_optimizer(model)
            batch = first_batch(model, self._dataset)
            traced = batch, trace_train_step(model, batch)[1]
        self._batch, graph = traced
        self._state = StatePreserver(model, also=graph.variables)
        self.train_function: Any = None
        """The function `fit` runs, compiled by the first call, so that a later fit need not compile; None before it."""
        self._first_step_seconds = 0.0

    def __call__(self, steps: int = 50, *, warmup: int = _WARMUP, samples: int = _SAMPLES) -> StepTimes:
        """Measures once and leaves the model unchanged; arguments as for `StepTimer`.

        With `steps_per_execution` above one, or launches of several steps, warm-up and samples are rounded up to whole
        ones.
        """
        block, samples, once = _block(steps, warmup, samples), min(steps, samples), steps_at_once(self._model)
        block, begin = _rounded_up(block, once), once + _rounded_up(warmup, once)
        marks = _Marks({once, *range(begin, begin + block * samples + 1, block)})
        with self._state.preserved():
            self._fit(begin + block * samples, marks)
        ends = [marks.passed[begin + block * number] for number in range(samples + 1)]
        return StepTimes(
            repeats_ms=(tuple((end - start) * 1000 / block for start, end in pairwise(ends)),),
            steps_per_sample=block,
            first_step_seconds=self._first_step_seconds,
            examples_per_step=batch_size(self._model, self._batch),
        )

    def _fit(self, steps: int, marks: "_Marks") -> None:
        """Fits for that many steps, with the training function of earlier calls."""
        self._model.train_function = self.train_function
        callbacks = [*self._callbacks, marks]
        # A dataset with an end is fed in epochs, and the last mark stops the fit.
        length = {"steps_per_epoch": steps} if self._is_endless() else {"epochs": steps}
        # A dataset shuffles itself; with True, Keras would only warn.
        self._model.fit(self._dataset, **length, verbose=0, shuffle=False, callbacks=callbacks)
        if steps not in marks.passed:
            raise TfoptError(
                f"Expected fit to run {steps} steps. Found that it ended after {marks.done}: a callback stopped it, or "
                "the data ended. Measure without that callback, or with data that can be repeated."
            )
        if self.train_function is None:
            self.train_function = self._model.train_function
            self._first_step_seconds = marks.passed[steps_at_once(self._model)] - marks.started

    def _is_endless(self) -> bool:
        """Whether the dataset is endless; one that ends must divide into whole executions."""
        batches, once = int(self._dataset.cardinality()), self._model.steps_per_execution
        if is_endless(self._dataset):
            return True
        if once > 1 and (batches < 0 or batches % once):
            raise ValueError(
                f"Expected a multiple of steps_per_execution={once} batches in a dataset that ends with a copy to a "
                f"device or a device stage. Found {batches if batches >= 0 else 'an unknown number'}. Build it with "
                "device=None, or compile the model without steps_per_execution."
            )
        return False


class _Marks(keras.callbacks.Callback):
    """Waits for the device and reads the clock after each of the given steps; stops the fit after the last."""

    acts_every = 0  # what it reads within a launch is the time after it

    def __init__(self, due: set[int]):
        super().__init__()
        self._due, self._last = due, max(due)
        self.started = 0.0
        self.done = 0
        self._before = 0  # steps of earlier epochs
        self.passed: dict[int, float] = {}

    def on_train_begin(self, logs: Any = None) -> None:
        self.started = time.perf_counter()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._before = self.done

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.done = self._before + batch + 1
        if self.done in self._due:
            wait()
            self.passed[self.done] = time.perf_counter()
        if self.done >= self._last:
            self.model.stop_training = True


def wait() -> None:
    """Waits until every device of this process has finished its work."""
    try:
        tf.test.experimental.sync_devices()
    except tf.errors.InternalError:  # raised under MultiWorkerMirroredStrategy, whose devices belong to a cluster
        for gpu in tf.config.list_logical_devices("GPU"):
            with tf.device(gpu.name):
                tf.zeros(()).numpy()  # returns after all earlier work of the GPU


def _block(steps: int, warmup: int, samples: int) -> int:
    """How many steps make one sample."""
    for name, value, least in (("steps", steps, 1), ("warmup", warmup, 0), ("samples", samples, 1)):
        checks.count(name, value, "Give a number of steps or blocks.", least=least)
    return max(1, steps // samples)


def _rounded_up(steps: int, to: int) -> int:
    """`steps`, rounded up to a multiple of `to`."""
    return -(-steps // to) * to
