"""Starts NVML, lists the GPUs and MIG instances, and reads one device.

Every call runs in one thread (`Nvml.call`), because a broken driver may never return.
"""

import importlib
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from tfopt.hardware.nvml.bounds import Bounds
from tfopt.hardware.nvml.gpm import Gpm
from tfopt.hardware.nvml.gpu_reading import Device, Reading, XidEvents, owners_bytes, read_device, total_bytes
from tfopt.hardware.nvml.return_codes import ABSENT, GONE, TIMEOUT, UNINITIALIZED, NvmlError, explain
from tfopt.warn import warn_once

Result = TypeVar("Result")

DEADLINE_SECONDS = 10.0  # waking several GPUs takes seconds

# Enough for the 8,192 CPUs of the largest Linux kernel; too few is an error.
_CPU_WORDS = 128
# Waiting for an event ends like this if there is none.
_NO_EVENT = ("nvmlEventSetWait_v2", TIMEOUT)


@dataclass(frozen=True, slots=True)
class _Opened:
    """A device that is being read, with what is kept between two readings."""

    handle: Any
    gpm: Gpm
    xids: XidEvents
    bounds: Bounds

    def close(self) -> None:
        self.gpm.close()
        self.xids.close()


class Nvml:
    """NVML, started by the first call and left running until the process ends."""

    def __init__(
        self,
        load: Callable[[], Any] = lambda: importlib.import_module("pynvml"),  # tests pass a fake module
        *,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._load = load
        self._clock = clock
        self._worker = Worker()
        self._vendor: Any = None
        self._started = False
        self._opened: dict[str, _Opened] = {}
        self._last_xids: dict[str, int] = {}

    def call(self, function: Callable[[], Result], *, deadline_seconds: float = DEADLINE_SECONDS) -> Result:
        """Returns `function()`, called in NVML's own thread; raises NvmlError if it does not return by the deadline."""
        try:
            return self._worker.call(function, deadline_seconds=deadline_seconds)
        except TimeoutError as error:
            raise hung(deadline_seconds) from error

    def submit(self, function: Callable[[], object]) -> Future[Any]:
        """Has `function` called in NVML's own thread without waiting; raises TimeoutError if an earlier call hangs."""
        return self._worker.submit(function)

    def give_up(self, call: Future[Any]) -> None:
        """Treats a submitted call as hung: until it returns, no other is made."""
        self._worker.give_up(call)

    def start(self) -> None:
        """Loads NVIDIA's library and starts NVML, unless it is running; raises NvmlError if either fails."""
        if self._started:
            return
        try:
            self._vendor = self._load()
            failure = self._vendor.NVMLError
        except Exception as error:  # missing, broken, or another module of that name
            raise NvmlError(
                "pynvml_missing",
                "Expected the module pynvml, which queries NVIDIA's driver. Found: it cannot be imported. "
                "What to do: pip install nvidia-ml-py (not the distribution called pynvml).",
            ) from error
        self._close_all()
        try:
            self._vendor.nvmlInit()
        except failure as error:
            raise explain(error.value, "NVIDIA's driver to answer") from error
        self._started = True

    def driver_version(self) -> str | None:
        """Returns the driver's version, such as "570.86.15"."""
        self.start()
        return self._field("nvmlSystemGetDriverVersion")

    def devices(self) -> tuple[Device, ...]:
        """Returns the physical GPUs with their MIG instances, ordered by PCI bus id.

        A GPU that does not answer is left out with a warning. Raises NvmlError if NVML cannot be started or does not
        say how many GPUs there are.
        """
        self.start()
        found = []
        for position in range(self._ask("nvmlDeviceGetCount", expected="the number of GPUs")):
            try:
                found.append(self._device(position))
            except NvmlError as error:
                warn_once(f"{error.cause} at {position}", str(error))
        # NVML promises no order; its order is kept only if a bus id is unknown.
        places = [device.pci for device in found]
        return tuple(found if None in places else sorted(found, key=lambda device: device.pci or ()))

    def read(self, uuid: str, *, restart: bool = False) -> Reading:
        """Reads every field of a GPU or MIG instance; raises NvmlError if it is lost, removed or in need of a reset.

        `restart` forgets the last reading, which another caller made: fields measured since then start over.
        """
        self.start()
        if uuid not in self._opened:
            self._opened[uuid] = self._open(uuid)
        opened = self._opened[uuid]
        try:
            xid = opened.xids.read()  # first: it says why a GPU is lost
            if xid is not None:
                self._last_xids[uuid] = xid
            metrics = opened.gpm.read(restart=restart)
            reading = read_device(self._field, opened.handle, metrics, self.last_xid(uuid))
        except NvmlError:
            # Its own only: the other GPUs' handles stay valid. (After a shutdown, `start` closes them all.)
            self._opened.pop(uuid).close()
            raise
        return opened.bounds.check(reading, self._clock())

    def last_xid(self, uuid: str) -> int | None:
        """Returns the last Xid that `read` met, also if the GPU is lost since; None: none."""
        return self._last_xids.get(uuid)

    def cpu_affinity(self, uuid: str) -> frozenset[int] | None:
        """Returns the CPUs near a GPU, or near a MIG instance's GPU; None if the driver does not say."""
        self.start()
        handle = self._ask("nvmlDeviceGetHandleByUUID", uuid, expected=f"the device {uuid}")
        if uuid.startswith("MIG-"):
            handle = self._field("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle)
        words = None if handle is None else self._field("nvmlDeviceGetCpuAffinity", handle, _CPU_WORDS)
        cpus = (64 * place + bit for place, word in enumerate(words or ()) for bit in range(64) if word >> bit & 1)
        return frozenset(cpus) or None

    def memory(self, uuid: str) -> tuple[int | None, ...]:
        """Returns the bytes of a GPU that this process holds, that others hold, and in total."""
        self.start()
        handle = self._ask("nvmlDeviceGetHandleByUUID", uuid, expected=f"the device {uuid}")
        return *owners_bytes(self._field, handle), total_bytes(self._field, handle)

    def pcie_link(self, uuid: str) -> tuple[int | None, ...]:
        """Returns the generation and lanes of a GPU's PCIe link now, and the most that device and system can do."""
        self.start()
        handle = self._ask("nvmlDeviceGetHandleByUUID", uuid, expected=f"the device {uuid}")
        names = ("CurrPcieLinkGeneration", "CurrPcieLinkWidth", "MaxPcieLinkGeneration", "MaxPcieLinkWidth")
        return tuple(self._field(f"nvmlDeviceGet{name}", handle) for name in names)

    def _open(self, uuid: str) -> _Opened:
        handle = self._ask("nvmlDeviceGetHandleByUUID", uuid, expected=f"the device {uuid}")
        gpm = Gpm(self._vendor, self._field, handle, mig=uuid.startswith("MIG-"), clock=self._clock)
        return _Opened(handle, gpm, XidEvents(self._vendor, self._field, handle), Bounds(uuid))

    def _close_all(self) -> None:
        for opened in self._opened.values():
            opened.close()
        self._opened.clear()

    def _device(self, position: int) -> Device:
        handle = self._ask("nvmlDeviceGetHandleByIndex", position, expected=f"GPU {position} of the machine")
        uuid = self._ask("nvmlDeviceGetUUID", handle, expected=f"the UUID of GPU {position} of the machine")
        name = self._field("nvmlDeviceGetName", handle) or "NVIDIA GPU"
        capability = self._field("nvmlDeviceGetCudaComputeCapability", handle)
        capability = None if capability is None or min(capability) < 0 else tuple(capability)
        pci = self._field("nvmlDeviceGetPciInfo", handle)
        mode = self._field("nvmlDeviceGetMigMode", handle)
        return Device(
            uuid,
            name,
            total_bytes(self._field, handle),
            capability,
            (pci.domain, pci.bus, pci.device) if pci is not None else None,
            self._instances(handle, name, capability) if mode is not None and mode[0] == 1 else None,
        )

    def _instances(self, parent: Any, name: str, capability: tuple[int, int] | None) -> tuple[Device, ...]:
        found = []
        for position in range(self._field("nvmlDeviceGetMaxMigDeviceCount", parent) or 0):
            # Destroyed instances leave gaps, for which NVML returns NOT_FOUND.
            handle = self._field("nvmlDeviceGetMigDeviceHandleByIndex", parent, position)
            uuid = self._field("nvmlDeviceGetUUID", handle) if handle is not None else None
            if uuid is not None:
                own_name = self._field("nvmlDeviceGetName", handle) or f"{name} MIG"
                found.append(Device(uuid, own_name, total_bytes(self._field, handle), capability))
        return tuple(found)

    def _ask(self, name: str, *arguments: Any, expected: str) -> Any:
        """Calls an NVML function that must answer."""
        try:
            return getattr(self._vendor, name)(*arguments)
        except self._vendor.NVMLError as error:
            self._started = self._started and error.value != UNINITIALIZED
            raise explain(error.value, expected) from error

    def _field(self, name: str, *arguments: Any) -> Any:
        """Calls an NVML function; returns None if it is missing, or fails for this field alone."""
        function = getattr(self._vendor, name, None)  # an older pynvml lacks the newer functions
        if function is None:
            return None
        constants = [getattr(self._vendor, a) if isinstance(a, str) else a for a in arguments]
        try:
            return function(*constants)
        except UnicodeDecodeError:
            return None
        except self._vendor.NVMLError as error:
            if error.value in ABSENT or (name, error.value) == _NO_EVENT:
                return None
            trouble = explain(error.value, f"an answer to {name}")
            if error.value in GONE:
                self._started = self._started and error.value != UNINITIALIZED
                raise trouble from error
            warn_once(trouble.cause, f"{trouble} Until then the reading is unknown.")
            return None


class Worker:
    """A daemon thread that makes one call at a time, so that a caller never waits beyond its deadline.

    While a call hangs, further calls fail immediately instead of queueing behind it; once it returns, the worker takes
    calls again. Not a ThreadPoolExecutor: at exit the interpreter waits for its threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._running: Future[Any] | None = None
        self._overdue: Future[Any] | None = None

    def call(self, function: Callable[[], Result], *, deadline_seconds: float) -> Result:
        """Returns what `function()` returns; raises TimeoutError at the deadline, or if an earlier call still hangs."""
        future = self.submit(function)
        try:
            return future.result(deadline_seconds)
        except TimeoutError:
            self.give_up(future)
            raise

    def submit(self, function: Callable[[], Result]) -> Future[Result]:
        """Puts a call into the queue; raises TimeoutError if an earlier call hangs."""
        future: Future[Result] = Future()
        with self._lock:
            if self._overdue is not None and not self._overdue.done():
                raise TimeoutError("an earlier call has not returned yet")
            self._start()
            self._jobs.put((future, function))
        return future

    def give_up(self, future: Future[Any]) -> None:
        """Lets no further call in until this one returns."""
        # If the call was still queued, it is never made, and the one before it is overdue.
        self._overdue = self._running if future.cancel() else future

    def _start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._jobs = queue.SimpleQueue()
            self._thread = threading.Thread(target=self._work, args=(self._jobs,), name="tfopt-nvml", daemon=True)
            self._thread.start()

    def _work(self, jobs: "queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]]") -> None:
        while True:
            future, function = jobs.get()
            if future.set_running_or_notify_cancel():
                self._running = future
                try:
                    future.set_result(function())
                except BaseException as error:  # noqa: BLE001  the caller gets it; the worker must survive
                    future.set_exception(error)
            del future, function  # a waiting worker must not keep a result, or an error's frames, alive
            self._running = None


def hung(deadline_seconds: float) -> NvmlError:
    """Returns the error for a call that has not returned by the deadline."""
    return NvmlError(
        "hung",
        f"Expected an answer from NVIDIA's driver within {deadline_seconds:g} s. Found: the call hangs; GPU "
        "readings are unknown until it returns. What to do: run nvidia-smi; if it hangs too, look for Xid "
        "lines in dmesg and reset the GPU or reboot.",
    )


_door = Nvml()


def _begin_anew_after_fork() -> None:
    """A forked child has neither NVML's thread nor handles of its own."""
    global _door
    _door = Nvml(_door._load, clock=_door._clock)


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_begin_anew_after_fork)


def door() -> Nvml:
    """Returns this process's NVML."""
    return _door
