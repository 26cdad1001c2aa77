"""The GPUs that this process may use."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tfopt.hardware import nvml
from tfopt.hardware.nvml_errors import NO_DRIVER, NvmlError
from tfopt.hardware.nvml_values import MIB
from tfopt.hardware.visible import hides_all, visible
from tfopt.warn import warn_once


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU or MIG instance that this process may use.

    Attributes:
        index: Its place among the process's GPUs: TensorFlow's `GPU:index`.
        uuid: NVIDIA's name for this one device, "GPU-…" or "MIG-…". It outlives reboots; an index does not.
        name: The product.
        memory_mib: All of its memory. None where the device does not say.
        compute_capability: As `(9, 0)`. None where the device does not say.
        mig: Whether it is a MIG instance.
        driver_version: As "570.86.15". None where the driver does not say.
    """

    index: int
    uuid: str
    name: str
    memory_mib: int | None
    compute_capability: tuple[int, int] | None
    mig: bool
    driver_version: str | None

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
    *, environ: Mapping[str, str] = os.environ, deadline_seconds: float = nvml.DEADLINE_SECONDS
) -> tuple[Gpu, ...]:
    """Returns the GPUs that this process may use, in CUDA's order; none on a machine without a GPU.

    Call it to choose a policy or to report what is there. It loads neither TensorFlow nor CUDA, takes no GPU memory
    and initialises nothing but NVML. With unlike GPUs, CUDA_VISIBLE_DEVICES unset and CUDA_DEVICE_ORDER not set to
    PCI_BUS_ID, the set is right and the order is that of the PCI bus ids, which need not be CUDA's.

    Args:
        environ: Where CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER are read. Default: this process's environment.
        deadline_seconds: How long the driver may take to answer. After that, no GPUs and a warning. Default: 10,
            since a driver that has to wake several GPUs takes seconds.

    Example:
        >>> for gpu in gpus():
        ...     print(gpu)
    """
    if hides_all(environ):
        return ()
    door = nvml.door()
    try:
        return door.call(lambda: find_gpus(door, environ), deadline_seconds=deadline_seconds)
    except NvmlError as error:
        if error.cause not in NO_DRIVER:
            warn_once(error.cause, str(error))
        return ()


def find_gpus(door: nvml.Nvml, environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """What `gpus()` returns. It may hang with the driver: call it in NVML's thread.

    Raises:
        NvmlError: NVML cannot be started, or does not list the GPUs.
    """
    devices = visible(door.devices(), environ)
    driver_version = door.driver_version()
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
