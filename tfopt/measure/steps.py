"""The time of a training step: alone, or through `model.fit` with its input."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.measure.state import build, preserved
from tfopt.measure.times import StepTimes

Data = Any
"""A tf.data.Dataset of batches (x, y[, sample_weight]), or one such batch as a tuple."""

_SAMPLES = 10
_WARMUP = 3
_Clock = Callable[[], float]


def step_time(
    model: keras.Model, data: Data, steps: int = 50, *, warmup: int = _WARMUP, clock: _Clock = time.perf_counter
) -> StepTimes:
    """Measures the training step alone, on one batch that already lies on the device.

    Use it to see what the computation costs; `fit_time` adds the input and `fit` itself. The steps are real training
    steps. Afterwards the model is as it was, bit for bit: weights, optimizer, metrics, seeds and compile settings. A
    model that was not built yet is built.

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
    steps need it; a single batch is fed again on every step.

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
        ValueError, TypeError, tfopt.errors.PipelineError: As for `step_time`.
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
        self._jit_compile = jit_compile
        self._dataset = _dataset(_compiled(model), data)
        self._batch = _first_batch(model, self._dataset)
        build(model, self._batch)
        self._batch = _on_device(model, self._batch)
        self._step: Callable[..., Any] | None = None
        self._graph: tf.Graph | None = None
        self._first_step_seconds = 0.0

    def __call__(self, steps: int = 50, *, warmup: int = _WARMUP) -> StepTimes:
        """Runs the steps and gives the model back unchanged; arguments and result as `step_time`'s."""
        block = _block(steps, warmup)
        step = self._prepared()
        with preserved(self._model, also=_variables(self._graph)):
            for _ in range(warmup):
                step(self._batch)
            wait()
            samples = [self._time(step, block) for _ in range(min(steps, _SAMPLES))]
        return StepTimes(
            repeats_ms=(tuple(samples),),
            steps_per_sample=block,
            first_step_seconds=self._first_step_seconds,
            examples_per_step=_batch_size(self._model, self._batch),
        )

    @property
    def draws_random_numbers(self) -> bool:
        """Whether the step, once it has run, was seen to hold random operations, such as dropout's."""
        if self._graph is None:
            return False
        definition = self._graph.as_graph_def()
        nodes = [*definition.node, *(node for function in definition.library.function for node in function.node_def)]
        return any("Random" in node.op or "TruncatedNormal" in node.op or "Multinomial" in node.op for node in nodes)

    def weights_after(self, steps: int) -> list[Any]:
        """Runs `steps` steps from the model as it is; returns its trainable weights as arrays, and takes all back."""
        step = self._prepared()
        with preserved(self._model, also=_variables(self._graph)):
            for _ in range(steps):
                step(self._batch)
            return [weight.numpy() for weight in self._model.trainable_variables]

    def _prepared(self) -> Callable[..., Any]:
        """The step, after its first run, which traces and compiles."""
        if self._step is None:
            started = self._clock()
            step, self._graph = _traced(self._model, self._batch, self._jit_compile)
            traced = self._clock() - started
            with preserved(self._model, also=_variables(self._graph)):
                resumed = self._clock()
                step(self._batch)
                wait()
                self._first_step_seconds = traced + self._clock() - resumed
            self._step = step
        return self._step

    def _time(self, step: Callable[..., Any], block: int) -> float:
        started = self._clock()
        for _ in range(block):
            step(self._batch)
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
        self._dataset = _dataset(_compiled(model), data)
        self._batch = _first_batch(model, self._dataset)
        build(model, self._batch)
        _, self._graph = _traced(model, self._batch, model.jit_compile)
        self._train_function: Any = None
        self._first_step_seconds = 0.0

    def __call__(self, steps: int = 50, *, warmup: int = _WARMUP) -> StepTimes:
        """Runs the steps and gives the model back unchanged; arguments and result as `fit_time`'s."""
        block, samples = _block(steps, warmup), min(steps, _SAMPLES)
        marks = _Marks(self._clock, [1, *range(1 + warmup, 2 + warmup + block * samples, block)])
        with preserved(self._model, also=_variables(self._graph)):
            self._model.train_function = self._train_function
            self._model.fit(
                self._dataset.repeat(),
                steps_per_epoch=1 + warmup + block * samples,
                verbose=0,
                shuffle=False,  # the dataset's own business; True would only warn
                callbacks=[*self._callbacks, marks],
            )
            if self._train_function is None:
                self._train_function = self._model.train_function
                self._first_step_seconds = marks.passed[0][1] - marks.started
        (at, start), *ends = marks.passed[1:]
        times = []
        for step, end in ends:
            times.append((end - start) * 1000 / (step - at))
            at, start = step, end
        return StepTimes(
            repeats_ms=(tuple(times),),
            steps_per_sample=block,
            first_step_seconds=self._first_step_seconds,
            examples_per_step=_batch_size(self._model, self._batch),
        )


class _Marks(keras.callbacks.Callback):
    """Waits for the device and reads the clock after each of the given steps."""

    def __init__(self, clock: _Clock, steps: Sequence[int]):
        super().__init__()
        self._clock = clock
        self._due = list(steps)
        self.started = 0.0
        self.passed: list[tuple[int, float]] = []

    def on_train_begin(self, logs: Any = None) -> None:
        self.started = self._clock()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        # With steps_per_execution above one, several marks may lie behind one call; the last of them counts.
        if self._due and batch + 1 >= self._due[0]:
            wait()
            self.passed.append((batch + 1, self._clock()))
            while self._due and batch + 1 >= self._due[0]:
                self._due.pop(0)


def _traced(
    model: keras.Model, batch: tuple[Any, ...], jit_compile: bool | None
) -> tuple[Callable[..., Any], tf.Graph | None]:
    """The training step as `fit` runs it, and its graph."""

    @tf.autograph.experimental.do_not_convert
    def step(batch: Any) -> Any:
        return model.distribute_strategy.run(model.train_step, args=(batch,))

    if model.run_eagerly:
        return step, None
    function = tf.function(step, jit_compile=model.jit_compile if jit_compile is None else jit_compile)
    return function, function.get_concrete_function(batch).graph


def _variables(graph: tf.Graph | None) -> Sequence[tf.Variable]:
    """Every variable that a step touches, Keras' own or not."""
    return () if graph is None else graph.variables


def wait() -> None:
    """Waits until every device has done what it was given."""
    tf.test.experimental.sync_devices()


def _block(steps: int, warmup: int) -> int:
    """How many steps make one sample."""
    for name, value, least in (("steps", steps, 1), ("warmup", warmup, 0)):
        if not isinstance(value, int) or value < least:
            raise ValueError(f"Expected {name} to be an integer of at least {least}. Received: {name}={value!r}.")
    return max(1, steps // _SAMPLES)


def _compiled(model: keras.Model) -> keras.Model:
    if not isinstance(model, keras.Model):
        raise TypeError(f"Expected a keras.Model. Received: {model!r} of type {type(model).__name__}.")
    if not model.compiled:
        raise ValueError(
            f"Expected a compiled model. Received: {model.name!r}, which is not compiled. "
            "Call model.compile(optimizer, loss) first."
        )
    return model


def _dataset(model: keras.Model, data: Data) -> tf.data.Dataset:
    if isinstance(data, tf.data.Dataset):
        return data
    if isinstance(data, tuple) and 1 <= len(data) <= 3:
        return tf.data.Dataset.from_tensors(data)
    raise TypeError(
        "Expected a tf.data.Dataset of batches or one batch, a tuple (x, y[, sample_weight]). "
        f"Received: {type(data).__name__}. Make a dataset with tfopt.pipelines.build_pipeline(...)."
    )


def _first_batch(model: keras.Model, dataset: tf.data.Dataset) -> tuple[Any, ...]:
    """The first batch as `fit` would hand it to the step: under a strategy, one part for each replica."""
    batch = next(iter(model.distribute_strategy.experimental_distribute_dataset(dataset)), None)
    if batch is None:
        raise PipelineError(
            "Expected a dataset of at least one batch. Found none. "
            "Check its source, and that drop_remainder leaves a batch: it needs batch_size examples."
        )
    return batch if isinstance(batch, tuple) else (batch,)


def _on_device(model: keras.Model, batch: tuple[Any, ...]) -> tuple[Any, ...]:
    """Copies a batch to the GPU, where there is one; a strategy has done so already."""
    if isinstance(model.distribute_strategy, tf.distribute.MirroredStrategy) or not tf.config.list_logical_devices(
        "GPU"
    ):
        return batch
    with tf.device("/GPU:0"):
        return tf.nest.map_structure(tf.identity, batch)


def _batch_size(model: keras.Model, batch: tuple[Any, ...]) -> int:
    """Examples a step, over all replicas of this process."""
    return sum(len(part) for part in model.distribute_strategy.experimental_local_results(tf.nest.flatten(batch)[0]))
