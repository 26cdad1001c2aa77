"""The host's activity: CPU, memory, disks and network, and which process holds a port."""

import contextlib
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import psutil

from tfopt.hardware.control_groups import ControlGroup, control_groups
from tfopt.hardware.host_limits import MIB, usable_cpus

Answer = TypeVar("Answer")


# Without slots: GpuSample inherits from several such classes.
@dataclass(frozen=True)
class HostReading:
    """The host's readings at one moment. None means unknown. Percentages and rates cover the time since the last."""

    host_cpu_percent: float | None = None
    """CPU time used of what this process may use. With a CPU quota below its number of CPUs: what its control group
    used of the quota. Otherwise the time that its CPUs were busy, with whatever process."""
    host_cpu_throttled_percent: float | None = None
    """The quota's periods in which the control group used it up and was stopped. None without a quota."""
    process_cpu_percent: float | None = None
    """CPU time of this process, without its children, of the time of the CPUs that it may use (quota or affinity)."""
    host_memory_used_mib: float | None = None
    """Memory in use, without the page cache that can be reclaimed immediately: that of the control group with the
    lowest limit, otherwise the machine's."""
    host_memory_percent: float | None = None
    """Memory in use of what this process may use: the highest share among the machine and its control groups."""
    process_memory_mib: float | None = None
    """Memory of this process (resident set)."""
    disk_read_mib_per_second: float | None = None
    """Read from disk by this process, excluding page cache hits."""
    host_disk_write_mib_per_second: float | None = None
    """Written to the machine's disks by all processes, also outside a container."""
    host_network_rx_mib_per_second: float | None = None
    """Received by the machine's network cards; in a container by its own interfaces. RDMA is not included."""
    host_network_tx_mib_per_second: float | None = None
    """Sent, likewise."""


HOST_FIELDS = tuple(field.name for field in fields(HostReading))
HOST_RATES = tuple(name for name in HOST_FIELDS if "memory" not in name)
"""Those that need two readings."""

# For each of this process's control groups that has one: the CPUs of its quota, and the seconds of a period.
_Quotas = Mapping[ControlGroup, tuple[float, float]]


class HostMeter:
    """Reads how busy the host is, measured against what affinity and control groups leave of it to this process.

    `proc` and `sys` are where these file systems are mounted.
    """

    def __init__(
        self,
        *,
        proc: Path = Path("/proc"),
        sys: Path = Path("/sys"),
    ) -> None:
        self._sys = sys
        # Looked up once: the groups' limits may change while they run, the groups do not.
        self._groups = control_groups(proc=proc, sys=sys)
        self._cpus_before: dict[int, tuple[float, float]] = {}
        self._counters_before: dict[Hashable, tuple[float, float]] = {}
        self._devices: dict[tuple[str, str], bool] = {}
        self._process: psutil.Process | None = None

    def read(self) -> HostReading:
        """Returns a reading; the first has none of `HOST_RATES`."""
        quotas = {group: quota for group in self._groups if (quota := group.cpu_quota()) is not None}
        used_mib, memory_percent = _or_none(self._memory) or (None, None)
        received, sent = _or_none(self._network) or (None, None)
        return HostReading(
            host_cpu_percent=_or_none(lambda: self._cpu_percent(quotas)),
            host_cpu_throttled_percent=_or_none(lambda: self._throttled_percent(quotas)),
            process_cpu_percent=_or_none(lambda: self._process_cpu_percent(quotas)),
            host_memory_used_mib=used_mib,
            host_memory_percent=memory_percent,
            process_memory_mib=_or_none(self._process_memory_mib),
            disk_read_mib_per_second=_or_none(self._disk_read_mib_per_second),
            host_disk_write_mib_per_second=_or_none(self._disk_write_mib_per_second),
            host_network_rx_mib_per_second=received,
            host_network_tx_mib_per_second=sent,
        )

    def _cpu_percent(self, quotas: _Quotas) -> float | None:
        cpus = usable_cpus()
        tight = {group: allowed for group, (allowed, _) in quotas.items() if allowed < len(cpus)}
        if not tight:
            return self._busy_percent(cpus)
        shares = []
        for group, allowed in tight.items():
            used = self._since(("cpu", group), group.cpu_seconds())
            shares.append(None if used is None else 100 * used[0] / used[1] / allowed)
        known = [share for share in shares if share is not None]
        return min(100.0, max(known)) if len(known) == len(shares) else None

    def _busy_percent(self, cpus: tuple[int, ...]) -> float | None:
        # Not psutil.cpu_percent, which keeps state per calling thread and returns 0.0 at first.
        times = psutil.cpu_times(percpu=True)
        now = {cpu: _busy_and_total(times[cpu]) for cpu in cpus if cpu < len(times)}
        both = [(self._cpus_before[cpu], now[cpu]) for cpu in now if cpu in self._cpus_before]
        self._cpus_before = now
        busy = sum(after[0] - before[0] for before, after in both)
        total = sum(after[1] - before[1] for before, after in both)
        return min(100.0, max(0.0, 100 * busy / total)) if total > 0 else None

    def _throttled_percent(self, quotas: _Quotas) -> float | None:
        shares = []
        for group, (_, period_seconds) in quotas.items():
            counts = group.cpu_periods()
            if counts is None:
                continue
            periods = self._since(("periods", group), counts[0])
            throttled = self._since(("throttled", group), counts[1])
            if periods is None or throttled is None:
                continue
            if periods[0] > 0:
                shares.append(min(100.0, 100 * throttled[0] / periods[0]))
            elif periods[1] >= period_seconds:  # it was idle: the kernel only counts periods in which a group runs
                shares.append(0.0)
        return max(shares, default=None)

    def _process_cpu_percent(self, quotas: _Quotas) -> float | None:
        used = self._since("process", time.process_time())
        allowed = min([float(len(usable_cpus())), *(cpus for cpus, _ in quotas.values())])
        return None if used is None else min(100.0, 100 * used[0] / used[1] / allowed)

    def _memory(self) -> tuple[float, float]:
        """MiB in use within the lowest limit, and the highest share of any limit."""
        machine = psutil.virtual_memory()
        limits = [(machine.total, machine.total - machine.available)]
        for group in self._groups:
            limit = group.memory_limit()
            used = group.memory_used() if limit else None
            if limit and used is not None:
                limits.append((limit, used))
        return min(limits)[1] / MIB, min(100.0, max(100 * used / limit for limit, used in limits))

    def _process_memory_mib(self) -> float:
        return float(self._this_process().memory_info().rss / MIB)

    def _disk_read_mib_per_second(self) -> float | None:
        process = self._this_process()
        if not hasattr(process, "io_counters"):  # macOS
            return None
        return self._mib_per_second("read", {"": process.io_counters().read_bytes})

    def _disk_write_mib_per_second(self) -> float | None:
        disks = psutil.disk_io_counters(perdisk=True, nowrap=False) or {}
        # Partitions, volumes of several disks and loop devices count what their disks count, too.
        real = {name: disk.write_bytes for name, disk in disks.items() if self._is_device("block", name)}
        return self._mib_per_second("written", real)

    def _network(self) -> tuple[float | None, float | None]:
        """MiB/s received and sent."""
        found = psutil.net_io_counters(pernic=True, nowrap=False)
        # Bridges, bonds and tunnels count what goes through a card a second time. A container may have no card.
        real = {name: card for name, card in found.items() if self._is_device("class/net", name)}
        cards = real or {name: card for name, card in found.items() if not name.startswith("lo")}
        received = self._mib_per_second("received", {name: card.bytes_recv for name, card in cards.items()})
        return received, self._mib_per_second("sent", {name: card.bytes_sent for name, card in cards.items()})

    def _is_device(self, kind: str, name: str) -> bool:
        """Whether a disk or network interface is a device rather than a name for part of one or for several."""
        known = self._devices.get((kind, name))
        if known is None:
            folder = self._sys / kind / name
            # Each path to an NVMe disk has an entry, hidden, beside the disk's own.
            hidden = folder / "hidden"
            known = (folder / "device").exists() and not (hidden.exists() and hidden.read_text().strip() == "1")
            self._devices[kind, name] = known
        return known

    def _mib_per_second(self, what: str, bytes_by_device: Mapping[str, float]) -> float | None:
        rates = []
        for device, count in bytes_by_device.items():
            increase = self._since((what, device), count)
            if increase is not None:
                rates.append(increase[0] / MIB / increase[1])
        return sum(rates) if rates else None

    def _since(self, counter: Hashable, count: float | None) -> tuple[float, float] | None:
        """A counter's increase since it was last known, and the seconds in between."""
        if count is None:
            return None
        before = self._counters_before.get(counter)
        now = self._counters_before[counter] = (time.monotonic(), count)
        if before is None or now[0] <= before[0] or now[1] < before[1]:
            return None
        return now[1] - before[1], now[0] - before[0]

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


def _or_none(read: Callable[[], Answer | None]) -> Answer | None:
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


class OtherProcesses:
    """What other processes take of the CPUs that this one may use, since this was made.

    Its children, and theirs, do not count as others. On a virtual machine, time that the host gave to others (steal)
    does.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._before = self._read()

    def cpu_percent(self) -> float | None:
        """Returns their share of these CPUs' time; None if it is unknown, or no time has passed."""
        (busy, all_time, own), now = self._before, self._read()
        passed = now[1] - all_time
        if passed <= 0:
            return None
        return max(0.0, min(100.0, 100 * ((now[0] - busy) - (now[2] - own)) / passed))

    def _read(self) -> tuple[float, float, float]:
        """CPU seconds: of all processes, of the CPUs, of this process and its children."""
        usable = set(usable_cpus())
        times = [one for number, one in enumerate(psutil.cpu_times(percpu=True)) if number in usable]
        # Guests are counted as users already.
        total = sum(sum(one) - getattr(one, "guest", 0) - getattr(one, "guest_nice", 0) for one in times)
        idle = sum(one.idle + getattr(one, "iowait", 0) for one in times)
        own = 0.0
        for process in [self._process, *self._process.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):  # it has ended
                own += sum(process.cpu_times()[:4])  # user, system, and those of children that were waited for
        return total - idle, total, own
