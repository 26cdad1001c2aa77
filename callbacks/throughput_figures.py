"""What ThroughputLogger's figures are made of: step times, the wait for input, the time left, FLOPs per second."""

import threading
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfopt.callbacks.shared.histogram import Histogram
from tfopt.callbacks.shared.running_fit import variable_of_a_caller
from tfopt.hardware import gpus
from tfopt.hardware.peaks import peak_tflops
from tfopt.text import listed
from tfopt.warn import warn_once

_GAPS_KEPT = 100  # by tf.data
_FEWEST_GAPS, _FEWEST_SECONDS = 5, 1.0  # a share from fewer gaps in less time varies too much
_PARTS_NAMED = 3
_LONGEST_COUNT_SECONDS = 10.0
_THREAD = "tfopt-flops"
_PERCENTS = (50, 95, 99)
_STEP_TIMES = ("step_time_ms", "step_time_p95_ms", "step_time_p99_ms")


class StepWindow:
    """A number of steps, their total time, and samples of the time of one."""

    def __init__(self) -> None:
        self.steps = 0
        self.seconds = 0.0
        self.samples: list[float] = []
        """Seconds."""
        self.steps_of_samples: list[int] = []
        """How many steps each is the mean of."""

    def add(self, steps: int, seconds: float, *, sampled: bool) -> None:
        """Adds steps with their total time; if `sampled`, their mean is a sample of one step's time."""
        self.steps += steps
        self.seconds += seconds
        if sampled:
            self.samples.append(seconds / steps)
            self.steps_of_samples.append(steps)

    def step_times(self) -> dict[str, float]:
        """Returns the samples' percentiles in ms, by log key; of the mean if there are no samples."""
        samples = self.samples or [self.seconds / self.steps]
        return _by_key(np.percentile(samples, _PERCENTS).tolist())

    def examples_per_second(self, batch_size: float | None) -> float | None:
        """Returns the rate if every batch is of this size; None if the size or the time is unknown."""
        return self.steps * batch_size / self.seconds if batch_size and self.seconds > 0 else None


class EpochSteps:
    """An epoch's steps, their total time, and how the times of one are distributed, in memory that does not grow."""

    def __init__(self) -> None:
        self.steps = 0
        self.seconds = 0.0
        self._times = Histogram()

    def add(self, window: StepWindow) -> None:
        """Adds the steps of a window."""
        self.steps += window.steps
        self.seconds += window.seconds
        self._times.add(window.samples)

    def step_times(self) -> dict[str, float]:
        """Returns what `StepWindow.step_times` would for all steps, within 1 %."""
        if not self._times.count:
            return _by_key([self.seconds / self.steps] * len(_PERCENTS))
        return _by_key(self._times.percentiles(*_PERCENTS))


def _by_key(seconds: list[float]) -> dict[str, float]:
    """Percentiles of step times, in ms by log key."""
    return {key: 1000 * value for key, value in zip(_STEP_TIMES, seconds, strict=True)}


class TimeLeft:
    """Estimates what is left of a `fit` from its steps so far and the time between one epoch's steps and the next's."""

    def __init__(self) -> None:
        self._steps = self._ends = 0
        self._step_seconds = self.end_seconds = 0.0

    def add_steps(self, steps: int, seconds: float) -> None:
        """Adds steps with their total time."""
        self._steps += steps
        self._step_seconds += seconds

    def add_end(self, seconds: float) -> None:
        """Adds the end of an epoch, which took this long after its last step."""
        self._ends += 1
        self.end_seconds += seconds

    def seconds(self, *, steps: int, ends: int) -> float | None:
        """Returns the time for so many more steps and ends of epochs; None before the first step.

        Ends of epochs count as free until one was seen.
        """
        if not self._steps:
            return None
        end = self.end_seconds / self._ends if self._ends else 0.0
        return steps * self._step_seconds / self._steps + ends * end


@dataclass(slots=True)
class _Balance:
    """Steps with their time, and the gaps of all or most of them."""

    steps: int = 0
    seconds: float = 0.0
    gaps: int = 0
    gap_seconds: float = 0.0

    def wait_percent(self, since: "_Balance") -> float | None:
        gaps, seconds = self.gaps - since.gaps, self.seconds - since.seconds
        if not gaps or seconds <= 0 or (gaps < _FEWEST_GAPS and seconds < _FEWEST_SECONDS):
            return None
        working = (self.steps - since.steps) * (self.gap_seconds - since.gap_seconds) / gaps
        return min(100.0, max(0.0, 100 * (1 - working / seconds)))


def takes_one_batch_per_step(model: keras.Model) -> bool:
    """Whether each step takes one batch, so that the gaps between batches are those between steps."""
    if getattr(model, "steps_per_execution", 1) != 1:
        return False  # a batch is taken while the previous step still runs
    # With eager steps the shares were wrong by up to a half when tried.
    return not (getattr(model, "run_eagerly", False) or tf.config.functions_run_eagerly())


class InputWait:
    """Follows the steps of `fit` and the gaps recorded by the iterator they take their batches from.

    The gap after a batch, until the next one is asked for, is the time in which its step worked; the rest of the step's
    time, before, was waiting. The gap is known once the next step has ended, so each step is added then.

    A share is None if it is unknown: under a distribution strategy, whose iterators record no gaps; for a dataset whose
    autotuning is off; and from fewer than five gaps within a second. An epoch's last step is left out, as no gap
    follows it.
    """

    def __init__(self) -> None:
        self._iterator: Any = None
        self.begin()

    @property
    def room(self) -> int:
        """How many steps may end before they must be added: tf.data forgets older gaps."""
        return _GAPS_KEPT - self._unread

    def begin(self) -> None:
        """Starts a training."""
        self._drop_iterator()
        self._total = _Balance()
        self._seen: dict[str, _Balance] = {}  # the total at each reader's last call
        self._taken = 0  # batches up to the last gap that is counted
        self._unread = 0

    def find(self, *, skip_step: bool) -> bool:
        """Finds the iterator after an epoch's first step, and returns whether it records gaps.

        Call it from `on_train_batch_end`. `skip_step` leaves out the gap of that step, which compiled.
        """
        self._iterator, self._taken = variable_of_a_caller("iterator", tf.data.Iterator), 0
        self._read_gaps()
        self._taken += int(skip_step)
        return self._iterator is not None

    def add(self, seconds: float) -> None:
        """Adds a step after the next one has ended, and reads the gaps before tf.data forgets them."""
        self._total.steps += 1
        self._total.seconds += seconds
        self._unread += 1
        if self._unread >= _GAPS_KEPT:
            self._read()

    def percent(self, reader: str, *, peek: bool = False) -> float | None:
        """Returns the share in percent since this reader's last call; a call that peeks does not count as one."""
        self._read()
        since = self._seen.get(reader, _Balance())
        if not peek:
            self._seen[reader] = replace(self._total)
        return self._total.wait_percent(since)

    def end_epoch(self) -> float | None:
        """Returns the epoch's share in percent, and drops the iterator, which keeps the pipeline's resources alive."""
        percent = self.percent("epoch")
        self._drop_iterator()
        return percent

    def _drop_iterator(self) -> None:
        self._iterator = None

    def _read(self) -> None:
        before, self._unread = self._taken, 0
        gaps = self._read_gaps()
        new = min(self._taken - before, len(gaps))
        if new > 0:
            self._total.gaps += new
            self._total.gap_seconds += sum(gaps[-new:]) / 1e6

    def _read_gaps(self) -> list[int]:
        """Returns the gaps that tf.data remembers, in microseconds."""
        if self._iterator is None:
            return []
        try:
            model = tf.data.experimental.get_model_proto(self._iterator)
        except (tf.errors.OpError, ValueError):  # autotuning is off; not the iterator of one pipeline
            self._iterator = None
            return []
        self._taken = max(self._taken, model.nodes[model.output].num_elements)
        return list(model.gap_times)


@dataclass(frozen=True, slots=True)
class ModelRate:
    """Converts examples per second into the model's FLOPs per second and MFU. None: unknown."""

    flops_per_example: float | None
    """FLOPs of a training step on one example."""
    peak_tflops: float | None
    """What all devices can do together, in 10¹² FLOPs per second."""

    def figures(self, examples_per_second: float | None) -> dict[str, float | None]:
        """Returns the figures by log key."""
        if self.flops_per_example is None or examples_per_second is None:
            return {"model_tflops_per_second": None, "mfu_percent": None}
        tflops = self.flops_per_example * examples_per_second / 1e12
        return {
            "model_tflops_per_second": tflops,
            "mfu_percent": None if self.peak_tflops is None else 100 * tflops / self.peak_tflops,
        }


class CountedRate:
    """The rate of a model whose FLOPs are counted after its first step, in a thread: a large graph takes half a second.

    Args:
        flops_per_example: None: counted.
        device_tflops: What one device can do. None: as NVIDIA lists it for this GPU.
    """

    def __init__(self, flops_per_example: float | None, device_tflops: float | None):
        self._given_flops, self._given_peak = flops_per_example, device_tflops
        self._thread: threading.Thread | None = None
        self.begin()

    def begin(self) -> None:
        """Starts a training."""
        self.wait()
        self.counts = False
        """Whether this training's FLOPs are known or being counted."""
        self.known = ModelRate(self._given_flops, None)
        """What is known so far."""

    def count(self, model: keras.Model, examples_per_step: float | None) -> None:
        """Starts to count, after the first step. Call it from a hook of `fit`, whose batches it looks for."""
        self.counts = True
        spec = getattr(variable_of_a_caller("iterator", object), "element_spec", None)
        thread = threading.Thread(target=self._count, args=(model, spec, examples_per_step or 1.0), name=_THREAD)
        try:
            thread.start()
        except RuntimeError as error:
            warn_once(
                "thread of FLOPs",
                f"Expected to start a thread that counts FLOPs. Found: {error}. The training goes on without them. "
                "Check the process limit (ulimit -u; pids.max of the control group).",
            )
            return
        self._thread = thread

    def wait(self) -> None:
        """Waits for the count."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(_LONGEST_COUNT_SECONDS)

    def _count(self, model: keras.Model, spec: Any, examples_per_step: float) -> None:
        self.known = model_rate(model, spec, examples_per_step, self._given_flops, self._given_peak)


def model_rate(
    model: keras.Model,
    element_spec: Any,
    examples_per_step: float,
    flops_per_example: float | None,
    device_tflops: float | None,
) -> ModelRate:
    """Returns the rate for a model that has trained a step; warns once if its FLOPs cannot be counted.

    Args:
        model: The model being fitted.
        element_spec: Of its batches; None: unknown.
        examples_per_step: Over all replicas.
        flops_per_example: None: counted.
        device_tflops: What one device can do. None: as NVIDIA lists it for this GPU.
    """
    # Imported late: it takes longer to load than all callbacks together.
    from tfopt.model.flops import ModelFlops, fit_flops

    try:
        counted = fit_flops(model, element_spec, examples_per_step)
    except Exception as error:  # noqa: BLE001  an observer must not end a training
        counted = ModelFlops({}, (f"the whole model ({error!r})",), examples_per_step)
    if flops_per_example is None:
        flops_per_example = counted.per_example
        if counted.unknown:
            warn_once(
                f"flops_per_example {model.name}",
                f"Expected a training step whose FLOPs can be counted. Found in {model.name!r}: "
                f"{listed(counted.unknown, _PARTS_NAMED)}. No mfu_percent and no model_tflops_per_second are logged; "
                "pass ThroughputLogger(flops_per_example=…).",
            )
    if flops_per_example is None:
        return ModelRate(None, None)
    device = device_tflops or _listed_tflops(counted.dtype or model.compute_dtype)
    replicas = model.distribute_strategy.num_replicas_in_sync
    return ModelRate(flops_per_example, None if device is None else device * replicas)


def _listed_tflops(dtype: str) -> float | None:
    """The listed peak of this process's GPUs in a dtype, if they are all the same model."""
    visible = [int(device.name.rpartition(":")[2]) for device in tf.config.get_visible_devices("GPU")]
    names = {gpu.name for gpu in gpus() if gpu.index in visible} if visible else set()
    if len(names) != 1:
        return None
    (name,) = names
    if dtype == "float32" and tf.config.experimental.tensor_float_32_execution_enabled():
        return peak_tflops(name, "tensorfloat32") or peak_tflops(name, "float32")
    return peak_tflops(name, dtype)
