"""How much of the GPUs' memory is in use, and how much TensorFlow may take."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import tensorflow as tf

from tfopt import checks, hardware
from tfopt.errors import UnsupportedError
from tfopt.hardware import gpu_memory
from tfopt.hardware.gpu_memory import read_allocator
from tfopt.hardware.host_limits import MIB
from tfopt.hardware.inventory import memory_mib
from tfopt.text import Shown, figure

_TOO_LATE = (
    "Expected this before TensorFlow uses its GPUs. Found: it has started. Call it first in the script, before any "
    "tensor, model or dataset is made."
)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class MemoryUsage(Shown):
    """A GPU's memory, in MiB. None means unknown, never 0."""

    index: int
    """The GPU, as in TensorFlow's `GPU:index`."""
    in_use_mib: float | None
    """By tensors and scratch space, of what TensorFlow holds."""
    peak_mib: float | None
    """The most that was in use since the process started, or `reset_peak`."""
    held_mib: float | None
    """By this process: TensorFlow takes nearly all of the memory when it starts, unless `set_growth` is on."""
    others_mib: float | None
    """By other processes."""
    total_mib: float | None

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        parts = {
            "in use": self.in_use_mib,
            "peak": self.peak_mib,
            "held": self.held_mib,
            "by others": self.others_mib,
            "total": self.total_mib,
        }
        known = (f"{figure(mib)} MiB {name}" for name, mib in parts.items() if mib is not None)
        return f"GPU:{self.index}: {', '.join(known) or 'unknown'}"


def usage() -> tuple[MemoryUsage, ...]:
    """Returns the memory of each GPU that this process may use, by TensorFlow's allocator and NVIDIA's driver.

    It does not start TensorFlow's devices: until something else does, `in_use_mib` and `peak_mib` are None. Without a
    GPU, it returns an empty tuple.

    Example:
        >>> for each in tfopt.memory.usage():
        ...     print(each)
    """
    found = []
    for gpu in hardware.gpus():
        allocator, (held, others, total) = read_allocator(gpu.index), memory_mib(gpu)
        found.append(
            MemoryUsage(
                index=gpu.index,
                in_use_mib=allocator.gpu_memory_allocated_mib,
                peak_mib=allocator.gpu_memory_allocated_peak_mib,
                held_mib=held,
                others_mib=others,
                total_mib=total,
            )
        )
    return tuple(found)


def room_mib(gpu: MemoryUsage, own_mib: float) -> float | None:
    """The MiB that TensorFlow may use on a GPU beside all but `own_mib` of what it uses now; None if unknown."""
    limit = gpu_memory.limit_bytes(f"GPU:{gpu.index}")
    if limit is None:
        return None
    left = min(limit / MIB, (gpu.total_mib or math.inf) - (gpu.others_mib or 0))
    return left - max(0.0, (gpu.in_use_mib or 0) - own_mib)


def reset_peak() -> None:
    """Resets `peak_mib` to what is in use now, on all GPUs."""
    for number in range(len(tf.config.list_logical_devices("GPU"))):
        gpu_memory.reset_peak(f"GPU:{number}")


def set_growth(enabled: bool = True) -> None:
    """Makes TensorFlow take GPU memory as it needs it, instead of nearly all when it starts.

    Use it where processes share a GPU. TensorFlow never gives memory back to other processes, and memory taken piece by
    piece may fragment, except with `TF_GPU_ALLOCATOR=cuda_malloc_async` in the environment. Without a GPU, this does
    nothing.

    Raises:
        tfopt.errors.UnsupportedError: If TensorFlow has started its GPUs, or `set_limit` was called before.

    Example:
        >>> tfopt.memory.set_growth()
    """
    devices = tf.config.list_physical_devices("GPU")
    if any(map(tf.config.get_logical_device_configuration, devices)):
        raise _not_both("set_limit")
    with _before_start():
        for device in devices:
            tf.config.experimental.set_memory_growth(device, bool(enabled))


def set_limit(mib: int, *, gpu: int = 0) -> None:
    """Limits how much memory of a GPU TensorFlow takes; it takes that much when it starts.

    Use it where processes share a GPU, or to see whether training fits on a smaller one. CUDA itself takes a few
    hundred MiB more. Without a GPU, this does nothing.

    Args:
        mib: The most to take, in MiB.
        gpu: Which, as in `GPU:0`.

    Raises:
        ValueError: If `mib` is below 1, or there is no such GPU.
        tfopt.errors.UnsupportedError: If TensorFlow has started its GPUs, or `set_growth` was called before.

    Example:
        >>> tfopt.memory.set_limit(20_000)
    """
    checks.count("mib", mib, "Pass the most to take, in MiB.")
    devices = tf.config.list_physical_devices("GPU")
    if not devices:
        return
    if gpu not in range(len(devices)):
        raise ValueError(f"Expected a GPU from 0 to {len(devices) - 1}. Received: {gpu!r}.")
    if any(map(tf.config.experimental.get_memory_growth, devices)):
        raise _not_both("set_growth")
    with _before_start():
        limited = tf.config.LogicalDeviceConfiguration(memory_limit=mib)
        tf.config.set_logical_device_configuration(devices[gpu], [limited])


@contextmanager
def _before_start() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise UnsupportedError(_TOO_LATE) from error


def _not_both(other: str) -> UnsupportedError:
    """TensorFlow ignores growth on all GPUs once one has a limit."""
    return UnsupportedError(
        f"Expected either growth or a limit. Found: {other} was called before. Choose one of them; TensorFlow does not "
        "combine them."
    )
