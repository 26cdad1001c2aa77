"""The CPUs and memory that this process may use, given its CPU affinity and control groups (versions 1 and 2)."""

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

MIB = 2**20

# Version 1 writes "no limit" as the largest multiple of a page below 2**63; no machine has an exbibyte.
_NO_LIMIT_BYTES = 2**60


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

    None: no limit, or none that can be read. Reclaimable page cache counts as free. In a container the path that /proc
    names may not exist below the mount; then the existing levels are read.
    """
    mount = sys_root / "fs" / "cgroup"
    quotas: list[float] = []
    limits: list[int] = []
    free: list[int] = []
    for level in _levels(proc, mount):
        quotas += _quota(level)
        memory = _memory_limits(level)
        limits += memory
        used = _memory_used(level)
        if memory and used is not None:
            free.append(max(0, min(memory) - used))
    return min(quotas, default=None), min(limits, default=None), min(free, default=None)


def _levels(proc: Path, mount: Path) -> Iterator[Path]:
    """The folders of each hierarchy, from this process's group up to the root."""
    for line in (_read(proc / "self" / "cgroup") or "0::/").splitlines():
        parts = line.split(":", 2)
        if len(parts) != 3:
            continue
        controllers, path = parts[1:]
        names = [*controllers.split(","), controllers] if controllers else ["", "unified"]
        if controllers and not {"cpu", "memory"} & set(names):
            continue
        for root in {mount / name for name in names if (mount / name).is_dir()}:
            inside = PurePosixPath(path.lstrip("/"))
            # A group outside this cgroup namespace is shown as /../…, and only the root can be read.
            yield from (root / part for part in ([] if ".." in inside.parts else [inside, *inside.parents]))
            yield root


def _quota(level: Path) -> list[float]:
    """The CPUs that a level allows: at most one number."""
    v2 = (_read(level / "cpu.max") or "").split()
    v1 = [_read(level / "cpu.cfs_quota_us") or "", _read(level / "cpu.cfs_period_us") or ""]
    for quota, period in (pair for pair in (v2, v1) if len(pair) == 2):
        microseconds, of = _number(quota), _number(period)
        if microseconds and of and microseconds > 0 and of > 0:
            return [microseconds / of]
    return []


def _memory_limits(level: Path) -> list[int]:
    names = ("memory.max", "memory.high", "memory.limit_in_bytes")
    numbers = [_number(_read(level / name)) for name in names]
    return [number for number in numbers if number is not None and 0 <= number < _NO_LIMIT_BYTES]


def _memory_used(level: Path) -> int | None:
    """Bytes that the kernel cannot reclaim immediately."""
    for current, inactive in (("memory.current", "inactive_file"), ("memory.usage_in_bytes", "total_inactive_file")):
        used = _number(_read(level / current))
        if used is not None:
            lines = [line.split() for line in (_read(level / "memory.stat") or "").splitlines()]
            cache = [_number(line[1]) for line in lines if len(line) == 2 and line[0] == inactive]
            return max(0, used - (cache[0] or 0 if cache else 0))
    return None


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


def _number(text: str | None) -> int | None:
    """Parses an integer; None for "max" and anything else."""
    try:
        return int(text or "")
    except ValueError:
        return None


def _mib(size: int | None) -> float | None:
    return None if size is None else size / MIB
