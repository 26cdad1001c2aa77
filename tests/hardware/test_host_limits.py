"""host(): what control groups and CPU affinity leave of the machine."""

import json

import pytest
from limited_machine import GIB, machine

from tfopt.hardware import Host, host

__all__ = ["machine"]  # the fixture

V1_NO_LIMIT = 0x7FFFFFFFFFFFF000


def read(machine):
    return host(proc=machine.proc, sys=machine.sys)


def test_a_machine_without_limits(machine):
    found = read(machine)
    assert found == Host("A CPU @ 2 GHz", 8.0, tuple(range(8)), None, 65536.0, None, 49152.0)
    assert str(found) == "A CPU @ 2 GHz, 8 CPUs usable, 49152 MiB of memory available"
    assert json.loads(json.dumps(found.to_dict())) == found.to_dict()


def test_v2_takes_the_tightest_level_up_to_the_root(machine):
    machine.put("proc/self/cgroup", "0::/pod/box\n")
    machine.group("pod", cpu__max="150000 100000", memory__max=8 * GIB, memory__current=3 * GIB)
    machine.group("pod/box", cpu__max="400000 100000", memory__max="max", memory__high=16 * GIB, memory__current=GIB)
    found = read(machine)
    assert (found.cpus, found.quota_cpus) == (1.5, 1.5)
    assert (found.memory_limit_mib, found.memory_available_mib) == (8192.0, 5120.0)


def test_v2_memory_high_is_a_limit_too(machine):
    machine.group("", memory__max=8 * GIB, memory__high=2 * GIB, memory__current=GIB)
    assert (read(machine).memory_limit_mib, read(machine).memory_available_mib) == (2048.0, 1024.0)


def test_v2_page_cache_counts_as_free(machine):
    stat = f"anon {GIB}\nactive_file {GIB}\ninactive_file {5 * GIB}"
    machine.group("", memory__max=8 * GIB, memory__current=7 * GIB, memory__stat=stat)
    assert read(machine).memory_available_mib == 6 * 1024


def test_the_machines_own_memory_may_be_the_tighter(machine):
    machine.group("", memory__max=60 * GIB, memory__current=GIB)
    assert read(machine).memory_available_mib == 49152.0


def test_more_used_than_allowed_leaves_nothing(machine):
    machine.group("", memory__max="max", memory__high=GIB, memory__current=2 * GIB)
    assert read(machine).memory_available_mib == 0.0


def test_a_quota_above_the_affinity_changes_nothing(machine):
    machine.group("", cpu__max="6400000 100000")
    assert (read(machine).cpus, read(machine).quota_cpus) == (8.0, 64.0)


def test_v1(machine):
    machine.put("proc/self/cgroup", "9:name=systemd:/\n5:memory:/pod/box\n4:cpu,cpuacct:/pod/box\n0::/\n")
    machine.group("cpu,cpuacct/pod/box", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100000)
    machine.group("cpu,cpuacct/pod", cpu__cfs_quota_us=250000, cpu__cfs_period_us=100000)
    machine.group(
        "memory/pod/box",
        memory__limit_in_bytes=4 * GIB,
        memory__usage_in_bytes=3 * GIB,
        memory__stat=f"cache {GIB}\ntotal_inactive_file {2 * GIB}",
    )
    machine.group("memory", memory__limit_in_bytes=V1_NO_LIMIT, memory__usage_in_bytes=30 * GIB)
    found = read(machine)
    assert (found.cpus, found.quota_cpus) == (2.5, 2.5)
    assert (found.memory_limit_mib, found.memory_available_mib) == (4096.0, 3072.0)


def test_v1_controllers_mounted_one_by_one(machine):
    machine.put("proc/self/cgroup", "4:cpu,cpuacct:/box\n")
    machine.group("cpu/box", cpu__cfs_quota_us=50000, cpu__cfs_period_us=100000)
    assert read(machine).cpus == 0.5


def test_v1_without_limits(machine):
    machine.put("proc/self/cgroup", "5:memory:/\n4:cpu:/\n")
    machine.group("cpu", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100000)
    machine.group("memory", memory__limit_in_bytes=V1_NO_LIMIT, memory__usage_in_bytes=GIB)
    found = read(machine)
    assert (found.quota_cpus, found.memory_limit_mib, found.memory_available_mib) == (None, None, 49152.0)


@pytest.mark.parametrize("path", ["/docker/abc", "/../../other.slice"])
def test_a_path_that_the_container_does_not_have_leaves_the_root(path, machine):
    machine.put("proc/self/cgroup", f"0::{path}\n")
    machine.group("", cpu__max="200000 100000", memory__max=GIB, memory__current=0)
    assert (read(machine).cpus, read(machine).memory_limit_mib) == (2.0, 1024.0)


@pytest.mark.parametrize("text", ["", "max", "rubbish", "-5 100000", "100000 0", "1 2 3", "\x00\ufffd"])
def test_broken_files_mean_unknown(text, machine):
    machine.group("", cpu__max=text, memory__max=text, memory__current=text, memory__stat=text)
    for name in ("meminfo", "cpuinfo"):
        machine.put(f"proc/{name}", text)
    assert read(machine) == Host(None, 8.0, tuple(range(8)), None, None, None, None)


@pytest.mark.parametrize("text", ["", "rubbish", "0", ":::::", "0::"])
def test_a_broken_list_of_groups_is_survived(text, machine):
    machine.put("proc/self/cgroup", text)
    assert read(machine).cpus == 8.0


def test_a_limit_without_its_usage_is_a_limit(machine):
    machine.group("", memory__max=GIB)
    assert (read(machine).memory_limit_mib, read(machine).memory_available_mib) == (1024.0, 49152.0)


def test_no_proc_and_no_sys(tmp_path):
    found = host(proc=tmp_path / "none", sys=tmp_path / "none")
    assert found.cpus == len(found.affinity) >= 1
    assert (found.cpu_model, found.memory_total_mib, found.memory_available_mib) == (None, None, None)
    assert str(found).startswith("unknown CPU")
