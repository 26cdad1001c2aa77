"""The CPUs and memory that this process may use, given its CPU affinity and control groups (versions 1 and 2)."""

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tfopt.hardware.control_groups import control_groups

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Host:
    """The part of the machine that this process may use."""

    cpu_model: str | None
    """The processor's name; None if /proc/cpuinfo has none."""
    cpus: float
    """CPUs' worth of time it may take: its affinity or its cgroup's quota, whichever is smaller."""
    affinity: tuple[int, ...]
    """Numbers of the CPUs it may run on."""
    quota_cpus: float | None
    """The cgroup's quota in CPUs; None: no quota."""
    memory_total_mib: float | None
    """The machine's memory; None if unknown."""
    memory_limit_mib: float | None
    """The cgroup's limit; None: no limit."""
    memory_available_mib: float | None
    """What the process can still allocate within the cgroup's limit, including page cache that the kernel can reclaim
    immediately; None if unknown."""

    def __str__(self) -> str:
        parts = [self.cpu_model or "unknown CPU", f"{self.cpus:g} CPUs usable"]
        if self.memory_available_mib is not None:
            parts.append(f"{self.memory_available_mib:.0f} MiB of memory available")
        if self.memory_limit_mib is not None:
            parts.append(f"limited to {self.memory_limit_mib:.0f} MiB")
        return ", ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self) | {"affinity": list(self.affinity)}


def host(*, proc: str | os.PathLike[str] = "/proc", sys: str | os.PathLike[str] = "/sys") -> Host:
    """Returns what this process may use of the machine now; None where it cannot be read.

    Use it to choose thread counts and cache sizes: in a container or a batch job the machine's own numbers are too
    large. `proc` and `sys` are where these file systems are mounted.

    Example:
        >>> host().cpus <= os.cpu_count()
        True
    """
    affinity = usable_cpus()
    quota_cpus, limit_bytes, free_bytes = _cgroup_limits(Path(proc), Path(sys))
    memory = _meminfo(Path(proc))
    available = [size for size in (memory.get("MemAvailable"), free_bytes) if size is not None]
    return Host(
        cpu_model=_cpu_model(Path(proc)),
        cpus=min(float(len(affinity)), quota_cpus or float("inf")),
        affinity=affinity,
        quota_cpus=quota_cpus,
        memory_total_mib=_mib(memory.get("MemTotal")),
        memory_limit_mib=_mib(limit_bytes),
        memory_available_mib=_mib(min(available, default=None)),
    )


def usable_cpus() -> tuple[int, ...]:
    """Returns the numbers of the CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def _cgroup_limits(proc: Path, sys_root: Path) -> tuple[float | None, int | None, int | None]:
    """The tightest limits from this process's control group up to the root: CPUs, bytes of memory, bytes still free.

    None: no limit, or none that can be read. Reclaimable page cache counts as free.
    """
    quotas: list[float] = []
    limits: list[int] = []
    free: list[int] = []
    for group in control_groups(proc=proc, sys=sys_root):
        quota, limit, used = group.cpu_quota(), group.memory_limit(), group.memory_used()
        if quota is not None:
            quotas.append(quota[0])
        if limit is not None:
            limits.append(limit)
            free += [] if used is None else [max(0, limit - used)]
    return min(quotas, default=None), min(limits, default=None), min(free, default=None)


def _cpu_model(proc: Path) -> str | None:
    return next((value for key, value in _pairs(proc / "cpuinfo") if key == "model name" and value), None)


def _meminfo(proc: Path) -> dict[str, int]:
    """/proc/meminfo in bytes."""
    found = {}
    for key, value in _pairs(proc / "meminfo"):
        number, _, unit = value.partition(" ")
        if unit == "kB" and number.isdecimal():
            found[key] = int(number) * 1024
    return found


def _pairs(path: Path) -> Iterator[tuple[str, str]]:
    """Keys and values of a file with lines of "key: value"."""
    for line in (_read(path) or "").splitlines():
        key, _, value = line.partition(":")
        yield key.strip(), value.strip()


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _mib(size: int | None) -> float | None:
    return None if size is None else size / MIB
