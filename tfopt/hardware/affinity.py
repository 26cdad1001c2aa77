"""Which CPUs stand near a GPU."""

from tfopt.hardware import nvml
from tfopt.hardware.gpus import Gpu
from tfopt.hardware.nvml_errors import NvmlError
from tfopt.warn import warn_once


def cpu_affinity(gpu: Gpu) -> frozenset[int] | None:
    """Returns the numbers of the CPUs that reach the GPU without a detour through another CPU socket.

    These are the machine's: a container or a batch job may hold fewer of them, or none.

    Args:
        gpu: One of `tfopt.hardware.gpus()`. For a MIG instance, the CPUs of its GPU.

    Returns:
        None where the driver does not say.

    Example:
        >>> [cpu_affinity(gpu) for gpu in gpus()]
    """
    door = nvml.door()
    try:
        words = door.call(lambda: door.cpu_affinity(gpu.uuid))
    except NvmlError as error:
        warn_once(error.cause, str(error))
        return None
    cpus = (64 * place + bit for place, word in enumerate(words or ()) for bit in range(64) if word >> bit & 1)
    return frozenset(cpus) or None
