"""What the readings of an epoch come to: means, peaks, energy."""

import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from tfopt.callbacks.throttling import Throttling
from tfopt.callbacks.utilization.energy import MeanPower
from tfopt.hardware import GpuSample

# Of a row's fields, those whose mean over an epoch says something: not the clock, not a counter, not a constant.
_AVERAGED = (
    "gpu_utilization_percent",
    "sm_active_percent",
    "sm_occupancy_percent",
    "tensor_active_percent",
    "dram_active_percent",
    "gpu_memory_used_mib",
    "gpu_memory_process_mib",
    "gpu_power_watts",
    "gpu_temperature_celsius",
    "sm_clock_mhz",
    "memory_clock_mhz",
    "pcie_rx_mib_per_second",
    "pcie_tx_mib_per_second",
    "nvlink_rx_mib_per_second",
    "nvlink_tx_mib_per_second",
    "host_cpu_percent",
    "host_memory_used_mib",
    "process_memory_mib",
    "disk_read_mib_per_second",
)


class EpochReadings:
    """Sums up the readings of an epoch, which one thread adds and another one takes, without keeping them.

    Args:
        clock: Seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: dict[str, list[float]] = {}  # sum, count and greatest value
        self._last: dict[str, list[float]] = {}
        self._powers: dict[str, MeanPower] = {}
        self._throttling = Throttling()
        self._began = clock()

    def start(self) -> None:
        """Starts anew, with the last reading for what has none yet."""
        with self._lock:
            self._seen = {}
            self._began = self._clock()
            for power in self._powers.values():
                power.start()

    def add(self, rows: Sequence[GpuSample]) -> None:
        """Adds one reading: a row for each GPU."""
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
        """The epoch's figures, finite numbers all; those of the last reading where there was none since `start`."""
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


def _add(sums: list[float], total: float, count: float, greatest: float) -> None:
    sums[0] += total
    sums[1] += count
    sums[2] = max(sums[2], greatest)
