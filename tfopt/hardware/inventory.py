"""Lists the GPUs that this process may use, reading CUDA_VISIBLE_DEVICES and MIG as CUDA does."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from tfopt.hardware.nvml import driver
from tfopt.hardware.nvml.gpu_reading import MIB, Device
from tfopt.hardware.nvml.return_codes import NO_DRIVER, NvmlError
from tfopt.warn import warn_once

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU or MIG instance that this process may use."""

    index: int
    """Its position among the process's GPUs: TensorFlow's `GPU:index`."""
    uuid: str
    """NVIDIA's identifier, "GPU-…" or "MIG-…". Unlike an index, it survives reboots."""
    name: str
    """The product name."""
    memory_mib: int | None
    """Total memory; None if unknown."""
    compute_capability: tuple[int, int] | None
    """Such as `(9, 0)`; None if unknown."""
    mig: bool
    """Whether it is a MIG instance."""
    driver_version: str | None
    """Such as "570.86.15"; None if unknown."""

    def __str__(self) -> str:
        parts = [f"GPU:{self.index} {self.name}"]
        if self.mig:
            parts.append("MIG instance")
        if self.memory_mib is not None:
            parts.append(f"{self.memory_mib} MiB")
        if self.compute_capability is not None:
            parts.append("compute capability {}.{}".format(*self.compute_capability))
        if self.driver_version is not None:
            parts.append(f"driver {self.driver_version}")
        return ", ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        capability = None if self.compute_capability is None else list(self.compute_capability)
        return asdict(self) | {"compute_capability": capability}


def gpus(
    *, environ: Mapping[str, str] = os.environ, deadline_seconds: float = driver.DEADLINE_SECONDS
) -> tuple[Gpu, ...]:
    """Returns the GPUs that this process may use, in CUDA's order; an empty tuple on a machine without a GPU.

    It loads neither TensorFlow nor CUDA, takes no GPU memory and initialises only NVML. On a machine with several
    models of GPU, with CUDA_VISIBLE_DEVICES unset and CUDA_DEVICE_ORDER not PCI_BUS_ID, the order is that of the PCI
    bus, which may differ from CUDA's.

    Args:
        environ: Where CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER are read. Default: this process's environment.
        deadline_seconds: How long to wait for the driver; then logs a warning and returns no GPUs. Default: 10.

    Example:
        >>> for gpu in gpus():
        ...     print(gpu)
    """
    if hides_all(environ):
        return ()
    return _answer(lambda nvml: find_gpus(nvml, environ), deadline_seconds) or ()


def find_gpus(nvml: driver.Nvml, environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Returns what `gpus()` does, or raises NvmlError. May hang with the driver: call it in NVML's thread."""
    devices = _visible(nvml.devices(), environ)
    driver_version = nvml.driver_version()
    return tuple(
        Gpu(
            index=index,
            uuid=device.uuid,
            name=device.name,
            memory_mib=None if device.memory_bytes is None else device.memory_bytes // MIB,
            compute_capability=device.compute_capability,
            mig=device.uuid.startswith("MIG-"),
            driver_version=driver_version,
        )
        for index, device in enumerate(devices)
    )


def mig_instances() -> tuple[str, ...]:
    """Returns the UUIDs of the machine's MIG instances, ordered by GPU; empty without MIG or without a driver.

    Use it to give each process its own instance: `gpus()` lists only the one that CUDA would take.
    """
    devices = _answer(driver.Nvml.devices) or ()
    return tuple(instance.uuid for device in devices for instance in device.instances or ())


def cpu_affinity(gpu: Gpu) -> frozenset[int] | None:
    """Returns the machine's CPUs on the same socket as a GPU; None if the driver does not say.

    A container or a batch job may hold only some of these CPUs, or none. For a MIG instance, its GPU counts.
    """
    return _answer(lambda nvml: nvml.cpu_affinity(gpu.uuid), quiet=())


def memory_mib(gpu: Gpu) -> tuple[float | None, ...]:
    """Returns the MiB of a GPU that this process holds, that others hold, and in total; None where unknown."""
    found = _answer(lambda nvml: nvml.memory(gpu.uuid), quiet=()) or (None,) * 3
    return tuple(None if size is None else size / MIB for size in found)


@dataclass(frozen=True, slots=True)
class PcieLink:
    """How a GPU is connected; an idle one may lower the generation to save power."""

    generation: int
    lanes: int
    best_generation: int
    """The highest that the device and this machine can do."""
    best_lanes: int

    def __str__(self) -> str:
        return f"PCIe {self.generation}.0 ×{self.lanes}"


def pcie_link(gpu: Gpu) -> PcieLink | None:
    """Returns a GPU's PCIe link; None if the driver does not say, as for a MIG instance."""
    found = _answer(lambda nvml: nvml.pcie_link(gpu.uuid), quiet=()) or (None,)
    return None if None in found else PcieLink(*map(int, filter(None, found)))


def _answer(
    question: Callable[[driver.Nvml], Answer],
    deadline_seconds: float = driver.DEADLINE_SECONDS,
    quiet: frozenset[str] | tuple[()] = NO_DRIVER,
) -> Answer | None:
    """Returns the driver's answer, or None with a warning, unless the cause is in `quiet`."""
    nvml = driver.door()
    try:
        return nvml.call(lambda: question(nvml), deadline_seconds=deadline_seconds)
    except NvmlError as error:
        if error.cause not in quiet:
            warn_once(error.cause, str(error))
        return None


def hides_all(environ: Mapping[str, str]) -> bool:
    """Whether CUDA_VISIBLE_DEVICES says "no GPU", so that the driver need not be asked."""
    value = environ.get("CUDA_VISIBLE_DEVICES")
    return value is not None and ends_list(value.split(",")[0].strip()) and not value.strip().startswith(",")


def _visible(devices: Sequence[Device], environ: Mapping[str, str]) -> tuple[Device, ...]:
    """Returns the devices that CUDA gives to a process with this environment, in CUDA's order.

    CUDA reads the list up to the first entry that names no device, and uses no device at all if one is named twice. A
    process that uses a MIG instance can use no other device (NVIDIA MIG User Guide, "CUDA Device Enumeration").
    `devices` are the machine's physical GPUs, ordered by PCI bus id.
    """
    value = environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return _one_instance([seen for device in devices for seen in _as_cuda_sees(device)])
    entries = [entry.strip() for entry in value.split(",")]
    by_bus_id = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({device.name for device in devices}) <= 1
    chosen: list[Device] = []
    for position, entry in enumerate(entries):
        if ends_list(entry) and (entry or position + 1 == len(entries)):
            break
        if _is_index(entry) and not by_bus_id:
            warn_once(
                f"device_order {value}",
                f"Expected GPUs of one model, or a known order. Found: several models and CUDA_VISIBLE_DEVICES="
                f"{value!r}; by default CUDA numbers the fastest first, by an undocumented rule, so no GPU is read. "
                "What to do: set CUDA_DEVICE_ORDER=PCI_BUS_ID, or name the GPUs by UUID (nvidia-smi -L).",
            )
            return ()
        device = _named(entry, devices)
        if device is None:
            warn_once(
                f"unknown_entry {entry}",
                "Expected CUDA_VISIBLE_DEVICES to name GPUs of this machine: indices, GPU-… or MIG-… UUIDs, or "
                f"prefixes of UUIDs that match one device. Found: {entry!r} in {value!r}, which names none; CUDA "
                "ignores it and everything after it. What to do: correct it (nvidia-smi -L lists the UUIDs).",
            )
            break
        chosen.append(device)
    if len({device.uuid for device in chosen}) < len(chosen):
        warn_once(
            f"named_twice {value}",
            f"Expected CUDA_VISIBLE_DEVICES to name each GPU once. Found: {value!r} names one twice, so CUDA shows "
            "none. What to do: remove the repetition.",
        )
        return ()
    return _one_instance(chosen)


def ends_list(entry: str) -> bool:
    """Whether an entry of CUDA_VISIBLE_DEVICES says "no more GPUs"."""
    return entry in ("", "NoDevFiles") or (entry.startswith("-") and entry[1:].isdecimal())


def _is_index(entry: str) -> bool:
    return entry.isascii() and entry.isdecimal()


def _named(entry: str, devices: Sequence[Device]) -> Device | None:
    """The one device that an index, a UUID or a prefix of a UUID names."""
    matches: Sequence[Device] = ()
    if _is_index(entry):
        matches = devices[int(entry) : int(entry) + 1] if len(entry) < 10 else ()
    elif entry.startswith("GPU-"):
        matches = [device for device in devices if device.uuid.startswith(entry)]
    elif entry.startswith("MIG-"):
        instances = [instance for device in devices for instance in device.instances or ()]
        matches = [instance for instance in instances if instance.uuid.startswith(entry)]
    matches = [device for device in matches if device.uuid == entry] or matches
    seen = _as_cuda_sees(matches[0]) if len(matches) == 1 else ()
    return seen[0] if seen else None


def _as_cuda_sees(device: Device) -> Sequence[Device]:
    """The device or, in MIG mode, its first instance, if any."""
    if device.instances is None:
        return (device,)
    if not device.instances:
        warn_once(
            f"no_mig_instance {device.uuid}",
            f"Expected a MIG instance on {device.name} ({device.uuid}), whose MIG mode is on. Found: none, so CUDA "
            "cannot use this GPU. What to do: create one (nvidia-smi mig -cgi … -C) or switch MIG mode off.",
        )
    return device.instances[:1]


def _one_instance(devices: Sequence[Device]) -> tuple[Device, ...]:
    instances = [device for device in devices if device.uuid.startswith("MIG-")]
    if not instances or len(devices) == 1:
        return tuple(devices)
    warn_once(
        "several_mig_instances",
        "Expected one visible MIG instance: a CUDA process uses one, and no other GPU beside it. Found: "
        f"{len(devices)} visible devices; {instances[0].uuid} is used. What to do: start one process per instance, "
        "each with that instance's UUID in CUDA_VISIBLE_DEVICES.",
    )
    return (instances[0],)
