"""What NVML's answers mean: units, bit masks, and the numbers that stand for "no value"."""

from dataclasses import dataclass
from typing import NamedTuple

MIB = 2**20

WIDTH_32 = 2**32
WIDTH_64 = 2**64

# nvmlClocksEventReasons in nvml.h. 0x1, the GPU is idle, holds nothing back and is left out.
THROTTLE_REASONS = {
    0x2: "applications_clocks",
    0x4: "power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
    0x100: "display_clocks",
    0x200: "board_limit",
    0x400: "reliability",
}
_IDLE = 0x1


@dataclass(frozen=True, slots=True)
class Device:
    """A physical GPU or a MIG instance, as NVML describes it."""

    uuid: str
    name: str
    memory_bytes: int | None
    compute_capability: tuple[int, int] | None
    pci: tuple[int, int, int] | None = None  # domain, bus, device
    instances: "tuple[Device, ...] | None" = None  # the GPU's MIG instances; None: MIG mode is off


class Reading(NamedTuple):
    """What one device says now. None: it does not say."""

    gpu_utilization_percent: int | None = None
    sm_active_percent: float | None = None
    sm_occupancy_percent: float | None = None
    tensor_active_percent: float | None = None
    dram_active_percent: float | None = None
    gpu_memory_used_mib: float | None = None
    gpu_memory_total_mib: float | None = None
    gpu_memory_process_mib: float | None = None
    gpu_memory_others_mib: float | None = None
    gpu_power_watts: float | None = None
    gpu_energy_joules: float | None = None
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    gpu_temperature_celsius: int | None = None
    pcie_rx_mib_per_second: float | None = None
    pcie_tx_mib_per_second: float | None = None
    nvlink_rx_mib_per_second: float | None = None
    nvlink_tx_mib_per_second: float | None = None
    throttle_reasons: tuple[str, ...] | None = None


def known(value: int | None, width: int = WIDTH_32) -> int | None:
    """The value, or None for NVML_VALUE_NOT_AVAILABLE: minus one in the unsigned width of the field."""
    return None if value is None or value == width - 1 else value


def scaled(value: int | None, per_unit: int) -> float | None:
    """The value in a unit that holds `per_unit` of NVML's."""
    return None if value is None else value / per_unit


def mib(size_bytes: int | None) -> float | None:
    """Bytes in MiB."""
    return scaled(size_bytes, MIB)


def throttle_names(mask: int) -> tuple[str, ...]:
    """The reasons in a bit mask, lowest bit first."""
    bits = [1 << place for place in range(mask.bit_length()) if mask >> place & 1]
    return tuple(THROTTLE_REASONS.get(bit, f"unknown_{bit:#x}") for bit in bits if bit != _IDLE)
