"""The control groups (versions 1 and 2) that limit this process: what each allows, and how much of it is used."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

# Version 1 writes "no limit" as the largest multiple of a page below 2**63; no machine has an exbibyte.
_NO_LIMIT_BYTES = 2**60


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """One group that this process belongs to. What its files do not tell is None."""

    folder: str
    """Where its files are."""
    accounts: str
    """Where version 1 counts CPU time: another folder if the controllers are mounted one by one."""
    version: int
    has_cpu: bool
    """Whether it may have a CPU quota."""
    has_memory: bool
    """Whether it may have a memory limit."""

    def cpu_quota(self) -> tuple[float, float] | None:
        """Returns the CPUs it may use on average, and the seconds of a period. None: no quota."""
        if not self.has_cpu:
            return None
        names = ("cpu.max",) if self.version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        parts = [part for name in names for part in self._read(name).split()]
        quota, period = [_number(part) for part in parts] if len(parts) == 2 else (None, None)
        return (quota / period, period / 1e6) if quota and period and quota > 0 and period > 0 else None

    def cpu_seconds(self) -> float | None:
        """Returns the CPU time that its processes have used."""
        if self.version == 2:
            (microseconds,) = self._numbers("cpu.stat", "usage_usec")
            return None if microseconds is None else microseconds / 1e6
        nanoseconds = _number(_read(f"{self.accounts}/cpuacct.usage"))
        return None if nanoseconds is None else nanoseconds / 1e9

    def cpu_periods(self) -> tuple[int, int] | None:
        """Returns the periods of its quota in which it ran, and those in which it was stopped for using it up."""
        periods, throttled = self._numbers("cpu.stat", "nr_periods", "nr_throttled")
        return None if periods is None or throttled is None else (periods, throttled)

    def memory_limit(self) -> int | None:
        """Returns the bytes it may use. None: no limit."""
        if not self.has_memory:
            return None
        names = ("memory.max", "memory.high") if self.version == 2 else ("memory.limit_in_bytes",)
        numbers = [_number(self._read(name)) for name in names]
        return min((number for number in numbers if number is not None and 0 <= number < _NO_LIMIT_BYTES), default=None)

    def memory_used(self) -> int | None:
        """Returns the bytes in use that the kernel cannot reclaim immediately."""
        v2 = self.version == 2
        used = _number(self._read("memory.current" if v2 else "memory.usage_in_bytes"))
        (cache,) = self._numbers("memory.stat", "inactive_file" if v2 else "total_inactive_file")
        return None if used is None else max(0, used - (cache or 0))

    def _numbers(self, name: str, *keys: str) -> tuple[int | None, ...]:
        """Numbers from a file of lines of "key number"."""
        text = f"\n{self._read(name)}"
        return tuple(_number(text.partition(f"\n{key} ")[2].partition("\n")[0]) for key in keys)

    def _read(self, name: str) -> str:
        return _read(f"{self.folder}/{name}")


def control_groups(*, proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> tuple[ControlGroup, ...]:
    """Returns this process's groups that may limit CPU or memory, and the groups above them, up to the root.

    In a container the path that /proc names may not exist below the mount; the existing levels are returned.
    """
    groups = _levels(proc, sys / "fs" / "cgroup")
    return tuple(dict.fromkeys(group for group in groups if group.has_cpu or group.has_memory))


def _levels(proc: Path, mount: Path) -> Iterator[ControlGroup]:
    lines = [line.split(":", 2) for line in (_read(f"{proc}/self/cgroup") or "0::/").splitlines()]
    hierarchies = [(line[1].split(","), line[2]) for line in lines if len(line) == 3]
    accounted = next((path for controllers, path in hierarchies if "cpuacct" in controllers), None)
    for controllers, path in hierarchies:
        version = 1 if any(controllers) else 2
        names = ["", "unified"] if version == 2 else [*controllers, ",".join(controllers)]
        if version == 1 and not {"cpu", "memory"} & set(controllers):
            continue
        inside = PurePosixPath(path.lstrip("/"))
        # A group outside this cgroup namespace is shown as /../…, and only the root can be read.
        parts = [] if ".." in inside.parts else [inside, *inside.parents]
        for root in {mount / name for name in names if (mount / name).is_dir()}:
            for part in dict.fromkeys([*parts, PurePosixPath()]):
                folder = root / part
                beside = accounted == path and not (folder / "cpuacct.usage").exists()
                yield ControlGroup(
                    str(folder),
                    str(mount / "cpuacct" / part if beside else folder),
                    version,
                    has_cpu=(folder / ("cpu.max" if version == 2 else "cpu.cfs_quota_us")).exists(),
                    has_memory=(folder / ("memory.max" if version == 2 else "memory.limit_in_bytes")).exists(),
                )


def _read(path: str) -> str:
    """A file's text; "" if it cannot be read."""
    # Not pathlib, which takes three times as long: these files are read once a second.
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return ""
    try:
        parts = []
        while part := os.read(file, 2**16):
            parts.append(part)
        return b"".join(parts).decode("utf-8", "replace")
    except OSError:
        return ""
    finally:
        os.close(file)


def _number(text: str) -> int | None:
    """Parses an integer; None for "max" and anything else."""
    try:
        return int(text)
    except ValueError:
        return None
