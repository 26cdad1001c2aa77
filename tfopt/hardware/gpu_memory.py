"""GPU memory as TensorFlow's allocator counts it; NVML only sees that TensorFlow took nearly all of it at the start."""

import sys
from dataclasses import dataclass, fields
from typing import Any

from tfopt.hardware.host_limits import MIB

# TensorFlow is imported where it is needed: the sampler also runs without it.


# Without slots: GpuSample inherits from several such classes.
@dataclass(frozen=True)
class AllocatorReading:
    """A GPU's memory as TensorFlow's allocator counts it in this process. None means unknown."""

    gpu_memory_allocated_mib: float | None = None
    """In use by tensors and scratch space, of what TensorFlow holds."""
    gpu_memory_allocated_peak_mib: float | None = None
    """The most in use since the process started or `tf.config.experimental.reset_memory_stats` was called, which tfopt
    never does while it samples. Of a GPU split into logical devices, the sum of their peaks."""


ALLOCATOR_FIELDS = tuple(field.name for field in fields(AllocatorReading))


def devices_started() -> bool | None:
    """Whether TensorFlow has started its devices, as the first tensor, dataset or model makes it do; None if unknown.

    Starts nothing, and does not load TensorFlow.
    """
    module = sys.modules.get("tensorflow.python.eager.context")
    if module is None:
        return False
    context: Any = getattr(module, "_context", module)
    return False if context is None else getattr(context, "_initialized", None)


def read_allocator(gpu: int) -> AllocatorReading:
    """Returns what TensorFlow uses of this process's GPU number `gpu`; unknown until TensorFlow has initialised it.

    Never initialises TensorFlow's devices, after which memory growth could no longer be set.
    """
    if not devices_started():
        return AllocatorReading()
    import tensorflow as tf

    try:
        wanted = tf.config.list_physical_devices("GPU")[gpu]
        first = 0  # logical devices are numbered in the order of the visible GPUs
        for device in tf.config.get_visible_devices("GPU"):
            parts = len(tf.config.get_logical_device_configuration(device) or [None])
            if device == wanted:
                names = [f"GPU:{number}" for number in range(first, first + parts)]
                infos = [tf.config.experimental.get_memory_info(name) for name in names]
                used, peak = (sum(info[key] for info in infos) / MIB for key in ("current", "peak"))
                return AllocatorReading(used, peak)
            first += parts
    except (ValueError, RuntimeError, IndexError):  # no such GPU, or its allocator keeps no count
        pass
    return AllocatorReading()


def first_gpu() -> str | None:
    """Name of this process's first GPU, such as "GPU:0"; None without a GPU."""
    import tensorflow as tf

    gpus = tf.config.list_logical_devices("GPU")
    return f"GPU:{gpus[0].name.rsplit(':', 1)[1]}" if gpus else None


def in_use_bytes(device: str) -> int:
    """Bytes in use on a GPU."""
    import tensorflow as tf

    return int(tf.config.experimental.get_memory_info(device)["current"])


def peak_bytes(device: str) -> int:
    """Most bytes in use on a GPU since the process started or `reset_peak` was called."""
    import tensorflow as tf

    return int(tf.config.experimental.get_memory_info(device)["peak"])


def reset_peak(device: str) -> None:
    """Resets the peak of a GPU to the bytes now in use."""
    import tensorflow as tf

    tf.config.experimental.reset_memory_stats(device)


def limit_bytes(device: str) -> int | None:
    """Most bytes that TensorFlow may take on a device; None if it does not know the device. Starts the devices."""
    from tfopt.internals.runtime import memory_limit

    return memory_limit(device)
