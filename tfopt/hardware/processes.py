"""Whose a GPU's memory is: this process's, and other processes'."""

import os
from collections.abc import Sequence
from typing import Any

from tfopt.hardware.nvml_values import WIDTH_64, known

# The number of the machine's first process namespace, PROC_PID_INIT_INO in Linux's include/linux/proc_ns.h.
_FIRST_NAMESPACE = "pid:[4026531836]"


def shares(lists: Sequence[Sequence[Any] | None]) -> tuple[int | None, int | None]:
    """Returns the bytes that this process and that all others hold, as far as the driver tells.

    In a container the driver lists the machine's process numbers, or only the container's own processes, or none
    (NVIDIA/nvidia-container-toolkit#1013, NVIDIA/nvidia-docker#1483). There this process's share is None unless it is
    in the list, and the others' None unless this process and at least one more are: "no others" cannot be known. A
    single process of unknown size (Windows and WSL name none) makes the sum unknown.

    Args:
        lists: NVML's processes with compute and with graphics contexts; a process may be in both. None: not told.
    """
    sizes: dict[int, int | None] = {}
    for process in (process for running in lists for process in running or ()):
        size = known(process.usedGpuMemory, WIDTH_64)
        sizes[process.pid] = size if size is not None else sizes.get(process.pid)
    listed = os.getpid() in sizes
    own = sizes.pop(os.getpid(), None)
    complete = None not in lists and None not in sizes.values()
    if complete and (_in_first_namespace() or (listed and sizes)):
        return own, sum(size or 0 for size in sizes.values())
    return own, None


def _in_first_namespace() -> bool:
    """Whether process numbers here are the driver's, that is, whether this is no container."""
    try:
        return os.readlink("/proc/self/ns/pid") == _FIRST_NAMESPACE
    except OSError:  # not Linux, or /proc is closed
        return False
