"""Mean readings of a training over time, and the throttle reasons that count."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from tfopt.hardware import GpuSample
from tfopt.hardware.gpu_memory import ALLOCATOR_FIELDS
from tfopt.hardware.host_activity import HOST_FIELDS
from tfopt.hardware.nvml.gpu_reading import GPU_FIELDS

# The measurements among a GpuSample's fields.
GPU_KEYS = (*(name for name in GPU_FIELDS if name != "throttle_reasons"), *ALLOCATOR_FIELDS)
HOST_KEYS = HOST_FIELDS
# Counters, constants and codes: their means say nothing.
UNAVERAGED_KEYS = (
    "gpu_energy_joules",
    "gpu_memory_total_mib",
    "gpu_power_limit_watts",
    "gpu_ecc_uncorrected_errors",
    "gpu_xid",
)

# NVML's reasons that slow down a GPU that could run faster, and their causes. The others are settings of the owner.
SLOWED_BY = {
    "power_cap": "power",
    "hw_power_brake": "power",
    "thermal": "heat",
    "hw_thermal": "heat",
    "hw_slowdown": "heat or power",
}
# tfopt's choice: at full load a data-centre GPU runs at its power cap by design, somewhat below its highest clock.
_CAPPED_BELOW = 0.75
# A reason in a smaller share of the readings does not explain their mean.
_EXPLAINS = 0.25
# A reading without one before it counts for a millisecond: something, and next to nothing.
_LEAST_SECONDS = 2**-10
# By GPU (None: the training) and name: integral of the known values, the seconds they stand for, and the last value.
Sums: TypeAlias = Mapping[tuple[int | None, str], tuple[float, float, float | None]]


class Throttling:
    """Finds what slows each GPU down, given a training's samples in order.

    Heat and hardware brakes always count. The power cap counts only if it holds the clock below three quarters of the
    GPU's highest clock so far.

    Example:
        >>> throttling = Throttling()
        >>> throttling.reasons(GpuSample(0.0, 0.0, index=0, sm_clock_mhz=1980, throttle_reasons=("power_cap",)))
        ()
        >>> throttling.reasons(GpuSample(1.0, 1.0, index=0, sm_clock_mhz=1200, throttle_reasons=("power_cap",)))
        ('power_cap',)
    """

    def __init__(self) -> None:
        self._highest: dict[int | None, float] = {}

    def reasons(self, row: GpuSample) -> tuple[str, ...] | None:
        """Returns the sample's throttle reasons that slow the GPU down; None if they are unknown."""
        clock = row.sm_clock_mhz or 0
        highest = self._highest[row.index] = max(clock, self._highest.get(row.index, 0))
        if row.throttle_reasons is None:
            return None
        capped = 0 < clock < _CAPPED_BELOW * highest
        return tuple(name for name in row.throttle_reasons if name in SLOWED_BY and (capped or name != "power_cap"))


class SampleSpans:
    """Tells how much time each sample stands for: that since the previous one.

    Means over time weigh readings by it: a sample that comes late, because a step held Python, stands for more.
    """

    def __init__(self) -> None:
        self._at, self._seconds = 0.0, _LEAST_SECONDS

    def seconds(self, row: GpuSample) -> float:
        """Returns the seconds for a row of the next sample, or for another row of the same one."""
        if row.elapsed_seconds != self._at:
            self._seconds = max(row.elapsed_seconds - self._at, _LEAST_SECONDS)
            self._at = row.elapsed_seconds
        return self._seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """Mean readings over part of a training, each weighted by the time it stands for. None: unknown."""

    gpus: tuple[GpuSample, ...] = ()
    """Means of each GPU; `throttle_reasons` holds the most frequent reason if it explains them."""
    input_wait_percent: float | None = None
    host_cpu_percent: float | None = None
    throttled_percent: float | None = None
    """The share of the time in which `Throttling` finds a reason, averaged over the GPUs."""


class RunningMeans:
    """Sums up readings, so that means over the time since any moment are known without keeping the readings.

    A quantity not read since then keeps its last value. One thread may add GPU samples while another adds the
    training's.
    """

    def __init__(self) -> None:
        self._sums: dict[tuple[int | None, str], tuple[float, float, float | None]] = {}
        self._spans = SampleSpans()

    def add_gpu(self, row: GpuSample, reasons: tuple[str, ...] | None) -> None:
        """Adds a GPU's sample and the reasons of `SLOWED_BY` that slow it down, None if unknown."""
        values: dict[str, float | None] = {key: getattr(row, key) for key in GPU_KEYS}
        values |= {name: None if reasons is None else float(name in reasons) for name in SLOWED_BY}
        self._add(row.index, values, self._spans.seconds(row))

    def add_input_wait(self, percent: float | None, seconds: float = 1.0) -> None:
        """Adds the share of so many seconds that the training waited for input."""
        self._add(None, {"input_wait_percent": percent}, seconds)

    def moment(self) -> Sums:
        """Returns a mark for `since`."""
        return dict(self._sums)

    def since(self, moment: Sums) -> Readings:
        """Returns the means since a moment."""
        now = self.moment()
        indices = dict.fromkeys(index for index, _ in now if index is not None)
        return Readings(
            gpus=tuple(_sample(index, _means(index, now, moment)) for index in indices),
            **_means(None, now, moment),
        )

    def _add(self, index: int | None, values: Mapping[str, float | None], seconds: float) -> None:
        for name, value in values.items():
            total, known, _ = self._sums.get((index, name), (0.0, 0.0, None))
            if value is None or not math.isfinite(value):
                self._sums[index, name] = total, known, None
            else:
                self._sums[index, name] = total + value * seconds, known + seconds, value


def _means(of: int | None, now: Sums, since: Sums) -> dict[str, Any]:
    means: dict[str, Any] = {}
    for (index, name), (total, seconds, last) in now.items():
        if index == of:
            total_then, seconds_then, _ = since.get((index, name), (0.0, 0.0, None))
            if seconds > seconds_then:
                means[name] = (total - total_then) / (seconds - seconds_then)
            elif last is not None:
                means[name] = last
    return means


def _sample(index: int, means: dict[str, Any]) -> GpuSample:
    shares = {name: means.pop(name) for name in SLOWED_BY if name in means}
    most = max(shares, key=lambda name: shares[name], default="")
    reasons = ((most,) if shares[most] >= _EXPLAINS else ()) if shares else None
    return GpuSample(0.0, 0.0, index=index, throttle_reasons=reasons, **means)
