"""What the control groups of this process allow: CPU time and memory, in versions 1 and 2 and both at once.

Limits stand at every level from the process's group up to the root, and the tightest holds. Inside a container the
path that /proc names may not exist below the mount; then the levels that do exist are read.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

# Version 1 says "no limit" with the largest multiple of a page below 2**63; no machine has an exbibyte.
_NO_LIMIT_BYTES = 2**60


@dataclass(frozen=True, slots=True)
class Allowance:
    """What the control groups allow. None: no limit, or none that can be read."""

    quota_cpus: float | None
    memory_limit_bytes: int | None
    memory_free_bytes: int | None  # within the tightest level, page cache that the kernel would reclaim counted as free


def read_allowance(proc: Path, sys_root: Path) -> Allowance:
    """Reads the limits of this process.

    Args:
        proc: Where /proc is.
        sys_root: Where /sys is.
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
    return Allowance(min(quotas, default=None), min(limits, default=None), min(free, default=None))


def _levels(proc: Path, mount: Path) -> Iterator[Path]:
    """The folders of this process's groups, from its own up to the root, for each hierarchy."""
    for line in (read_text(proc / "self" / "cgroup") or "0::/").splitlines():
        parts = line.split(":", 2)
        if len(parts) != 3:
            continue
        controllers, path = parts[1:]
        names = [*controllers.split(","), controllers] if controllers else ["", "unified"]
        if controllers and not {"cpu", "memory"} & set(names):
            continue
        for root in {mount / name for name in names if (mount / name).is_dir()}:
            inside = PurePosixPath(path.lstrip("/"))
            # A group outside this cgroup namespace is shown as /../…: only the root can be read.
            yield from (root / part for part in ([] if ".." in inside.parts else [inside, *inside.parents]))
            yield root


def _quota(level: Path) -> list[float]:
    """CPUs that the level allows: none or one."""
    v2 = (read_text(level / "cpu.max") or "").split()
    v1 = [read_text(level / "cpu.cfs_quota_us") or "", read_text(level / "cpu.cfs_period_us") or ""]
    for quota, period in (pair for pair in (v2, v1) if len(pair) == 2):
        microseconds, of = _number(quota), _number(period)
        if microseconds and of and microseconds > 0 and of > 0:
            return [microseconds / of]
    return []


def _memory_limits(level: Path) -> list[int]:
    names = ("memory.max", "memory.high", "memory.limit_in_bytes")
    numbers = [_number(read_text(level / name)) for name in names]
    return [number for number in numbers if number is not None and 0 <= number < _NO_LIMIT_BYTES]


def _memory_used(level: Path) -> int | None:
    """Bytes that the kernel could not take back at once."""
    for current, inactive in (
        ("memory.current", "inactive_file"),
        ("memory.usage_in_bytes", "total_inactive_file"),
    ):
        used = _number(read_text(level / current))
        if used is not None:
            lines = [line.split() for line in (read_text(level / "memory.stat") or "").splitlines()]
            cache = [_number(line[1]) for line in lines if len(line) == 2 and line[0] == inactive]
            return max(0, used - (cache[0] or 0 if cache else 0))
    return None


def read_text(path: Path) -> str | None:
    """The file's text, or None if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _number(text: str | None) -> int | None:
    """The whole number that the text is; None for "max" and for rubbish."""
    try:
        return int(text or "")
    except ValueError:
        return None
