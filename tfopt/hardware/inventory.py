"""Lists the GPUs that this process may use, the machine's MIG instances, and the CPUs near a GPU."""

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from tfopt.hardware.nvml import driver
from tfopt.hardware.nvml.gpu_reading import MIB
from tfopt.hardware.nvml.return_codes import NO_DRIVER, NvmlError
from tfopt.hardware.visible import hides_all, visible
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
    nvml = driver.door()
    return _answer(lambda: find_gpus(nvml, environ), deadline_seconds) or ()


def find_gpus(nvml: driver.Nvml, environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Returns what `gpus()` does. May hang with the driver: call it in NVML's thread.

    Raises:
        NvmlError: If NVML cannot be started, or does not list the GPUs.
    """
    devices = visible(nvml.devices(), environ)
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
    devices = _answer(driver.door().devices) or ()
    return tuple(instance.uuid for device in devices for instance in device.instances or ())


def cpu_affinity(gpu: Gpu) -> frozenset[int] | None:
    """Returns the machine's CPUs on the same socket as a GPU; None if the driver does not say.

    A container or a batch job may hold only some of these CPUs, or none. For a MIG instance, its GPU counts.
    """
    nvml = driver.door()
    return _answer(lambda: nvml.cpu_affinity(gpu.uuid), quiet=())


def _answer(
    question: Callable[[], Answer],
    deadline_seconds: float = driver.DEADLINE_SECONDS,
    quiet: frozenset[str] | tuple[()] = NO_DRIVER,
) -> Answer | None:
    """Returns the driver's answer, or None with a warning, unless the cause is in `quiet`."""
    try:
        return driver.door().call(question, deadline_seconds=deadline_seconds)
    except NvmlError as error:
        if error.cause not in quiet:
            warn_once(error.cause, str(error))
        return None
