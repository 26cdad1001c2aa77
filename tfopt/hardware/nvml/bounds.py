"""What a GPU's reading can be. What cannot be true becomes None, and one warning per field and GPU says so.

Drivers have reported 255 % of utilisation, boards that draw 4,294,967 W, and temperatures of 4294967286 °C.
"""

import math
from dataclasses import replace
from typing import Any

from tfopt.hardware.nvml.gpu_reading import BOARD_WATTS, MIB, MOST_BYTES, THROTTLE_REASONS, Reading
from tfopt.warn import warn_once

_PERCENT = (0, 101)  # 1 % allows for rounding; kept as 100
_MEMORY_MIB = (0, MOST_BYTES / MIB)
_PCIE = (0, 2**18)  # 256 GiB/s: more than 16 lanes of PCIe 7
_NVLINK = (0, 2**24)  # 16 TiB/s: nine times the fastest NVLink
_WATTS = (0, BOARD_WATTS)

# The least and the most that each field can be, in its own unit.
BOUNDS: dict[str, tuple[float, float]] = {
    "gpu_utilization_percent": _PERCENT,
    "sm_active_percent": _PERCENT,
    "sm_occupancy_percent": _PERCENT,
    "tensor_active_percent": _PERCENT,
    "dram_active_percent": _PERCENT,
    "gpu_memory_used_mib": _MEMORY_MIB,  # and the total
    "gpu_memory_total_mib": _MEMORY_MIB,
    "gpu_memory_process_mib": _MEMORY_MIB,  # and the total
    "gpu_memory_others_mib": _MEMORY_MIB,  # memory that two of them share may count twice
    "gpu_power_watts": _WATTS,
    "gpu_power_limit_watts": (1, BOARD_WATTS),
    "gpu_energy_joules": (0, 2**42),  # such a board's for fourteen years
    "sm_clock_mhz": (0, 10_000),
    "memory_clock_mhz": (0, 100_000),  # GDDR7: 14,000
    "gpu_temperature_celsius": (-40, 150),  # from the coldest an industrial board may run at
    "pcie_rx_mib_per_second": _PCIE,
    "pcie_tx_mib_per_second": _PCIE,
    "nvlink_rx_mib_per_second": _NVLINK,
    "nvlink_tx_mib_per_second": _NVLINK,
    "gpu_ecc_uncorrected_errors": (0, 10**9),
    "gpu_xid": (1, 9999),
}

# How much each counter can grow in a second. It never shrinks.
COUNTERS = {"gpu_energy_joules": BOARD_WATTS, "gpu_ecc_uncorrected_errors": math.inf}

_PERCENTS = tuple(field for field, bounds in BOUNDS.items() if bounds is _PERCENT)
_WITHIN_TOTAL = ("gpu_memory_used_mib", "gpu_memory_process_mib")


class Bounds:
    """Checks the readings of one GPU, in their order."""

    def __init__(self, uuid: str) -> None:
        self._uuid = uuid
        self._counters = {field: _Counter(growth) for field, growth in COUNTERS.items()}

    def check(self, reading: Reading, now: float) -> Reading:
        """Returns the reading, made at the monotonic time `now`, without what cannot be true."""
        values = vars(reading)
        expected = {}
        for field, (least, most) in BOUNDS.items():
            value = values[field]
            if value is not None and not least <= value <= most:  # NaN compares as false
                expected[field] = f"from {least:g} to {most:g}"
        kept = values | dict.fromkeys(expected) if expected else values
        total = kept["gpu_memory_total_mib"]
        for field in _WITHIN_TOTAL:
            if total is not None and (kept[field] or 0) > total:
                expected[field] = f"at most gpu_memory_total_mib, {total:g}"
        for field, counter in self._counters.items():
            if kept[field] is not None and not counter.goes_on(kept[field], now):
                expected[field] = f"a counter that goes on from {counter.value:g}"
        if len(values["throttle_reasons"] or ()) > len(THROTTLE_REASONS):
            expected["throttle_reasons"] = f"at most {len(THROTTLE_REASONS)} reasons"
        for field, bound in expected.items():
            self._warn(field, bound, values[field])
        changed: dict[str, Any] = {field: 100 for field in _PERCENTS if (kept[field] or 0) > 100}
        changed |= dict.fromkeys(expected)
        return replace(reading, **changed) if changed else reading

    def _warn(self, field: str, bound: str, found: Any) -> None:
        warn_once(
            f"bounds {field} {self._uuid}",
            f"Expected {field} of {self._uuid}: {bound}. Found: {found}, which cannot be true; such readings are "
            "left out. What to do: compare with nvidia-smi -q, and update the driver if it says the same.",
        )


class _Counter:
    """Tells a counter's readings from garbage.

    A reading that does not go on from the last one is garbage, or the counter began anew: the next reading that goes on
    from it decides.
    """

    def __init__(self, growth_per_second: float) -> None:
        self._growth = growth_per_second
        self._last: tuple[float, float] | None = None
        self._doubted: tuple[float, float] | None = None

    @property
    def value(self) -> float:
        """The last reading that was believed."""
        return self._last[0] if self._last is not None else 0.0

    def goes_on(self, value: float, now: float) -> bool:
        """Whether to believe a reading."""
        believed = any(self._follows(value, now, before) for before in (self._last, self._doubted))
        if believed or (self._last is None and self._doubted is None):
            self._last, self._doubted = (value, now), None
            return True
        self._doubted = (value, now)
        return False

    def _follows(self, value: float, now: float, before: tuple[float, float] | None) -> bool:
        if before is None:
            return False
        # A second more: the counter is read a little before or after its time is taken.
        return before[0] <= value <= before[0] + self._growth * (now - before[1] + 1.0)
