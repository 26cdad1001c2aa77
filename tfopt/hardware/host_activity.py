"""The host's activity according to psutil: CPU, memory and disk use, network traffic, ports in use."""

import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import psutil

from tfopt.hardware.host_limits import MIB, usable_cpus


# Without slots: GpuSample inherits from two such classes.
@dataclass(frozen=True)
class HostReading:
    """The host's readings at one moment. None means unknown."""

    host_cpu_percent: float | None = None
    """Utilisation of the CPUs that this process may use, since the last sample."""
    host_memory_used_mib: float | None = None
    """The machine's memory that is not available."""
    process_memory_mib: float | None = None
    """Memory of this process (resident set)."""
    disk_read_mib_per_second: float | None = None
    """Read from disk by this process, excluding page cache hits, since the last sample."""


HOST_FIELDS = tuple(field.name for field in fields(HostReading))


class HostMeter:
    """Reads how busy the host is. CPU percentage and disk reads cover the time since the last reading."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._before: dict[int, tuple[float, float]] = {}
        self._disk_before: tuple[float, int] | None = None
        self._process: psutil.Process | None = None

    def read(self) -> HostReading:
        """Returns a reading; the first has no CPU percentage and no disk reads."""
        return HostReading(
            _or_none(self._cpu_percent),
            _or_none(_memory_used_mib),
            _or_none(self._process_memory_mib),
            _or_none(self._disk_read_mib_per_second),
        )

    def _cpu_percent(self) -> float | None:
        # Not psutil.cpu_percent, which keeps state per calling thread and returns 0.0 at first.
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
        # Kept, because creating one costs as much as all readings together.
        if self._process is None:
            self._process = psutil.Process()
        return self._process


def sent_bytes(interface: str = "lo") -> int | None:
    """Returns the bytes that all processes have sent through a network interface since boot; None if unknown."""
    try:
        counters = psutil.net_io_counters(pernic=True)
    except (psutil.Error, OSError):
        return None
    return int(counters[interface].bytes_sent) if interface in counters else None


def port_holder(port: int) -> str | None:
    """Returns the process that holds a TCP port, such as "sshd (process 812)"; None if the system hides it."""
    try:
        connections = psutil.net_connections(kind="tcp")
        holders = [c.pid for c in connections if c.laddr and c.laddr.port == port and not c.raddr and c.pid]
        return f"{psutil.Process(holders[0]).name()} (process {holders[0]})" if holders else None
    except (psutil.Error, OSError):
        return None


def _memory_used_mib() -> float:
    memory = psutil.virtual_memory()
    return (memory.total - memory.available) / MIB


def _or_none(read: Callable[[], float | None]) -> float | None:
    try:
        return read()
    except Exception:  # noqa: BLE001  psutil fails in many ways, even KeyError, where /proc is not as it expects
        return None


def _busy_and_total(times: Any) -> tuple[float, float]:
    """Seconds a CPU was busy, and all its seconds."""
    fields = times._asdict()
    # Linux includes a guest's time in user and nice.
    total = sum(fields.values()) - fields.get("guest", 0.0) - fields.get("guest_nice", 0.0)
    return total - fields["idle"] - fields.get("iowait", 0.0), total
