"""What psutil says of the host: the host's part of a sample, traffic, ports."""

import os
import socket
from collections import namedtuple
from types import SimpleNamespace

import psutil
import pytest
from limited_machine import GIB, machine

from tfopt.hardware import host_activity
from tfopt.hardware.host_activity import HostMeter, HostReading, OtherProcesses, port_holder, sent_bytes

__all__ = ["machine"]  # the fixture

Times = namedtuple("Times", "user nice system idle iowait guest guest_nice")


def meter(machine):
    return HostMeter(proc=machine.proc, sys=machine.sys)


@pytest.fixture
def times(monkeypatch, machine):
    """Seconds of four CPUs, of which the process may use 1 and 2."""
    now = [Times(10.0, 0.0, 0.0, 90.0, 0.0, 0.0, 0.0)] * 4
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 2}, raising=False)
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: list(now))
    return now


def test_without_a_quota_cpu_percent_is_that_of_the_usable_cpus(times, machine):
    cpus = meter(machine)
    assert cpus.read().host_cpu_percent is None
    times[0] = Times(110.0, 0.0, 0.0, 90.0, 0.0, 0.0, 0.0)
    times[1] = Times(12.0, 0.0, 1.0, 91.0, 0.0, 2.0, 0.0)
    times[2] = Times(10.0, 0.0, 0.0, 92.0, 2.0, 0.0, 0.0)
    # CPU 1: 3 s of work in 4 s, the guest's 2 s being the user's too. CPU 2: 4 s idle or waiting.
    assert cpus.read().host_cpu_percent == pytest.approx(100 * 3 / 8)


def test_no_time_passed_is_no_percentage(times, machine):
    cpus = meter(machine)
    cpus.read()
    assert cpus.read().host_cpu_percent is None


def test_memory_in_mib(monkeypatch, machine):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=8 * GIB, available=5 * GIB))
    process = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=3 * 2**20))
    monkeypatch.setattr(psutil, "Process", lambda: process)
    expected = HostReading(host_memory_used_mib=3072.0, host_memory_percent=37.5, process_memory_mib=3.0)
    assert meter(machine).read() == expected


class Disk:
    """Stands in for psutil's process: bytes read so far, on a clock of its own."""

    def __init__(self):
        self.now = 50.0
        self.read_bytes = 0

    def memory_info(self):
        return SimpleNamespace(rss=2**20)

    def io_counters(self):
        if isinstance(self.read_bytes, Exception):
            raise self.read_bytes
        return SimpleNamespace(read_bytes=self.read_bytes, read_chars=10**12)


@pytest.fixture
def disk(monkeypatch, set_clock):
    disk = Disk()
    set_clock(lambda: disk.now, HostMeter)
    monkeypatch.setattr(psutil, "Process", lambda: disk)
    return disk


def test_disk_reads_are_a_rate_since_the_reading_before(disk):
    meter = HostMeter()
    rates = []
    for now, read_bytes in [(50.0, 10**9), (52.0, 10**9 + 3 * 2**20), (53.0, 10**9 + 3 * 2**20)]:
        disk.now, disk.read_bytes = now, read_bytes
        rates.append(meter.read().disk_read_mib_per_second)
    assert rates == [None, 1.5, 0.0]


def test_a_disk_counter_that_goes_back_or_fails_is_unknown_then(disk):
    meter = HostMeter()
    rates = []
    for read_bytes in [10 * 2**20, 5 * 2**20, 6 * 2**20, psutil.AccessDenied(), 7 * 2**20, 9 * 2**20]:
        disk.now, disk.read_bytes = disk.now + 1.0, read_bytes
        rates.append(meter.read().disk_read_mib_per_second)
    assert rates == [None, None, 1.0, None, 0.5, 2.0]  # 1 MiB over the 2 s since it last told


def test_a_clock_that_stands_gives_no_rate(disk):
    meter = HostMeter()
    meter.read()
    disk.read_bytes = 2**20
    assert meter.read().disk_read_mib_per_second is None


def test_a_system_without_disk_counters_gives_none(monkeypatch):
    """As on macOS."""
    monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=2**20)))
    meter = HostMeter()
    assert [meter.read().disk_read_mib_per_second for _ in range(2)] == [None, None]


def test_the_process_is_looked_up_once(monkeypatch):
    made = []
    process = psutil.Process()
    monkeypatch.setattr(psutil, "Process", lambda: made.append(1) or process)
    meter = HostMeter()
    assert [meter.read().process_memory_mib is None for _ in range(3)] == [False] * 3
    assert len(made) == 1


@pytest.mark.parametrize("error", [psutil.AccessDenied(), OSError(), KeyError(), RuntimeWarning()])
def test_what_psutil_cannot_read_is_none(error, monkeypatch, machine):
    def fail(*arguments, **options):
        raise error

    for name in ("cpu_times", "virtual_memory", "Process", "disk_io_counters", "net_io_counters"):
        monkeypatch.setattr(psutil, name, fail)
    assert meter(machine).read() == HostReading()


def test_what_goes_over_the_loopback_is_counted():
    before = sent_bytes()
    server = socket.create_server(("127.0.0.1", 0))
    sender = socket.create_connection(server.getsockname())
    receiver, _ = server.accept()
    with server, sender, receiver:
        sender.sendall(b"x" * 100_000)
        received = 0
        while received < 100_000:
            received += len(receiver.recv(65536))
    assert sent_bytes() - before >= 100_000


def test_an_interface_that_is_not_there():
    assert sent_bytes("nonesuch0") is None


def test_the_holder_of_a_port():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        assert port_holder(port) == f"{psutil.Process().name()} (process {os.getpid()})"
        with socket.create_connection(("127.0.0.1", port)) as client:
            assert port_holder(client.getsockname()[1]) is None  # a client's end is no holder
    assert port_holder(port) is None


@pytest.mark.parametrize("error", [psutil.AccessDenied(), psutil.NoSuchProcess(1), PermissionError()])
def test_a_system_that_does_not_tell(monkeypatch, error):
    def refuse(kind):
        raise error

    monkeypatch.setattr(host_activity.psutil, "net_connections", refuse)
    assert port_holder(80) is None


def test_what_others_take_of_the_cpus(monkeypatch):
    """Two CPUs for 10 s: 12 s busy, with waiting for disks idle and guests within users; 5 s by us and our children."""
    cpus = [(0, 0, 0, 0, 0, 0, 0), (0, 0, 0, 0, 0, 0, 0)], [(5, 0, 1, 2, 2, 3, 0), (6, 0, 0, 4, 0, 0, 0)]
    ours = [(0, 0, 0, 0), (1, 0, 0, 0)], [(2, 0.5, 1, 0.5), (1.5, 0.5, 0, 0)]
    reading = 0

    class Process:
        def __init__(self, which=0):
            self._which = which

        def children(self, recursive):
            assert recursive
            gone = SimpleNamespace(cpu_times=lambda: (_ for _ in ()).throw(psutil.NoSuchProcess(1)))
            return [Process(1), gone]

        def cpu_times(self):
            return (*ours[reading][self._which], 99.0)  # and waiting for disks

    monkeypatch.setattr(psutil, "Process", Process)
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: [Times(*one) for one in cpus[reading]])
    monkeypatch.setattr(host_activity, "usable_cpus", lambda: (0, 1))
    others = OtherProcesses()
    assert others.cpu_percent() is None
    reading = 1
    assert others.cpu_percent() == pytest.approx(100 * (12 - 5) / 20)
