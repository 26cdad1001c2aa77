"""Reads a device through NVML, in tfopt's units. None stands for what the device does not report."""

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

MIB = 2**20

# Larger values are defects: no GPU has a tenth of this memory, and no board draws half of this power.
MOST_BYTES = 2**44
BOARD_WATTS = 10_000

# nvmlClocksEventReasons in nvml.h, without 0x1: an idle GPU is not held back.
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

# The unversioned functions call these, but on an older driver raise an error that is not NVML's.
_PROCESSES = ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v3")

# Inode of the machine's first process namespace, PROC_PID_INIT_INO in Linux's include/linux/proc_ns.h.
_FIRST_NAMESPACE = "pid:[4026531836]"

# Zero would do if it meant "do not wait"; NVML's reference does not say so.
_EVENT_WAIT_MS = 1
_MOST_EVENTS = 100

_WIDTH_32 = 2**32
_WIDTH_64 = 2**64

Ask = Callable[..., Any]
"""Calls an NVML function by name; returns None if the device or driver does not offer it."""


@dataclass(frozen=True, slots=True)
class Device:
    """A physical GPU or a MIG instance, as NVML describes it."""

    uuid: str
    name: str
    memory_bytes: int | None
    compute_capability: tuple[int, int] | None
    pci: tuple[int, int, int] | None = None  # domain, bus, device
    instances: "tuple[Device, ...] | None" = None  # the GPU's MIG instances; None: MIG mode is off


# Without slots: GpuSample inherits from two such classes.
@dataclass(frozen=True)
class Reading:
    """One GPU's readings at one moment. None means unknown.

    Fields that say "since the last sample" come from the GPU's performance monitor (GPM: Hopper and later). They are
    None in the first sample and after a failed one.
    """

    gpu_utilization_percent: int | None = None
    """Share of time in which any kernel ran, however small."""
    sm_active_percent: float | None = None
    """Share of multiprocessors that were busy, averaged since the last sample."""
    sm_occupancy_percent: float | None = None
    """Warps in flight relative to the most that fit, since the last sample."""
    tensor_active_percent: float | None = None
    """Share of time in which the tensor cores worked, in any data type, since the last sample."""
    dram_active_percent: float | None = None
    """Share of the GPU's memory bandwidth in use, since the last sample."""
    gpu_memory_used_mib: float | None = None
    """Memory held by all processes and by the driver."""
    gpu_memory_total_mib: float | None = None
    """Total memory."""
    gpu_memory_process_mib: float | None = None
    """Memory held by this process. None if the driver does not list it, as in many containers, or gives no size."""
    gpu_memory_others_mib: float | None = None
    """Memory held by other processes. None in a container that sees no others: there may still be some."""
    gpu_power_watts: float | None = None
    """Power drawn by the whole board."""
    gpu_power_limit_watts: float | None = None
    """Power limit in force, which the owner may have set below the board's own."""
    gpu_energy_joules: float | None = None
    """Energy since the driver was loaded. Differences are more accurate than summing up power."""
    sm_clock_mhz: int | None = None
    """Clock of the multiprocessors."""
    memory_clock_mhz: int | None = None
    """Clock of the memory."""
    gpu_temperature_celsius: int | None = None
    """Temperature of the chip."""
    pcie_rx_mib_per_second: float | None = None
    """Received by the GPU over PCIe: since the last sample with GPM, otherwise in a window of about 20 ms."""
    pcie_tx_mib_per_second: float | None = None
    """Sent by the GPU over PCIe, likewise."""
    nvlink_rx_mib_per_second: float | None = None
    """Received by the GPU over all its NVLinks, since the last sample."""
    nvlink_tx_mib_per_second: float | None = None
    """Sent by the GPU over all its NVLinks, since the last sample."""
    throttle_reasons: tuple[str, ...] | None = None
    """What holds the clocks back: "power_cap", "thermal", "hw_slowdown", … Empty: nothing."""
    gpu_ecc_uncorrected_errors: int | None = None
    """Memory errors that ECC could not correct, since the driver was loaded."""
    gpu_xid: int | None = None
    """Last Xid, the driver's number for an error, that this process saw. None: none, or the driver tells of none."""


GPU_FIELDS = tuple(field.name for field in fields(Reading))


def read_device(ask: Ask, handle: Any, metrics: dict[str, float | None] | None, xid: int | None) -> Reading:
    """Reads every field of a device; `metrics` are GPM's readings by field, None for a device without GPM."""
    ecc = ("NVML_MEMORY_ERROR_TYPE_UNCORRECTED", "NVML_VOLATILE_ECC")
    utilization = ask("nvmlDeviceGetUtilizationRates", handle)
    used, total = memory_bytes(ask, handle)
    own, others = owners_bytes(ask, handle)
    if metrics is None:  # each of these calls takes 21 ms
        metrics = {
            "pcie_rx_mib_per_second": _pcie(ask, handle, "NVML_PCIE_UTIL_RX_BYTES"),
            "pcie_tx_mib_per_second": _pcie(ask, handle, "NVML_PCIE_UTIL_TX_BYTES"),
        }
    return Reading(
        gpu_utilization_percent=_known(utilization.gpu) if utilization is not None else None,
        gpu_memory_used_mib=_scaled(used, MIB),
        gpu_memory_total_mib=_scaled(total, MIB),
        gpu_memory_process_mib=_scaled(own, MIB),
        gpu_memory_others_mib=_scaled(others, MIB),
        gpu_power_watts=_scaled(_known(ask("nvmlDeviceGetPowerUsage", handle)), 1000),
        gpu_power_limit_watts=_scaled(_known(ask("nvmlDeviceGetEnforcedPowerLimit", handle)), 1000),
        gpu_energy_joules=_scaled(_known(ask("nvmlDeviceGetTotalEnergyConsumption", handle), _WIDTH_64), 1000),
        sm_clock_mhz=_known(ask("nvmlDeviceGetClockInfo", handle, "NVML_CLOCK_SM")),
        memory_clock_mhz=_known(ask("nvmlDeviceGetClockInfo", handle, "NVML_CLOCK_MEM")),
        gpu_temperature_celsius=_temperature(ask, handle),
        throttle_reasons=_throttle_reasons(ask, handle),
        gpu_ecc_uncorrected_errors=_known(ask("nvmlDeviceGetTotalEccErrors", handle, *ecc), _WIDTH_64),
        gpu_xid=xid,
        **metrics,
    )


def memory_bytes(ask: Ask, handle: Any) -> tuple[int | None, int | None]:
    """Returns bytes used, including the driver's own, and bytes in total."""
    memory = ask("nvmlDeviceGetMemoryInfo", handle)
    if memory is None:
        return None, None
    if memory.total == 0:  # a GPU that has no memory of its own
        return _known(memory.used, _WIDTH_64) or None, None
    return _known(memory.used, _WIDTH_64), _known(memory.total, _WIDTH_64)


def owners_bytes(ask: Ask, handle: Any) -> tuple[int | None, int | None]:
    """Returns the bytes held by this process and by all others, as `split_by_owner` tells them apart."""
    return split_by_owner([ask(name, handle) for name in _PROCESSES])


def total_bytes(ask: Ask, handle: Any) -> int | None:
    """Returns bytes in total; None if unknown or impossible."""
    total = memory_bytes(ask, handle)[1]
    return total if total is not None and total <= MOST_BYTES else None


class XidEvents:
    """The Xids of one GPU since the first call of `read`. Use it in NVML's thread only."""

    def __init__(self, vendor: Any, ask: Ask, handle: Any) -> None:
        self._vendor = vendor
        self._ask = ask
        self._handle = handle
        self._set: Any = None

    def read(self) -> int | None:
        """Returns the last Xid since the call before, or None."""
        if self._set is None and not self._register():
            return None
        last = None
        for _ in range(_MOST_EVENTS):
            event = self._ask("nvmlEventSetWait_v2", self._set, _EVENT_WAIT_MS)
            if event is None:
                break
            last = event.eventData if event.eventType == self._vendor.nvmlEventTypeXidCriticalError else last
        return last

    def close(self) -> None:
        """Frees the set of events."""
        if self._set is not None:
            with contextlib.suppress(self._vendor.NVMLError):
                self._vendor.nvmlEventSetFree(self._set)
            self._set = None

    def _register(self) -> bool:
        """Begins to collect events, if the device has them. Asks again until the driver answers."""
        types = self._ask("nvmlDeviceGetSupportedEventTypes", self._handle)
        if types is None or not types & self._vendor.nvmlEventTypeXidCriticalError:
            return False
        self._set = self._ask("nvmlEventSetCreate")
        if self._set is not None:
            self._ask("nvmlDeviceRegisterEvents", self._handle, "nvmlEventTypeXidCriticalError", self._set)
        return self._set is not None


def split_by_owner(lists: Sequence[Sequence[Any] | None]) -> tuple[int | None, int | None]:
    """Returns the bytes held by this process and by all others, as far as the driver tells.

    In a container the driver lists the machine's process ids, or only the container's own processes, or none
    (NVIDIA/nvidia-container-toolkit#1013, NVIDIA/nvidia-docker#1483). There, this process's share is None unless it is
    listed, and the others' is None unless this process and at least one other are. A process of unknown size (Windows
    and WSL give no sizes) makes the sum unknown. `lists` are NVML's processes with compute and with graphics contexts,
    which overlap; None: unknown.
    """
    sizes: dict[int, int | None] = {}
    for process in (process for running in lists for process in running or ()):
        size = _known(process.usedGpuMemory, _WIDTH_64)
        sizes[process.pid] = size if size is not None else sizes.get(process.pid)
    listed = os.getpid() in sizes
    own = sizes.pop(os.getpid(), None)
    complete = None not in lists and None not in sizes.values()
    if complete and (_in_first_namespace() or (listed and sizes)):
        return own, sum(size or 0 for size in sizes.values())
    return own, None


def _in_first_namespace() -> bool:
    """Whether process ids are the driver's, as they are outside containers."""
    try:
        return os.readlink("/proc/self/ns/pid") == _FIRST_NAMESPACE
    except OSError:  # not Linux, or /proc is closed
        return False


def _temperature(ask: Ask, handle: Any) -> int | None:
    # The older function first: many drivers lack the newer one. CUDA 14 will remove the older.
    for name in ("nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureV"):
        celsius = _known(ask(name, handle, "NVML_TEMPERATURE_GPU"))
        if celsius is not None:
            return celsius
    return None


def _pcie(ask: Ask, handle: Any, counter: str) -> float | None:
    # NVML says "KB/s" without defining it; taken as 1024 bytes.
    return _scaled(_known(ask("nvmlDeviceGetPcieThroughput", handle, counter)), 1024)


def _throttle_reasons(ask: Ask, handle: Any) -> tuple[str, ...] | None:
    # One function under two names: drivers before R535 know only the second.
    for name in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"):
        mask = _known(ask(name, handle), _WIDTH_64)
        if mask is not None:
            bits = [1 << place for place in range(mask.bit_length()) if mask >> place & 1]
            return tuple(THROTTLE_REASONS.get(bit, f"unknown_{bit:#x}") for bit in bits if bit != _IDLE)
    return None


def _known(value: int | None, width: int = _WIDTH_32) -> int | None:
    """The value, or None for NVML_VALUE_NOT_AVAILABLE: minus one in the field's unsigned width."""
    return None if value is None or value == width - 1 else value


def _scaled(value: int | None, per_unit: int) -> float | None:
    return None if value is None else value / per_unit
