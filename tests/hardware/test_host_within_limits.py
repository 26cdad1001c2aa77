"""HostMeter measures against what control groups and affinity leave to this process, and counts devices once."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from limited_machine import GIB, machine

from tfopt.hardware.host_activity import HostMeter

__all__ = ["machine"]  # the fixture

CGROUPS = Path("/sys/fs/cgroup")
V1_UNLIMITED = {"cpu__cfs_quota_us": -1, "cpu__cfs_period_us": 100_000}


@pytest.fixture
def readings(machine, monkeypatch, set_clock):
    """Takes two readings a second apart, between which a function changes the machine; returns the second.

    Other processes keep all eight CPUs and 60 of the machine's 64 GiB busy.
    """
    now = [100.0]
    set_clock(lambda: now[0], HostMeter)
    times = [SimpleNamespace(_asdict=lambda: {"user": now[0], "idle": 0.0})] * 8
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: times)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=64 * GIB, available=4 * GIB))

    def read(change, seconds=1.0):
        meter = HostMeter(proc=machine.proc, sys=machine.sys)
        meter.read()
        now[0] += seconds
        change()
        return meter.read()

    return read


def stat(usage_usec, periods=0, throttled=0):
    """cpu.stat as version 2 writes it."""
    return f"usage_usec {usage_usec}\nuser_usec 1\nnr_periods {periods}\nnr_throttled {throttled}\nthrottled_usec 7"


def test_v2_cpu_is_measured_against_the_quota(machine, readings):
    machine.group("", cpu__max="150000 100000", cpu__stat=stat(5_000_000, 100, 20))
    second = readings(lambda: machine.group("", cpu__stat=stat(5_750_000, 110, 26)))
    assert second.host_cpu_percent == pytest.approx(50.0)  # 0.75 s of 1.5 CPUs for 1 s; the machine's were all busy
    assert second.host_cpu_throttled_percent == 60.0


def test_the_fullest_of_nested_groups_counts(machine, readings):
    machine.put("proc/self/cgroup", "0::/pod/box\n")

    def use(pod, box, throttled):
        machine.group("pod", cpu__max="400000 100000", cpu__stat=stat(pod, throttled * 10, throttled))
        machine.group("pod/box", cpu__max="200000 100000", cpu__stat=stat(box))

    use(pod=9_000_000, box=1_000_000, throttled=1)
    second = readings(lambda: use(pod=12_600_000, box=1_500_000, throttled=2))
    # A container beside this one takes most of what the pod allows both.
    assert (second.host_cpu_percent, second.host_cpu_throttled_percent) == (pytest.approx(90.0), 10.0)


def test_a_quota_that_is_no_limit_leaves_the_machines_percentage(machine, readings):
    machine.group("", cpu__max="800000 100000", cpu__stat=stat(0))
    second = readings(lambda: machine.group("", cpu__stat=stat(1_000_000)))
    assert second.host_cpu_percent == 100.0


def test_a_quota_whose_use_is_hidden_is_unknown(machine, readings):
    machine.group("", cpu__max="100000 100000")
    second = readings(lambda: None)
    assert (second.host_cpu_percent, second.host_cpu_throttled_percent) == (None, None)


@pytest.mark.parametrize("mounts", [("cpu,cpuacct", "cpu,cpuacct"), ("cpu", "cpuacct")])
def test_v1_cpu_is_measured_against_the_quota(mounts, machine, readings):
    lines = ["4:cpu,cpuacct:/pod/box"] if mounts[0] == mounts[1] else ["4:cpu:/pod/box", "3:cpuacct:/pod/box"]
    machine.put("proc/self/cgroup", "\n".join(lines))
    machine.group(mounts[0], **V1_UNLIMITED, cpu__stat="nr_periods 0\nnr_throttled 0\nthrottled_time 0")
    machine.group(f"{mounts[0]}/pod", **V1_UNLIMITED)
    machine.group(f"{mounts[0]}/pod/box", cpu__cfs_quota_us=200_000, cpu__cfs_period_us=100_000)

    def use(nanoseconds, periods, throttled):
        counts = f"nr_periods {periods}\nnr_throttled {throttled}\nthrottled_time 5"
        machine.group(f"{mounts[0]}/pod/box", cpu__stat=counts)
        machine.group(f"{mounts[1]}/pod/box", cpuacct__usage=nanoseconds)

    use(10**9, 50, 5)
    second = readings(lambda: use(2 * 10**9, 60, 10))
    assert (second.host_cpu_percent, second.host_cpu_throttled_percent) == (pytest.approx(50.0), 50.0)


def test_v1_use_that_is_counted_for_another_group_is_unknown(machine, readings):
    machine.put("proc/self/cgroup", "4:cpu:/box\n3:cpuacct:/\n")
    machine.group("cpu/box", cpu__cfs_quota_us=200_000, cpu__cfs_period_us=100_000)
    machine.group("cpuacct/box", cpuacct__usage=10**9)  # of others
    assert readings(lambda: machine.group("cpuacct/box", cpuacct__usage=2 * 10**9)).host_cpu_percent is None


@pytest.mark.parametrize(("seconds", "percent"), [(1.0, 0.0), (0.05, None)])
def test_no_period_is_idleness_unless_less_than_one_went_by(seconds, percent, machine, readings):
    machine.group("", cpu__max="100000 100000", cpu__stat=stat(0, 10, 3))
    assert readings(lambda: None, seconds).host_cpu_throttled_percent == percent


def test_v2_memory_is_measured_against_the_lowest_limit(machine, readings):
    machine.put("proc/self/cgroup", "0::/pod/box\n")
    machine.group("pod", memory__max=16 * GIB, memory__current=15 * GIB, memory__stat=f"inactive_file {7 * GIB}")
    machine.group("pod/box", memory__max=8 * GIB, memory__current=3 * GIB, memory__stat=f"inactive_file {GIB}")
    second = readings(lambda: None)
    assert second.host_memory_used_mib == 2048.0
    assert second.host_memory_percent == 93.75  # the machine's, of which others use 60 GiB


def test_memory_that_the_container_fills_shows(machine, readings):
    machine.group("", memory__max=2 * GIB, memory__current=2 * GIB, memory__stat=f"inactive_file {GIB // 32}")
    assert readings(lambda: None).host_memory_percent == pytest.approx(100 * 63 / 64)


def devices(machine, kind, *names):
    for name in names:
        (machine.sys / kind / name / "device").mkdir(parents=True)


def test_disk_writes_are_counted_once(machine, readings, monkeypatch):
    """A volume over two disks, a partition, a loop device and a second path to a disk repeat what disks count."""
    devices(machine, "block", "sda", "nvme0n1", "nvme0c0n1")
    machine.put("sys/block/nvme0c0n1/hidden", 1)
    machine.put("sys/block/nvme0n1/hidden", 0)
    written = dict.fromkeys(["sda", "sda1", "nvme0n1", "nvme0c0n1", "dm-0", "loop0"], 10**9)
    counters = lambda **options: {disk: SimpleNamespace(write_bytes=count) for disk, count in written.items()}  # noqa: E731
    monkeypatch.setattr(psutil, "disk_io_counters", counters)

    def write():
        for disk in written:
            written[disk] += 3 * 2**20 if disk.startswith("nvme") else 2**20

    assert readings(write, 2.0).host_disk_write_mib_per_second == 2.0


@pytest.mark.parametrize("cards", [("eth0", "ib0"), ()])
def test_network_traffic_is_counted_once(cards, machine, readings, monkeypatch):
    """With cards, bridges and bonds repeat what these count. A container without one has its own interfaces."""
    devices(machine, "class/net", *cards)
    names = ["lo", "eth0", *(["ib0", "bond0", "docker0"] if cards else [])]
    counts = dict.fromkeys(names, 10**9)
    found = lambda **options: {  # noqa: E731
        name: SimpleNamespace(bytes_recv=count, bytes_sent=2 * count) for name, count in counts.items()
    }
    monkeypatch.setattr(psutil, "net_io_counters", found)
    second = readings(lambda: counts.update(dict.fromkeys(counts, 10**9 + 2**20)))
    rates = second.host_network_rx_mib_per_second, second.host_network_tx_mib_per_second
    assert rates == ((2.0, 4.0) if cards else (1.0, 2.0))


BURNS = """
import json, os, resource, sys, threading, time
from tfopt.hardware.host_activity import HostMeter

def used():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime

for folder in sys.argv[1:]:
    open(f"{folder}/cgroup.procs", "w").write(str(os.getpid()))
meter = HostMeter()
end = time.monotonic() + 1.5
def burn():
    while time.monotonic() < end:
        sum(range(1000))
meter.read()
began, before = time.monotonic(), used()
burn()
reading = meter.read()
burnt, seconds = used() - before, time.monotonic() - began
print(json.dumps({"cpus": burnt / seconds, **vars(reading)}))
"""


def burn(*groups):
    """Burns CPU time in a process of the control groups; its readings, and how many CPUs it had by getrusage."""
    command = [sys.executable, "-c", BURNS, *map(str, groups)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.slow
def test_the_process_is_charged_what_the_kernel_charges_it():
    found = burn()
    assert found["process_cpu_percent"] == pytest.approx(100 * found["cpus"] / len(os.sched_getaffinity(0)), rel=0.05)


@pytest.mark.slow
def test_what_is_written_to_a_disk_is_seen(tmp_path):
    """What `fsync` waits for has reached the disk. Others may write meanwhile, so more may be seen."""
    began = time.monotonic()
    meter = HostMeter()
    meter.read()
    with open(tmp_path / "data", "wb") as file:
        file.write(os.urandom(64 * 2**20))
        os.fsync(file.fileno())
    rate = meter.read().host_disk_write_mib_per_second
    if rate is None or os.major(os.stat(tmp_path).st_dev) == 0:
        pytest.skip("the folder is on no disk that the machine shows")
    assert rate * (time.monotonic() - began) >= 63


@pytest.fixture
def groups():
    """A new group with 0.2 CPUs."""
    v1 = (CGROUPS / "cpu").is_dir()
    name = f"tfopt-test-{os.getpid()}"
    made = [CGROUPS / kind / name for kind in ("cpu", "cpuacct")] if v1 else [CGROUPS / name]
    try:
        for group in dict.fromkeys(map(Path.resolve, made)):
            group.mkdir()
        if v1:
            (made[0] / "cpu.cfs_quota_us").write_text("20000")
        else:
            (made[0] / "cpu.max").write_text("20000 100000")
        yield made
    except OSError as error:
        pytest.skip(f"needs the right to make control groups: {error}")
    finally:
        for group in made:
            if group.is_dir():
                group.rmdir()


@pytest.mark.slow
def test_in_a_real_group_cpu_is_measured_against_its_quota(groups):
    found = burn(*groups)
    assert found["process_cpu_percent"] == pytest.approx(min(100, 100 * found["cpus"] / 0.2), rel=0.05)
    assert found["host_cpu_percent"] == pytest.approx(found["process_cpu_percent"], rel=0.05)
    assert found["host_cpu_percent"] > 60
    assert found["host_cpu_throttled_percent"] > 50
