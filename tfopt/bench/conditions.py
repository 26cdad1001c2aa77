"""What the GPUs were like while each variant ran: clocks, temperature, power, and what held the clocks back."""

import time
from collections.abc import Callable, Sequence
from statistics import median
from types import TracebackType
from typing import Any

import numpy as np

from tfopt import hardware
from tfopt.causes.readings import Throttling
from tfopt.hardware import GpuSample, GpuSampler
from tfopt.measure import StepTimes

_INTERVAL_SECONDS = 0.2
_SHORTEST = 2 * _INTERVAL_SECONDS  # in less, the energy would be mostly that of what came before and after


class Conditions:
    """Samples the GPUs while it is open; does nothing where there is none, or none is to be read.

    Args:
        gpus: How many to read, from the first on.
        clock: Seconds since 1970.
    """

    def __init__(self, gpus: int, clock: Callable[[], float] = time.time):
        self._clock = clock
        wanted = gpus > 0 and bool(hardware.gpus())
        self._sampler = GpuSampler(_INTERVAL_SECONDS, keep=100_000, wall_clock=clock) if wanted else None
        self._turns: dict[str, list[tuple[float, float]]] = {}

    def __enter__(self) -> "Conditions":
        if self._sampler:
            self._sampler.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._sampler:
            self._sampler.close()

    def during(self, name: str, timer: Callable[[], StepTimes]) -> Callable[[], StepTimes]:
        """Returns the timer; the samples of each call of what is returned count as a turn of the variant `name`."""

        def call() -> StepTimes:
            times = timer()
            # A timer ends with its last sample; what prepares it and warms it up comes before the first.
            end = self._clock()
            seconds = sum(times.samples_ms) * times.steps_per_sample / 1000
            self._turns.setdefault(name, []).append((end - seconds, end))
            return times

        return call

    def of(self, name: str, gpus: int) -> dict[str, Any] | None:
        """What the GPUs said in the turns of a variant, without the first, in which it compiles.

        Args:
            name: The variant.
            gpus: How many it trains on, from the first on.

        Returns:
            JSON; None where no GPU said anything. `sm_clock_mhz`: the lowest and the median. `gpu_temperature_celsius`:
            the highest. `gpu_power_watts`: by the energy counters, of these GPUs together; None for turns too short to
            tell. `throttle_reasons`.
        """
        turns = self._turns[name][1:]
        samples = [row for row in self._sampler.samples if _is_one_of(gpus, row)] if self._sampler else []
        throttling = Throttling()  # learns a GPU's highest clock, from samples between the turns too
        told = [(row, throttling.reasons(row) or ()) for row in samples]
        told = [(row, held) for row, held in told if any(begin <= row.time_seconds <= end for begin, end in turns)]
        if not told:
            return None
        rows = [row for row, _ in told]
        clocks = [row.sm_clock_mhz for row in rows if row.sm_clock_mhz is not None]
        temperatures = [row.gpu_temperature_celsius for row in rows if row.gpu_temperature_celsius is not None]
        return {
            "sm_clock_mhz": [min(clocks), median(clocks)] if clocks else None,
            "gpu_temperature_celsius": max(temperatures, default=None),
            "gpu_power_watts": _watts(samples, turns),
            "throttle_reasons": sorted({reason for _, held in told for reason in held}),
        }


def _is_one_of(gpus: int, row: GpuSample) -> bool:
    return row.index is not None and row.index < gpus


def _watts(samples: Sequence[GpuSample], turns: Sequence[tuple[float, float]]) -> float | None:
    """The mean over the turns; the counters are interpolated at their ends."""
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
