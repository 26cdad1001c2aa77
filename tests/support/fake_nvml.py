"""A fake NVML that tests set up: GPUs, MIG instances, missing fields, errors, calls that hang.

It replaces the module `pynvml` only where `tfopt.hardware.nvml` loads it. Signatures, errors and constants are those of
the real module: a name or an argument that pynvml does not have fails.

    from fake_nvml import FakeGpu, FakeNvml, fake_nvml  # in conftest.py: the fixture

    def test(fake_nvml):
        fake_nvml.gpus.append(FakeGpu())
        fake_nvml.fail("nvmlDeviceGetPowerUsage", pynvml.NVML_ERROR_GPU_IS_LOST, at=3)
"""

import ctypes
import inspect
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pynvml
import pytest
import tensorflow as tf

from tfopt import warn
from tfopt.hardware import GpuSample, GpuSampler
from tfopt.hardware.nvml import driver
from tfopt.hardware.nvml.gpm import METRICS
from tfopt.hardware.nvml.gpu_reading import Reading

# A hung call lasts this long, or until the test ends.
HANG_SECONDS = 30.0

# Every code for which pynvml has an error, and two that a later driver may bring.
ERROR_CODES = sorted({kind(0).value for kind in pynvml.NVMLError.__subclasses__()} | {31, 12345})

# Each field of a reading and the functions it needs. For GPM fields, the one that asks whether there is GPM.
FIELD_FUNCTIONS = {
    "gpu_utilization_percent": ["nvmlDeviceGetUtilizationRates"],
    "sm_active_percent": ["nvmlGpmQueryDeviceSupport"],
    "sm_occupancy_percent": ["nvmlGpmQueryDeviceSupport"],
    "tensor_active_percent": ["nvmlGpmQueryDeviceSupport"],
    "dram_active_percent": ["nvmlGpmQueryDeviceSupport"],
    "gpu_memory_used_mib": ["nvmlDeviceGetMemoryInfo"],
    "gpu_memory_total_mib": ["nvmlDeviceGetMemoryInfo"],
    "gpu_memory_process_mib": ["nvmlDeviceGetComputeRunningProcesses_v3"],
    "gpu_memory_others_mib": ["nvmlDeviceGetComputeRunningProcesses_v3"],
    "gpu_power_watts": ["nvmlDeviceGetPowerUsage"],
    "gpu_power_limit_watts": ["nvmlDeviceGetEnforcedPowerLimit"],
    "gpu_energy_joules": ["nvmlDeviceGetTotalEnergyConsumption"],
    "sm_clock_mhz": ["nvmlDeviceGetClockInfo"],
    "memory_clock_mhz": ["nvmlDeviceGetClockInfo"],
    "gpu_temperature_celsius": ["nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureV"],
    "pcie_rx_mib_per_second": ["nvmlDeviceGetPcieThroughput"],
    "pcie_tx_mib_per_second": ["nvmlDeviceGetPcieThroughput"],
    "nvlink_rx_mib_per_second": ["nvmlGpmQueryDeviceSupport"],
    "nvlink_tx_mib_per_second": ["nvmlGpmQueryDeviceSupport"],
    "throttle_reasons": ["nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"],
    "gpu_ecc_uncorrected_errors": ["nvmlDeviceGetTotalEccErrors"],
    "gpu_xid": [
        "nvmlDeviceGetSupportedEventTypes",
        "nvmlEventSetCreate",
        "nvmlDeviceRegisterEvents",
        "nvmlEventSetWait_v2",
    ],
}
_GRAPHICS = "nvmlDeviceGetGraphicsRunningProcesses_v3"
READ_FUNCTIONS = sorted({name for names in FIELD_FUNCTIONS.values() for name in names} | {_GRAPHICS})

# What reading a GPU with GPM calls in addition.
GPM_FUNCTIONS = ["nvmlGpmMetricsGet", "nvmlGpmQueryDeviceSupport", "nvmlGpmSampleAlloc", "nvmlGpmSampleGet"]

# Readings of a busy H200 (an 8192³ product in bfloat16), in GPM's units.
GPM = {
    "NVML_GPM_METRIC_SM_UTIL": 95.0,
    "NVML_GPM_METRIC_SM_OCCUPANCY": 14.0,
    "NVML_GPM_METRIC_ANY_TENSOR_UTIL": 92.0,
    "NVML_GPM_METRIC_DRAM_BW_UTIL": 16.0,
    "NVML_GPM_METRIC_PCIE_RX_PER_SEC": 3.5,
    "NVML_GPM_METRIC_PCIE_TX_PER_SEC": 0.25,
    "NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC": 1000.0,
    "NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC": 2000.0,
}


def lost(*functions: str) -> dict[str, None]:
    """The fields that are None when these functions fail, on a GPU without GPM."""
    fields = {field for field, needed in FIELD_FUNCTIONS.items() if set(needed) <= set(functions)}
    return dict.fromkeys(fields | ({"gpu_memory_others_mib"} if _GRAPHICS in functions else set()))


# Beyond Linux's largest process id: never this process's own.
OTHER_PROCESS = 2**22 + 1


@dataclass(eq=False)
class FakeGpu:
    """A GPU or MIG instance, in NVML's own units. It is its own handle.

    Attributes:
        processes: Process ids and bytes; None: unknown. By default this process and another one.
        graphics: The same for processes that draw.
        gpm: The value of each metric; None: no GPM.
        gpm_failed: Metrics that are marked as failed.
        instances: MIG instances; None in the list: a gap.
        instance_id: NVML's number of the MIG instance.
        unsupported: Functions that answer NOT_SUPPORTED.
        errors: Functions that answer another error.
        no_clocks: Clocks that are not supported.
        cpus: The numbers of the CPUs near it.
        pcie: Generation and lanes of its PCIe link, and the most that they can be.
    """

    uuid: str = "GPU-00000000-aaaa-bbbb-cccc-000000000000"
    name: str = "NVIDIA H200"
    memory_total: int = 143_771 * 2**20
    memory_used: int = 1024 * 2**20
    compute_capability: tuple[int, int] = (9, 0)
    bus: int = 1
    utilization: int = 97
    power_milliwatts: int = 686_500
    power_limit_milliwatts: int = 700_000
    energy_millijoules: int = 123_456_789
    sm_clock: int = 1980
    memory_clock: int = 3201
    temperature: int = 54
    pcie_rx: int = 2048
    pcie_tx: int = 512
    reasons: int = 0
    ecc_errors: int = 0
    event_types: int = pynvml.nvmlEventTypeXidCriticalError | pynvml.nvmlEventTypeClock
    processes: list[tuple[int, int | None]] = field(
        default_factory=lambda: [(os.getpid(), 900 * 2**20), (OTHER_PROCESS, 100 * 2**20)]
    )
    graphics: list[tuple[int, int | None]] = field(default_factory=list)
    gpm: dict[str, float] | None = None
    gpm_failed: set[str] = field(default_factory=set)
    instances: "list[FakeGpu | None] | None" = None
    instance_id: int = 0
    unsupported: set[str] = field(default_factory=set)
    errors: dict[str, int] = field(default_factory=dict)
    no_clocks: set[str] = field(default_factory=set)
    cpus: set[int] = field(default_factory=set)
    pcie: tuple[int, int, int, int] = (5, 16, 5, 16)


# The reading of a FakeGpu without GPM.
READING = Reading(
    gpu_utilization_percent=97,
    gpu_memory_used_mib=1024.0,
    gpu_memory_total_mib=143_771.0,
    gpu_memory_process_mib=900.0,
    gpu_memory_others_mib=100.0,
    gpu_power_watts=686.5,
    gpu_power_limit_watts=700.0,
    gpu_energy_joules=123_456.789,
    sm_clock_mhz=1980,
    memory_clock_mhz=3201,
    gpu_temperature_celsius=54,
    pcie_rx_mib_per_second=2.0,
    pcie_tx_mib_per_second=0.5,
    throttle_reasons=(),
    gpu_ecc_uncorrected_errors=0,
)


def tick(sampler: GpuSampler) -> tuple[GpuSample, ...]:
    """Makes a sampler take one sample now, without its thread, and returns it."""
    before = len(sampler.samples)
    sampler._tick(sampler._ended)
    return sampler.samples[before:]


def mig_instance(uuid: str, name: str = "NVIDIA H200 MIG 1g.18gb", memory_total: int = 16_384 * 2**20) -> FakeGpu:
    """An instance as the driver shows it: memory only."""
    whole_gpu_only = {
        "nvmlDeviceGetUtilizationRates",
        "nvmlDeviceGetPowerUsage",
        "nvmlDeviceGetEnforcedPowerLimit",
        "nvmlDeviceGetTotalEccErrors",
        "nvmlDeviceGetSupportedEventTypes",
        "nvmlDeviceGetTotalEnergyConsumption",
        "nvmlDeviceGetClockInfo",
        "nvmlDeviceGetTemperature",
        "nvmlDeviceGetTemperatureV",
        "nvmlDeviceGetPcieThroughput",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetCurrentClocksThrottleReasons",
        "nvmlDeviceGetMigMode",
        "nvmlDeviceGetComputeRunningProcesses_v3",
        "nvmlDeviceGetGraphicsRunningProcesses_v3",
    }
    return FakeGpu(uuid=uuid, name=name, memory_total=memory_total, unsupported=whole_gpu_only)


class FakeNvml:
    """The fake module. Attributes that it does not define are pynvml's own constants and errors.

    Attributes:
        gpus: The physical GPUs, in NVML's order.
        calls: How often each function was called.
        installed: Whether `pynvml` can be imported at all.
        lacks: Functions that this (older) pynvml does not have.
        held: GPM's buffers that are not freed, by address, with the device and the number of the sample in each.
        event_sets: Sets of events that are not freed, by address, with their devices and the events that wait.
        released: Set it to let hung calls go on.
        now: The door's clock, in seconds.
    """

    def __init__(self) -> None:
        self.gpus: list[FakeGpu] = []
        self.calls: Counter[str] = Counter()
        self.installed = True
        self.lacks: set[str] = set()
        self.released = threading.Event()
        self.hanging = threading.Event()
        self.now = 1000.0
        self.held: dict[int, tuple[FakeGpu, int] | None] = {}
        self.event_sets: dict[int, tuple[list[FakeGpu], list[tuple[int, int]]]] = {}
        self._started = False
        self._troubles: list[tuple[str, FakeGpu | None, int, Callable[[], None]]] = []
        self._counts: Counter[int] = Counter()
        self._functions = {
            name[1:]: self._wrapped(name[1:], getattr(self, name))
            for name in dir(type(self))
            if name.startswith("_nvml")
        }

    def load(self) -> "FakeNvml":
        """Called to import NVIDIA's module."""
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

    def tell(self, gpu: FakeGpu, data: int, kind: int = pynvml.nvmlEventTypeXidCriticalError) -> None:
        """An event of a GPU: whoever registered for it before gets it."""
        for gpus, waiting in self.event_sets.values():
            if gpu in gpus:
                waiting.append((kind, data))

    def start_over(self) -> None:
        """Forgets everything but the GPUs."""
        self.recover()
        self.calls.clear()
        self.held.clear()
        self.event_sets.clear()
        self._started = False

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
            _signature(name).bind(*arguments)
            self.calls[name] += 1
            target = arguments[0] if arguments else None
            for number, (function, gpu, at, act) in enumerate(list(self._troubles)):
                if function == name and gpu in (None, target):
                    self._counts[number] += 1
                    if self._counts[number] >= at:
                        act()
            if not self._started and name != "nvmlInit":
                _raise(pynvml.NVML_ERROR_UNINITIALIZED)
            if isinstance(target, FakeGpu):
                code = pynvml.NVML_ERROR_NOT_SUPPORTED if name in target.unsupported else target.errors.get(name)
                if code is not None:
                    _raise(code)
            return behaviour(*arguments)

        return play

    def _nvmlInit(self) -> None:  # noqa: N802
        self._started = True

    def shut_down(self) -> None:
        """Shuts NVML down for the whole process, as another library may."""
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

    def _nvmlDeviceGetEnforcedPowerLimit(self, gpu: FakeGpu) -> int:  # noqa: N802
        return gpu.power_limit_milliwatts

    def _nvmlDeviceGetTotalEccErrors(self, gpu: FakeGpu, kind: int, counter: int) -> int:  # noqa: N802
        assert (kind, counter) == (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
        return gpu.ecc_errors

    def _nvmlDeviceGetSupportedEventTypes(self, gpu: FakeGpu) -> int:  # noqa: N802
        return gpu.event_types

    def _nvmlEventSetCreate(self) -> Any:  # noqa: N802
        address = 64 * (1 + self.calls["nvmlEventSetCreate"])
        self.event_sets[address] = [], []
        return ctypes.cast(address, pynvml.c_nvmlEventSet_t)

    def _nvmlDeviceRegisterEvents(self, gpu: FakeGpu, types: int, events: Any) -> None:  # noqa: N802
        assert types & ~gpu.event_types == 0
        self.event_sets[_address(events)][0].append(gpu)

    def _nvmlEventSetWait_v2(self, events: Any, milliseconds: int) -> Any:  # noqa: N802
        assert milliseconds <= 1
        _, waiting = self.event_sets[_address(events)]  # a KeyError is a crash in the real one
        if not waiting:
            _raise(pynvml.NVML_ERROR_TIMEOUT)
        kind, data = waiting.pop(0)
        return pynvml.c_nvmlEventData_t(eventType=kind, eventData=data)

    def _nvmlEventSetFree(self, events: Any) -> None:  # noqa: N802
        del self.event_sets[_address(events)]

    def _nvmlDeviceGetTotalEnergyConsumption(self, gpu: FakeGpu) -> int:  # noqa: N802
        return gpu.energy_millijoules

    def _nvmlDeviceGetClockInfo(self, gpu: FakeGpu, kind: int) -> int:  # noqa: N802
        if kind in {getattr(pynvml, clock) for clock in gpu.no_clocks}:
            _raise(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return {pynvml.NVML_CLOCK_SM: gpu.sm_clock, pynvml.NVML_CLOCK_MEM: gpu.memory_clock}[kind]

    def _nvmlDeviceGetTemperature(self, gpu: FakeGpu, sensor: int) -> int:  # noqa: N802
        return {pynvml.NVML_TEMPERATURE_GPU: gpu.temperature}[sensor]

    def _nvmlDeviceGetTemperatureV(self, gpu: FakeGpu, sensor: int) -> int:  # noqa: N802
        return {pynvml.NVML_TEMPERATURE_GPU: gpu.temperature}[sensor]

    def _nvmlDeviceGetPcieThroughput(self, gpu: FakeGpu, counter: int) -> int:  # noqa: N802
        return {pynvml.NVML_PCIE_UTIL_RX_BYTES: gpu.pcie_rx, pynvml.NVML_PCIE_UTIL_TX_BYTES: gpu.pcie_tx}[counter]

    def _nvmlDeviceGetComputeRunningProcesses_v3(self, gpu: FakeGpu) -> list[Any]:  # noqa: N802
        return [_process(*process) for process in gpu.processes]

    def _nvmlDeviceGetGraphicsRunningProcesses_v3(self, gpu: FakeGpu) -> list[Any]:  # noqa: N802
        return [_process(*process) for process in gpu.graphics]

    def _nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, instance: FakeGpu) -> FakeGpu:  # noqa: N802
        parents = [gpu for gpu in self.gpus if instance in (gpu.instances or ())]
        return parents[0] if parents else _raise(pynvml.NVML_ERROR_INVALID_ARGUMENT)

    def _nvmlDeviceGetGpuInstanceId(self, instance: FakeGpu) -> int:  # noqa: N802
        return instance.instance_id

    def _nvmlDeviceGetCpuAffinity(self, gpu: FakeGpu, words: int) -> Any:  # noqa: N802
        numbers = [sum(1 << cpu - 64 * word for cpu in gpu.cpus if cpu // 64 == word) for word in range(words)]
        return (ctypes.c_ulonglong * words)(*numbers)

    def _nvmlDeviceGetCurrPcieLinkGeneration(self, gpu: FakeGpu) -> int:  # noqa: N802
        return gpu.pcie[0]

    def _nvmlDeviceGetCurrPcieLinkWidth(self, gpu: FakeGpu) -> int:  # noqa: N802
        return gpu.pcie[1]

    def _nvmlDeviceGetMaxPcieLinkGeneration(self, gpu: FakeGpu) -> int:  # noqa: N802
        return gpu.pcie[2]

    def _nvmlDeviceGetMaxPcieLinkWidth(self, gpu: FakeGpu) -> int:  # noqa: N802
        return gpu.pcie[3]

    def _nvmlGpmQueryDeviceSupport(self, gpu: FakeGpu) -> Any:  # noqa: N802
        return pynvml.c_nvmlGpmSupport_t(version=1, isSupportedDevice=int(gpu.gpm is not None))

    def _nvmlGpmSampleAlloc(self) -> Any:  # noqa: N802
        address = 4096 * (1 + self.calls["nvmlGpmSampleAlloc"])
        self.held[address] = None
        return ctypes.cast(address, pynvml.c_nvmlGpmSample_t)

    def _nvmlGpmSampleFree(self, buffer: Any) -> None:  # noqa: N802
        del self.held[_address(buffer)]  # a KeyError is a crash in the real one

    def _nvmlGpmSampleGet(self, gpu: FakeGpu, buffer: Any) -> Any:  # noqa: N802
        assert _address(buffer) in self.held
        if gpu.gpm is None:
            _raise(pynvml.NVML_ERROR_NOT_SUPPORTED)
        self.held[_address(buffer)] = gpu, self.calls["nvmlGpmSampleGet"] + self.calls["nvmlGpmMigSampleGet"]
        return buffer

    def _nvmlGpmMigSampleGet(self, gpu: FakeGpu, instance_id: int, buffer: Any) -> Any:  # noqa: N802
        found = [instance for instance in gpu.instances or () if instance and instance.instance_id == instance_id]
        return self._nvmlGpmSampleGet(found[0], buffer) if found else _raise(pynvml.NVML_ERROR_NOT_FOUND)

    def _nvmlGpmMetricsGet(self, request: Any) -> Any:  # noqa: N802
        """The metrics of the device, as they are now. The samples must be two of it, the older one first."""
        assert (request.version, request.numMetrics) == (pynvml.NVML_GPM_METRICS_GET_VERSION, len(METRICS))
        older, newer = (self.held[_address(buffer)] for buffer in (request.sample1, request.sample2))
        assert older is not None and newer is not None  # noqa: PT018
        assert (older[0], older[1] < newer[1]) == (newer[0], True)
        names = {getattr(pynvml, name): name for name in GPM}
        for metric in request.metrics[: request.numMetrics]:
            name = names[metric.metricId]
            metric.nvmlReturn = pynvml.NVML_ERROR_NOT_SUPPORTED if name in newer[0].gpm_failed else 0
            metric.value = (newer[0].gpm or {})[name]
        return request

    def _nvmlDeviceGetCurrentClocksEventReasons(self, gpu: FakeGpu) -> int:  # noqa: N802
        return gpu.reasons

    def _nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu: FakeGpu) -> int:  # noqa: N802
        return gpu.reasons


@cache
def _signature(name: str) -> inspect.Signature:
    return inspect.signature(getattr(pynvml, name))


def _process(pid: int, size: int | None) -> Any:
    """As pynvml makes it: a number that is not available is None."""
    process = pynvml.nvmlStructToFriendlyObject(pynvml.c_nvmlProcessInfo_t(pid=pid, usedGpuMemory=size or 0))
    process.usedGpuMemory = size
    return process


def _address(buffer: Any) -> int:
    return ctypes.cast(buffer, ctypes.c_void_p).value or 0


def _raise(code: int) -> Any:
    raise pynvml.NVMLError(code)


@pytest.fixture
def fake_nvml(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvml]:
    """A machine without GPUs at first; no warning given yet, no GPU hidden by the environment.

    TensorFlow tells of no GPU of this machine, which would be taken for one of those here.
    """
    fake = FakeNvml()
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind=None: [])
    monkeypatch.setattr(driver, "_door", driver.Nvml(load=fake.load, clock=lambda: fake.now))
    for variable in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(variable, raising=False)
    warn.forget_warnings()
    yield fake
    fake.recover()
    warn.forget_warnings()


@pytest.fixture
def error_codes(
    fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[int]:
    """Every error code in turn, each with a driver just loaded and no warning given yet."""

    def codes() -> Iterator[int]:
        for code in ERROR_CODES:
            fake_nvml.start_over()
            monkeypatch.setattr(driver, "_door", driver.Nvml(load=fake_nvml.load, clock=lambda: fake_nvml.now))
            warn.forget_warnings()
            caplog.clear()
            yield code

    return codes()
