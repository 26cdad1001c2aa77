"""The host: the CPUs and the memory that this process may use, and how busy they are."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from tfopt.hardware.cgroup import read_allowance, read_text

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Host:
    """The part of the machine that this process may use.

    Attributes:
        cpu_model: The processor's name. None where /proc/cpuinfo has none.
        cpus: How many CPUs' worth of time the process may take: its affinity or its cgroup's quota, whichever is less.
        affinity: The numbers of the CPUs it may run on.
        quota_cpus: The cgroup's quota in CPUs. None: no quota.
        memory_total_mib: The machine's memory. None where /proc/meminfo does not say.
        memory_limit_mib: The cgroup's limit. None: no limit.
        memory_available_mib: What this process can take now, within the cgroup's limit. Page cache that the kernel
            gives back at once counts as free. None where the machine does not say.
    """

    cpu_model: str | None
    cpus: float
    affinity: tuple[int, ...]
    quota_cpus: float | None
    memory_total_mib: float | None
    memory_limit_mib: float | None
    memory_available_mib: float | None

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
    """Returns what this process may use of the machine now. What cannot be read is None.

    Use it for counts of threads and sizes of caches: in a container or a batch job the machine's own numbers are too
    large.

    Args:
        proc: Where /proc is.
        sys: Where /sys is.

    Example:
        >>> host().cpus <= os.cpu_count()
        True
    """
    affinity = usable_cpus()
    allowance = read_allowance(Path(proc), Path(sys))
    memory = _meminfo(Path(proc))
    available = [size for size in (memory.get("MemAvailable"), allowance.memory_free_bytes) if size is not None]
    return Host(
        cpu_model=_cpu_model(Path(proc)),
        cpus=min(float(len(affinity)), allowance.quota_cpus or float("inf")),
        affinity=affinity,
        quota_cpus=allowance.quota_cpus,
        memory_total_mib=_mib(memory.get("MemTotal")),
        memory_limit_mib=_mib(allowance.memory_limit_bytes),
        memory_available_mib=_mib(min(available, default=None)),
    )


def usable_cpus() -> tuple[int, ...]:
    """The numbers of the CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


class HostReading(NamedTuple):
    """What the host says now. None: it does not say."""

    host_cpu_percent: float | None = None
    host_memory_used_mib: float | None = None
    process_memory_mib: float | None = None
    disk_read_mib_per_second: float | None = None


class HostMeter:
    """Reads how busy the host is. CPU percentage and disk reads are those of the time since the reading before.

    Args:
        clock: Monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._before: dict[int, tuple[float, float]] = {}
        self._disk_before: tuple[float, int] | None = None
        self._process: psutil.Process | None = None

    def read(self) -> HostReading:
        """Returns the reading; the first has no CPU percentage and no disk reads."""
        return HostReading(
            _or_none(self._cpu_percent),
            _or_none(_memory_used_mib),
            _or_none(self._process_memory_mib),
            _or_none(self._disk_read_mib_per_second),
        )

    def _cpu_percent(self) -> float | None:
        # Not psutil.cpu_percent: its "time before" belongs to the thread that asks, and its first answer is 0.0.
        times = psutil.cpu_times(percpu=True)
        now = {cpu: _busy_and_total(times[cpu]) for cpu in usable_cpus() if cpu < len(times)}
        both = [(self._before[cpu], now[cpu]) for cpu in now if cpu in self._before]
        self._before = now
        busy = sum(after[0] - before[0] for before, after in both)
        total = sum(after[1] - before[1] for before, after in both)
        return min(100.0, max(0.0, 100 * busy / total)) if total > 0 else None

    def _process_memory_mib(self) -> float:
        return float(self._this_process().memory_info().rss / MIB)

    def _disk_read_mib_per_second(self) -> float | None:
        before, self._disk_before = self._disk_before, None
        process = self._this_process()
        if not hasattr(process, "io_counters"):  # macOS
            return None
        now = self._disk_before = (self._clock(), process.io_counters().read_bytes)
        if before is None or now[0] <= before[0] or now[1] < before[1]:
            return None
        return float((now[1] - before[1]) / MIB / (now[0] - before[0]))

    def _this_process(self) -> psutil.Process:
        # Kept: making one reads /proc and costs as much as all that is asked of it.
        if self._process is None:
            self._process = psutil.Process()
        return self._process


def _memory_used_mib() -> float:
    memory = psutil.virtual_memory()
    return (memory.total - memory.available) / MIB


def _or_none(read: Callable[[], float | None]) -> float | None:
    try:
        return read()
    except Exception:  # noqa: BLE001  psutil fails in many ways, KeyError too, where /proc is not as it expects it
        return None


def _busy_and_total(times: Any) -> tuple[float, float]:
    """Seconds that a CPU worked, and all its seconds."""
    fields = times._asdict()
    # Linux counts a guest's time in user and nice already.
    total = sum(fields.values()) - fields.get("guest", 0.0) - fields.get("guest_nice", 0.0)
    return total - fields["idle"] - fields.get("iowait", 0.0), total


def _cpu_model(proc: Path) -> str | None:
    for line in (read_text(proc / "cpuinfo") or "").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return value.strip()
    return None


def _meminfo(proc: Path) -> dict[str, int]:
    """/proc/meminfo in bytes."""
    found = {}
    for line in (read_text(proc / "meminfo") or "").splitlines():
        words: Sequence[str] = line.split()
        if len(words) == 3 and words[2] == "kB" and words[1].isdecimal():
            found[words[0].rstrip(":")] = int(words[1]) * 1024
    return found


def _mib(size: int | None) -> float | None:
    return None if size is None else size / MIB
