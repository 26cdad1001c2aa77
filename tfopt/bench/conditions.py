"""What the GPUs were like while each variant ran: clocks, temperature, power, and what held the clocks back."""

import time
from collections.abc import Callable, Sequence
from statistics import median
from types import TracebackType
from typing import Any

import numpy as np

from tfopt import hardware
from tfopt.callbacks.throttling import Throttling
from tfopt.hardware import GpuSample, GpuSampler
from tfopt.measure import StepTimes

_INTERVAL_SECONDS = 0.2  # a turn takes some seconds


class Conditions:
    """Samples the GPUs that this process may use while it is open; does nothing where there is none.

    Args:
        clock: Seconds since 1970.
    """

    def __init__(self, clock: Callable[[], float] = time.time):
        self._clock = clock
        self._sampler = GpuSampler(_INTERVAL_SECONDS, keep=100_000, wall_clock=clock) if hardware.gpus() else None
        self._turns: dict[str, list[tuple[float, float]]] = {}

    def __enter__(self) -> "Conditions":
        if self._sampler:
            self._sampler.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._sampler:
            self._sampler.close()

    def during(self, name: str, timer: Callable[[], StepTimes]) -> Callable[[], StepTimes]:
        """Returns the timer; each call of what is returned counts as a turn of the variant `name`."""

        def call() -> StepTimes:
            begin = self._clock()
            times = timer()
            self._turns.setdefault(name, []).append((begin, self._clock()))
            return times

        return call

    def of(self, name: str) -> dict[str, Any] | None:
        """What the GPUs said in the turns of a variant, without the first, in which it compiles.

        Returns:
            JSON; None where no GPU said anything. `sm_clock_mhz`: the lowest and the median. `gpu_temperature_celsius`:
            the highest. `gpu_power_watts`: by the energy counters, of all GPUs together. `throttle_reasons`.
        """
        turns = self._turns[name][1:]
        samples = [row for row in self._sampler.samples if row.index is not None] if self._sampler else []
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


def _watts(samples: Sequence[GpuSample], turns: Sequence[tuple[float, float]]) -> float | None:
    """The mean over the turns; the counters are interpolated at their ends."""
    joules = 0.0
    for index in {row.index for row in samples}:
        rows = [row for row in samples if row.index == index and row.gpu_energy_joules is not None]
        if not rows:
            return None
        read = np.interp(
            np.array(turns), [row.time_seconds for row in rows], [row.gpu_energy_joules or 0 for row in rows]
        )
        joules += float(np.diff(read).sum())
    return joules / sum(end - begin for begin, end in turns)
