"""A machine's NVML that tests arrange: GPUs, MIG instances, missing fields, errors, calls that hang.

It stands in for the module `pynvml`, and only where `tfopt.hardware.nvml` loads it. Its functions are autospecs of the
real ones, and its errors and constants are the real ones: a name or a signature that pynvml does not have fails.

    from fake_nvml import FakeGpu, FakeNvml, fake_nvml  # in conftest.py: the fixture

    def test(fake_nvml):
        fake_nvml.gpus.append(FakeGpu())
        fake_nvml.fail("nvmlDeviceGetPowerUsage", pynvml.NVML_ERROR_GPU_IS_LOST, at=3)
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import create_autospec

import pynvml
import pytest

from tfopt.hardware import nvml, warn

# A hung call lasts this long, or until the test ends.
HANG_SECONDS = 30.0

# Every code that pynvml has an error for, and two that a later driver may bring.
ERROR_CODES = sorted({kind(0).value for kind in pynvml.NVMLError.__subclasses__()} | {31, 12345})

# Each field of a reading and the functions without which it is unknown.
FIELD_FUNCTIONS = {
    "gpu_utilization_percent": ["nvmlDeviceGetUtilizationRates"],
    "gpu_memory_used_mib": ["nvmlDeviceGetMemoryInfo"],
    "gpu_memory_total_mib": ["nvmlDeviceGetMemoryInfo"],
    "gpu_power_watts": ["nvmlDeviceGetPowerUsage"],
    "gpu_energy_joules": ["nvmlDeviceGetTotalEnergyConsumption"],
    "sm_clock_mhz": ["nvmlDeviceGetClockInfo"],
    "memory_clock_mhz": ["nvmlDeviceGetClockInfo"],
    "gpu_temperature_celsius": ["nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureV"],
    "pcie_rx_mib_per_second": ["nvmlDeviceGetPcieThroughput"],
    "pcie_tx_mib_per_second": ["nvmlDeviceGetPcieThroughput"],
    "throttle_reasons": ["nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"],
}
READ_FUNCTIONS = sorted({name for names in FIELD_FUNCTIONS.values() for name in names})


@dataclass(eq=False)
class FakeGpu:
    """A GPU or MIG instance, in NVML's own units. It is its own handle. `unsupported`: functions it answers not to."""

    uuid: str = "GPU-00000000-aaaa-bbbb-cccc-000000000000"
    name: str = "NVIDIA H200"
    memory_total: int = 143_771 * 2**20
    memory_used: int = 1024 * 2**20
    compute_capability: tuple[int, int] = (9, 0)
    bus: int = 1
    utilization: int = 97
    power_milliwatts: int = 686_500
    energy_millijoules: int = 123_456_789
    sm_clock: int = 1980
    memory_clock: int = 3201
    temperature: int = 54
    pcie_rx: int = 2048
    pcie_tx: int = 512
    reasons: int = 0
    instances: "list[FakeGpu | None] | None" = None
    unsupported: set[str] = field(default_factory=set)


def mig_instance(uuid: str, name: str = "NVIDIA H200 MIG 1g.18gb", memory_total: int = 16_384 * 2**20) -> FakeGpu:
    """An instance as the driver shows it: memory, and no more."""
    whole_gpu_only = {
        "nvmlDeviceGetUtilizationRates",
        "nvmlDeviceGetPowerUsage",
        "nvmlDeviceGetTotalEnergyConsumption",
        "nvmlDeviceGetClockInfo",
        "nvmlDeviceGetTemperature",
        "nvmlDeviceGetTemperatureV",
        "nvmlDeviceGetPcieThroughput",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetCurrentClocksThrottleReasons",
        "nvmlDeviceGetMigMode",
    }
    return FakeGpu(uuid=uuid, name=name, memory_total=memory_total, unsupported=whole_gpu_only)


class FakeNvml:
    """The fake module. Attributes that it does not define are pynvml's own constants and errors.

    Attributes:
        gpus: The physical GPUs, in NVML's order.
        calls: How often each function was called.
        installed: Whether `pynvml` can be imported at all.
        lacks: Functions that this (older) pynvml does not have.
        released: Set it to let hung calls go on.
    """

    def __init__(self) -> None:
        self.gpus: list[FakeGpu] = []
        self.calls: Counter[str] = Counter()
        self.installed = True
        self.lacks: set[str] = set()
        self.released = threading.Event()
        self.hanging = threading.Event()
        self._started = False
        self._troubles: list[tuple[str, FakeGpu | None, int, Callable[[], None]]] = []
        self._counts: Counter[int] = Counter()
        self._functions = {
            name[1:]: create_autospec(getattr(pynvml, name[1:]), side_effect=self._wrapped(name[1:], behaviour))
            for name, behaviour in ((name, getattr(self, name)) for name in dir(type(self)) if name.startswith("_nvml"))
        }

    def load(self) -> "FakeNvml":
        """What the door calls to import the vendor's module."""
        if not self.installed:
            raise ModuleNotFoundError("No module named 'pynvml'")
        return self

    def fail(self, function: str, code: int, *, at: int = 1, gpu: FakeGpu | None = None) -> None:
        """From its call number `at` on, the function raises the error with this code (on this GPU only)."""
        self._trouble(function, gpu, at, lambda: _raise(code))

    def hang(self, function: str, *, at: int = 1, gpu: FakeGpu | None = None) -> None:
        """From its call number `at` on, the function does not return until the test ends."""
        self._trouble(function, gpu, at, self._hang)

    def recover(self) -> None:
        """Ends all troubles; hung calls return."""
        self._troubles.clear()
        self._counts.clear()
        self.released.set()

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("lacks", ()):
            raise AttributeError(name)
        if name in self.__dict__.get("_functions", ()):
            return self._functions[name]
        if not hasattr(pynvml, name):
            raise AssertionError(f"pynvml has no {name!r}")
        real = getattr(pynvml, name)
        if callable(real) and not isinstance(real, type):
            raise AssertionError(f"the fake NVML does not play {name!r}")
        return real

    def _trouble(self, function: str, gpu: FakeGpu | None, at: int, act: Callable[[], None]) -> None:
        assert function in self._functions, function
        self._troubles.append((function, gpu, at, act))

    def _hang(self) -> None:
        self.hanging.set()
        self.released.wait(HANG_SECONDS)

    def _wrapped(self, name: str, behaviour: Callable[..., Any]) -> Callable[..., Any]:
        def play(*arguments: Any) -> Any:
            self.calls[name] += 1
            target = arguments[0] if arguments else None
            for number, (function, gpu, at, act) in enumerate(list(self._troubles)):
                if function == name and gpu in (None, target):
                    self._counts[number] += 1
                    if self._counts[number] >= at:
                        act()
            if not self._started and name != "nvmlInit":
                _raise(pynvml.NVML_ERROR_UNINITIALIZED)
            if isinstance(target, FakeGpu) and name in target.unsupported:
                _raise(pynvml.NVML_ERROR_NOT_SUPPORTED)
            return behaviour(*arguments)

        return play

    def _nvmlInit(self) -> None:  # noqa: N802
        self._started = True

    def shut_down(self) -> None:
        """What another library does when it ends NVML for the whole process."""
        self._started = False

    def _nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "570.86.15"

    def _nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.gpus)

    def _nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:  # noqa: N802
        return self.gpus[index]

    def _nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeGpu:  # noqa: N802
        instances = [instance for gpu in self.gpus for instance in gpu.instances or () if instance is not None]
        for device in [*self.gpus, *instances]:
            if device.uuid == uuid:
                return device
        return _raise(pynvml.NVML_ERROR_NOT_FOUND)

    def _nvmlDeviceGetUUID(self, gpu: FakeGpu) -> str:  # noqa: N802
        return gpu.uuid

    def _nvmlDeviceGetName(self, gpu: FakeGpu) -> str:  # noqa: N802
        return gpu.name

    def _nvmlDeviceGetPciInfo(self, gpu: FakeGpu) -> Any:  # noqa: N802
        return pynvml.nvmlPciInfo_t(domain=0, bus=gpu.bus, device=0)

    def _nvmlDeviceGetCudaComputeCapability(self, gpu: FakeGpu) -> tuple[int, int]:  # noqa: N802
        return gpu.compute_capability

    def _nvmlDeviceGetMigMode(self, gpu: FakeGpu) -> list[int]:  # noqa: N802
        return [int(gpu.instances is not None)] * 2

    def _nvmlDeviceGetMaxMigDeviceCount(self, gpu: FakeGpu) -> int:  # noqa: N802
        return 7

    def _nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: FakeGpu, index: int) -> FakeGpu:  # noqa: N802
        instances = gpu.instances or []
        found = instances[index] if index < len(instances) else None
        return found if found is not None else _raise(pynvml.NVML_ERROR_NOT_FOUND)

    def _nvmlDeviceGetUtilizationRates(self, gpu: FakeGpu) -> Any:  # noqa: N802
        return pynvml.c_nvmlUtilization_t(gpu=gpu.utilization, memory=0)

    def _nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu) -> Any:  # noqa: N802
        free = max(0, gpu.memory_total - gpu.memory_used)
        return pynvml.c_nvmlMemory_t(total=gpu.memory_total, used=gpu.memory_used, free=free)

    def _nvmlDeviceGetPowerUsage(self, gpu: FakeGpu) -> int:  # noqa: N802
        return gpu.power_milliwatts

    def _nvmlDeviceGetTotalEnergyConsumption(self, gpu: FakeGpu) -> int:  # noqa: N802
        return gpu.energy_millijoules

    def _nvmlDeviceGetClockInfo(self, gpu: FakeGpu, kind: int) -> int:  # noqa: N802
        return {pynvml.NVML_CLOCK_SM: gpu.sm_clock, pynvml.NVML_CLOCK_MEM: gpu.memory_clock}[kind]

    def _nvmlDeviceGetTemperature(self, gpu: FakeGpu, sensor: int) -> int:  # noqa: N802
        return {pynvml.NVML_TEMPERATURE_GPU: gpu.temperature}[sensor]

    def _nvmlDeviceGetTemperatureV(self, gpu: FakeGpu, sensor: int) -> int:  # noqa: N802
        return {pynvml.NVML_TEMPERATURE_GPU: gpu.temperature}[sensor]

    def _nvmlDeviceGetPcieThroughput(self, gpu: FakeGpu, counter: int) -> int:  # noqa: N802
        return {pynvml.NVML_PCIE_UTIL_RX_BYTES: gpu.pcie_rx, pynvml.NVML_PCIE_UTIL_TX_BYTES: gpu.pcie_tx}[counter]

    def _nvmlDeviceGetCurrentClocksEventReasons(self, gpu: FakeGpu) -> int:  # noqa: N802
        return gpu.reasons

    def _nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu: FakeGpu) -> int:  # noqa: N802
        return gpu.reasons


def _raise(code: int) -> Any:
    raise pynvml.NVMLError(code)


@pytest.fixture
def fake_nvml(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvml]:
    """A machine without GPUs, to be given some; no warning has been given, and no GPU is hidden by the environment."""
    fake = FakeNvml()
    monkeypatch.setattr(nvml, "_door", nvml.Nvml(load=fake.load))
    for variable in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(variable, raising=False)
    warn.forget_warnings()
    yield fake
    fake.recover()
    warn.forget_warnings()
