"""The device of a case: its GPUs' clocks, power and peak memory while a variant runs, and the best rates it reaches."""

import gc
import time
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from types import TracebackType
from typing import Any, Self

import numpy as np
import tensorflow as tf

from tfopt import hardware
from tfopt.bench.cases import Timer
from tfopt.bench.results import DeviceRates, GpuConditions
from tfopt.causes.readings import Throttling
from tfopt.hardware import GpuSample, GpuSampler
from tfopt.hardware.gpu_memory import first_gpu, in_use_bytes, peak_bytes, reset_peak
from tfopt.measure import StepTimes, copy_gib_per_second, matmul_tflops
from tfopt.measure.peak import best_seconds

_INTERVAL_SECONDS = 0.2
_SHORTEST = 2 * _INTERVAL_SECONDS  # in less, the energy would be mostly that of what came before and after
_MIB, _GIB = 2**20, 2**30


class GpuReadings:
    """Samples the GPUs while it is open; without a GPU, or with none to read, it does nothing.

    Args:
        gpus: How many to read, from the first on.
    """

    def __init__(self, gpus: int):
        wanted = gpus > 0 and bool(hardware.gpus())
        self._sampler = GpuSampler(_INTERVAL_SECONDS, keep=100_000) if wanted else None
        self._turns: dict[str, list[tuple[float, float]]] = {}

    def __enter__(self) -> Self:
        if self._sampler:
            self._sampler.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._sampler:
            self._sampler.close()

    def during(self, name: str, timer: Timer) -> Timer:
        """Returns the timer so that the samples of each call count as a turn of the variant `name`."""

        def call() -> StepTimes:
            times = timer()
            # A timer ends with its last sample; what prepares it and warms it up comes before the first.
            end = time.time()
            seconds = sum(times.samples_ms) * times.steps_per_sample / 1000
            self._turns.setdefault(name, []).append((end - seconds, end))
            return times

        return call

    def of(self, name: str, gpus: int) -> GpuConditions | None:
        """State of the first `gpus` GPUs in the turns of a variant, without its first; None if no GPU said anything."""
        turns = self._turns[name][1:]
        read = self._sampler.samples if self._sampler else ()
        samples = [row for row in read if row.index is not None and row.index < gpus]
        throttling = Throttling()  # learns a GPU's highest clock, from samples between the turns too
        told = [(row, throttling.reasons(row) or ()) for row in samples]
        told = [(row, held) for row, held in told if any(begin <= row.time_seconds <= end for begin, end in turns)]
        if not told:
            return None
        rows = [row for row, _ in told]
        clocks = [row.sm_clock_mhz for row in rows if row.sm_clock_mhz is not None]
        temperatures = [row.gpu_temperature_celsius for row in rows if row.gpu_temperature_celsius is not None]
        return GpuConditions(
            sm_clock_mhz=(min(clocks), median(clocks)) if clocks else None,
            gpu_temperature_celsius=max(temperatures, default=None),
            gpu_power_watts=_watts(samples, turns),
            throttle_reasons=tuple(sorted({reason for _, held in told for reason in held})),
        )


def _watts(samples: Sequence[GpuSample], turns: Sequence[tuple[float, float]]) -> float | None:
    """Mean power over the turns, at whose ends the energy counters are interpolated."""
    seconds = sum(end - begin for begin, end in turns)
    if seconds < _SHORTEST * len(turns):
        return None
    joules = 0.0
    for index in {row.index for row in samples}:
        rows = [row for row in samples if row.index == index and row.gpu_energy_joules is not None]
        if not rows:
            return None
        read = np.interp(
            np.array(turns), [row.time_seconds for row in rows], [row.gpu_energy_joules or 0 for row in rows]
        )
        joules += float(np.diff(read).sum())
    return joules / seconds


class MemoryMeter:
    """A timer that notes as `peak_mib` how much memory of the first GPU a call needs at its peak.

    What other variants keep on the GPU does not count. `peak_mib` is None before a call, and on a device that does not
    say, such as a CPU.

    Args:
        make: Builds the timer, and with it the model, in the first call.
    """

    def __init__(self, make: Callable[[], Timer]):
        self.peak_mib: float | None = None
        self._make = make
        self._timer: Timer | None = None
        self._own = 0  # bytes the timer keeps

    def __call__(self) -> StepTimes:
        """Calls the timer."""
        device = first_gpu()
        if self._timer is None:
            gc.collect()  # or what others left could be freed meanwhile, and this one would seem to keep less
            begun = in_use_bytes(device) if device else 0
            self._timer = self._make()
            self._own = in_use_bytes(device) - begun if device else 0
        before = in_use_bytes(device) if device else 0
        if device:
            reset_peak(device)
        times = self._timer()
        if device:
            # The least: the first call also compiles, and later ones may keep a copy of the model's state on the GPU.
            peak_mib = (self._own + peak_bytes(device) - before) / _MIB
            self.peak_mib = peak_mib if self.peak_mib is None else min(self.peak_mib, peak_mib)
            self._own += in_use_bytes(device) - before
        return times


def device_rates(dtypes: Iterable[str]) -> DeviceRates:
    """Measures the rates of a large matrix product in each dtype, as for `matmul_tflops`, and of copies."""
    gpus = tf.config.list_logical_devices("GPU")
    with tf.device("CPU:0"):
        host = tf.zeros((_GIB // 8,), tf.int64) if gpus else None  # not int32, which TensorFlow leaves on the host

    def to_device() -> Any:
        with tf.device("CPU:0"):
            view = tf.reshape(host, [-1])  # as a new tensor: one that was copied to a GPU keeps the copy
        with tf.device(gpus[0].name):
            return tf.identity(view)

    return DeviceRates(
        matmul_tflops={dtype: matmul_tflops(dtype) for dtype in sorted(dtypes)},
        copy_gib_per_second=copy_gib_per_second(),
        host_to_device_gib_per_second=1 / best_seconds(to_device) if gpus else None,
    )
