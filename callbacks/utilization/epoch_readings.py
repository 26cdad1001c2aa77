"""An epoch's readings in figures: means, peaks, energy."""

import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from tfopt.causes.readings import GPU_KEYS, HOST_KEYS, Throttling
from tfopt.hardware import GpuSample

# Counters, constants, and what is not this process's have no mean worth logging.
_NOT_AVERAGED = {"gpu_memory_total_mib", "gpu_memory_others_mib", "gpu_energy_joules"}
_AVERAGED = tuple(key for key in (*GPU_KEYS, *HOST_KEYS) if key not in _NOT_AVERAGED)


class EpochReadings:
    """Sums up an epoch's readings without keeping them. One thread adds while another takes the figures."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: dict[str, list[float]] = {}  # sum, count and maximum
        self._last: dict[str, list[float]] = {}
        self._powers: dict[str, MeanPower] = {}
        self._throttling = Throttling()
        self._began = clock()

    def start(self) -> None:
        """Begins an epoch. Until it has a reading, the last one stands."""
        with self._lock:
            self._seen = {}
            self._began = self._clock()
            for power in self._powers.values():
                power.start()

    def add(self, rows: Sequence[GpuSample]) -> None:
        """Adds one sample: a row per GPU."""
        reading: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, -math.inf])
        for row in rows:
            for name, value in self._numbers(row):
                _add(reading[name], value, 1, value)
        with self._lock:
            self._last = dict(reading)
            for name, sums in reading.items():
                _add(self._seen.setdefault(name, [0.0, 0.0, -math.inf]), *sums)
            for row in rows:
                if row.uuid is not None:
                    power = self._powers.setdefault(row.uuid, MeanPower())
                    power.add(row.elapsed_seconds, joules=row.gpu_energy_joules, watts=row.gpu_power_watts)

    def values(self) -> dict[str, float]:
        """Returns the epoch's figures as finite numbers; those of the last sample if there was none since `start`."""
        with self._lock:
            sums = self._last | self._seen
            figures = {name: total / count for name, (total, count, _) in sums.items()}
            if "gpu_memory_used_mib" in sums:
                figures["gpu_memory_peak_mib"] = sums["gpu_memory_used_mib"][2]
            watts = [power.watts() for power in self._powers.values()]
            seconds = self._clock() - self._began
        known = [value for value in watts if value is not None]
        if known and len(known) == len(watts):
            figures["gpu_energy_joules"] = sum(known) * seconds
        return figures

    def _numbers(self, row: GpuSample) -> Iterator[tuple[str, float]]:
        for name in _AVERAGED:
            value = getattr(row, name)
            if value is not None and math.isfinite(value):
                yield name, value
        reasons = self._throttling.reasons(row)
        if reasons is not None:
            yield "throttled_percent", 100.0 * bool(reasons)


def _add(sums: list[float], total: float, count: float, maximum: float) -> None:
    sums[0] += total
    sums[1] += count
    sums[2] = max(sums[2], maximum)


class MeanPower:
    """The mean power of one GPU, from its energy counter or from power readings.

    It is the energy counter's increase over the time between two readings of it. For a GPU without a counter (before
    Volta) power readings are integrated by trapezoids. That is less exact: NVML averages power over up to a second, and
    some GPUs sample only part of the time (Yang et al., "Part-time Power Measurements", 2023).

    Example:
        >>> power = MeanPower()
        >>> power.add(0.0, joules=1000.0, watts=200.0)
        >>> power.add(10.0, joules=4000.0, watts=200.0)
        >>> power.watts()
        300.0
    """

    def __init__(self) -> None:
        self._reading: tuple[float, float | None, float | None] = (0.0, None, None)
        self._counter: tuple[float, float] | None = None  # its last known reading, which may be older
        self.start()

    def start(self) -> None:
        """Restarts from the last reading."""
        self._first = self._counter
        self._went_back = False
        self._integral = self._integrated_seconds = 0.0

    def add(self, elapsed_seconds: float, *, joules: float | None, watts: float | None) -> None:
        """Adds a reading of the counter and the power, None if unknown."""
        before, _, watts_before = self._reading
        self._reading = (elapsed_seconds, joules, watts)
        if joules is not None:
            self._went_back |= self._counter is not None and joules < self._counter[1]
            self._counter = (elapsed_seconds, joules)
            self._first = self._first or self._counter
        if watts is not None and watts_before is not None:
            self._integral += (watts + watts_before) / 2 * (elapsed_seconds - before)
            self._integrated_seconds += elapsed_seconds - before

    def watts(self) -> float | None:
        """Returns the mean since the start, or the last power reading if there was no second one since.

        None if the counter went back, as after a driver reload, or the GPU's last reading said nothing: it is lost.
        """
        _, joules, watts = self._reading
        if self._went_back or (joules is None and watts is None):
            return None
        if self._first and self._counter and self._counter[0] > self._first[0]:
            return (self._counter[1] - self._first[1]) / (self._counter[0] - self._first[0])
        return self._integral / self._integrated_seconds if self._integrated_seconds > 0 else watts
