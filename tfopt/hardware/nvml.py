"""The only door to NVML: starts it, lists the GPUs and MIG instances, reads one device.

Every call goes through one thread (`Nvml.call`), since a driver in trouble may never answer.
"""

import importlib
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from tfopt.hardware.gpm import Gpm, Metrics
from tfopt.hardware.nvml_errors import ABSENT, GONE, UNINITIALIZED, NvmlError, explain, hung, not_installed
from tfopt.hardware.nvml_values import WIDTH_64, Device, Reading, known, mib, scaled, throttle_names
from tfopt.hardware.processes import shares
from tfopt.hardware.worker import Worker
from tfopt.warn import warn_once

Result = TypeVar("Result")

DEADLINE_SECONDS = 10.0

# The functions without a version call these, and fail with an error that is none of NVML's where the driver is older.
_PROCESSES = ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v3")

# As many as the largest Linux kernel knows CPUs (8,192); too few are an error.
_CPU_WORDS = 128


class Nvml:
    """NVML, started at the first question and left running until the process ends.

    Args:
        load: Returns the vendor's module. Tests put a fake one here.
        clock: Monotonic clock, in seconds.
    """

    def __init__(
        self,
        load: Callable[[], Any] = lambda: importlib.import_module("pynvml"),
        *,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._load = load
        self._clock = clock
        self._lock = threading.Lock()
        self._worker = Worker("tfopt-nvml")
        self._vendor: Any = None
        self._started = False
        self._handles: dict[str, tuple[Any, Gpm]] = {}

    def call(self, function: Callable[[], Result], *, deadline_seconds: float = DEADLINE_SECONDS) -> Result:
        """Returns `function()`, made in NVML's own thread.

        Raises:
            NvmlError: It raised one, or did not return within the deadline.
        """
        try:
            return self._worker.call(function, deadline_seconds=deadline_seconds)
        except TimeoutError as error:
            raise hung(deadline_seconds) from error

    def start(self) -> None:
        """Loads the vendor's library and starts NVML, unless that is done.

        Raises:
            NvmlError: There is no library or driver, or they are in trouble.
        """
        with self._lock:
            if self._started:
                return
            try:
                self._vendor = self._load()
                failure = self._vendor.NVMLError
            except Exception as error:  # not there, another module of that name, or a broken one
                raise not_installed() from error
            self._drop_handles()
            try:
                self._vendor.nvmlInit()
            except failure as error:
                raise explain(error.value, "NVIDIA's driver to answer") from error
            self._started = True

    def driver_version(self) -> str | None:
        """The driver's version, as "570.86.15"."""
        self.start()
        return self._field("nvmlSystemGetDriverVersion")

    def devices(self) -> tuple[Device, ...]:
        """The physical GPUs in the order of their PCI bus ids, with their MIG instances.

        A GPU that does not answer is left out with a warning.

        Raises:
            NvmlError: NVML cannot be started or does not say how many GPUs there are.
        """
        self.start()
        found = []
        for position in range(self._ask("nvmlDeviceGetCount", expected="the number of GPUs")):
            try:
                found.append(self._device(position))
            except NvmlError as error:
                warn_once(f"{error.cause} at {position}", str(error))
        # NVML promises no order of its own; it is kept where a bus id is unknown.
        places = [device.pci for device in found]
        return tuple(found if None in places else sorted(found, key=lambda device: device.pci or ()))

    def read(self, uuid: str, *, anew: bool = False) -> Reading:
        """Reads every field of the GPU or MIG instance with this UUID.

        Args:
            uuid: NVIDIA's name for the device.
            anew: What is measured since the reading before begins with this one.

        Raises:
            NvmlError: The device as a whole does not answer: lost, removed, in need of a reset.
        """
        self.start()
        if uuid not in self._handles:
            handle = self._ask("nvmlDeviceGetHandleByUUID", uuid, expected=f"the device {uuid}")
            gpm = Gpm(self._vendor, self._field, handle, mig=uuid.startswith("MIG-"), clock=self._clock)
            self._handles[uuid] = handle, gpm
        handle, gpm = self._handles[uuid]
        try:
            return self._read(handle, gpm.read(anew=anew))
        except NvmlError:
            self._drop_handles()
            raise

    def cpu_affinity(self, uuid: str) -> list[int] | None:
        """The CPUs near the GPU, or near the one that a MIG instance is part of: 64 of them in the bits of each number.

        Raises:
            NvmlError: There is no such device.
        """
        self.start()
        handle = self._ask("nvmlDeviceGetHandleByUUID", uuid, expected=f"the device {uuid}")
        if uuid.startswith("MIG-"):
            handle = self._field("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle)
        words = None if handle is None else self._field("nvmlDeviceGetCpuAffinity", handle, _CPU_WORDS)
        return None if words is None else list(words)

    def _drop_handles(self) -> None:
        for _, gpm in self._handles.values():
            gpm.close()
        self._handles.clear()

    def _device(self, position: int) -> Device:
        handle = self._ask("nvmlDeviceGetHandleByIndex", position, expected=f"GPU {position} of the machine")
        uuid = self._ask("nvmlDeviceGetUUID", handle, expected=f"the UUID of GPU {position} of the machine")
        name = self._field("nvmlDeviceGetName", handle) or "NVIDIA GPU"
        capability = self._capability(handle)
        pci = self._field("nvmlDeviceGetPciInfo", handle)
        mode = self._field("nvmlDeviceGetMigMode", handle)
        return Device(
            uuid,
            name,
            self._memory(handle)[1],
            capability,
            (pci.domain, pci.bus, pci.device) if pci is not None else None,
            self._instances(handle, name, capability) if mode is not None and mode[0] == 1 else None,
        )

    def _instances(self, parent: Any, name: str, capability: tuple[int, int] | None) -> tuple[Device, ...]:
        found = []
        for position in range(self._field("nvmlDeviceGetMaxMigDeviceCount", parent) or 0):
            # Positions have gaps where instances were destroyed: there NVML answers NOT_FOUND.
            handle = self._field("nvmlDeviceGetMigDeviceHandleByIndex", parent, position)
            uuid = self._field("nvmlDeviceGetUUID", handle) if handle is not None else None
            if uuid is not None:
                own_name = self._field("nvmlDeviceGetName", handle) or f"{name} MIG"
                found.append(Device(uuid, own_name, self._memory(handle)[1], capability))
        return tuple(found)

    def _read(self, handle: Any, metrics: Metrics | None) -> Reading:
        """Reads the device. `metrics`: what GPM says, if the device has it."""
        utilization = self._field("nvmlDeviceGetUtilizationRates", handle)
        used, total = self._memory(handle)
        own, others = shares([self._field(name, handle) for name in _PROCESSES])
        reading = Reading(
            gpu_utilization_percent=known(utilization.gpu) if utilization is not None else None,
            gpu_memory_used_mib=mib(used),
            gpu_memory_total_mib=mib(total),
            gpu_memory_process_mib=mib(own),
            gpu_memory_others_mib=mib(others),
            gpu_power_watts=scaled(known(self._field("nvmlDeviceGetPowerUsage", handle)), 1000),
            gpu_energy_joules=scaled(known(self._field("nvmlDeviceGetTotalEnergyConsumption", handle), WIDTH_64), 1000),
            sm_clock_mhz=known(self._field("nvmlDeviceGetClockInfo", handle, "NVML_CLOCK_SM")),
            memory_clock_mhz=known(self._field("nvmlDeviceGetClockInfo", handle, "NVML_CLOCK_MEM")),
            gpu_temperature_celsius=self._temperature(handle),
            throttle_reasons=self._throttle_reasons(handle),
        )
        if metrics is None:  # each of these calls takes 21 ms
            return reading._replace(
                pcie_rx_mib_per_second=self._pcie(handle, "NVML_PCIE_UTIL_RX_BYTES"),
                pcie_tx_mib_per_second=self._pcie(handle, "NVML_PCIE_UTIL_TX_BYTES"),
            )
        return reading._replace(**metrics._asdict())

    def _memory(self, handle: Any) -> tuple[int | None, int | None]:
        """Bytes used and in all. "Used" contains what the driver keeps for itself: total - used is what is free."""
        memory = self._field("nvmlDeviceGetMemoryInfo", handle)
        if memory is None:
            return None, None
        return known(memory.used, WIDTH_64), known(memory.total, WIDTH_64)

    def _capability(self, handle: Any) -> tuple[int, int] | None:
        capability = self._field("nvmlDeviceGetCudaComputeCapability", handle)
        return None if capability is None or min(capability) < 0 else tuple(capability)

    def _temperature(self, handle: Any) -> int | None:
        # The older of two functions: the newer is missing from many drivers, this one is announced to end in CUDA 14.
        for name in ("nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureV"):
            celsius = known(self._field(name, handle, "NVML_TEMPERATURE_GPU"))
            if celsius is not None:
                return celsius
        return None

    def _pcie(self, handle: Any, counter: str) -> float | None:
        # NVML says "KB/s" and not how long a KB is; taken as 1024 bytes.
        return scaled(known(self._field("nvmlDeviceGetPcieThroughput", handle, counter)), 1024)

    def _throttle_reasons(self, handle: Any) -> tuple[str, ...] | None:
        # One function under two names: drivers before R535 know only the second.
        for name in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"):
            mask = known(self._field(name, handle), WIDTH_64)
            if mask is not None:
                return throttle_names(mask)
        return None

    def _ask(self, name: str, *arguments: Any, expected: str) -> Any:
        """What one of NVML's functions returns. Whatever it does not return is an error."""
        try:
            return getattr(self._vendor, name)(*arguments)
        except self._vendor.NVMLError as error:
            self._started = self._started and error.value != UNINITIALIZED
            raise explain(error.value, expected) from error

    def _field(self, name: str, *arguments: Any) -> Any:
        """What one of NVML's functions returns; None where it is not offered, or fails for this field alone."""
        function = getattr(self._vendor, name, None)  # an older pynvml lacks the newer functions
        if function is None:
            return None
        constants = [getattr(self._vendor, a) if isinstance(a, str) else a for a in arguments]
        try:
            return function(*constants)
        except UnicodeDecodeError:
            return None
        except self._vendor.NVMLError as error:
            if error.value in ABSENT:
                return None
            trouble = explain(error.value, f"an answer to {name}")
            if error.value in GONE:
                self._started = self._started and error.value != UNINITIALIZED
                raise trouble from error
            warn_once(trouble.cause, f"{trouble} Until then the reading is unknown.")
            return None


_door = Nvml()


def door() -> Nvml:
    """The process's NVML."""
    return _door
