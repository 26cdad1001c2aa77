"""bind_cpus() and threads(): never more CPUs than before, never none. With a fake NVML and on this machine."""

import os
import threading

import fake_nvml
import pytest
from fake_nvml import FakeGpu

from tfopt.distribute import placement
from tfopt.distribute.cluster.membership import ONE_PROCESS, Cluster
from tfopt.distribute.placement import CpuBinding, bind_cpus, threads
from tfopt.hardware import gpus

nvml = fake_nvml.fake_nvml
pytestmark = pytest.mark.usefixtures("nvml")

ALONE = Cluster(ONE_PROCESS)
TWO_HERE = Cluster("arguments", ("here:1", "here:2"), 0)


class Cpus:
    """Stands in for the system calls: this process's CPUs and its parent's."""

    def __init__(self, own):
        self.own = set(own)
        self.parent = set(self.own)
        self.refuses = False

    def get(self, pid):
        return self.parent if pid else self.own

    def set(self, pid, cpus):
        assert pid == 0
        if self.refuses:
            raise PermissionError(1, "Operation not permitted")
        self.own = set(cpus)


@pytest.fixture
def cpus(monkeypatch):
    """A machine of 128 CPUs in two sockets, without a quota."""
    fake = Cpus(range(128))
    monkeypatch.setattr(os, "sched_getaffinity", fake.get)
    monkeypatch.setattr(os, "sched_setaffinity", fake.set)
    set_quota(monkeypatch, None)
    return fake


def set_quota(monkeypatch, quota):
    class Allowed:
        quota_cpus = quota

    monkeypatch.setattr(placement, "host", Allowed)


@pytest.mark.parametrize(
    ("near", "own", "after"),
    [
        ([range(64)], range(128), range(64)),
        ([range(64)], range(60, 70), range(60, 64)),
        ([range(64), range(64, 96)], range(128), range(96)),
        ([range(64)], range(64, 128), range(64, 128)),
        ([range(256)], range(128), range(128)),
        ([[]], range(128), range(128)),
        ([range(64), []], range(128), range(128)),
        ([], range(128), range(128)),
    ],
)
def test_the_cpus_near_the_gpus(nvml, cpus, near, own, after):
    cpus.own = set(own)
    nvml.gpus += [FakeGpu(f"GPU-{bus}", bus=bus, cpus=set(near)) for bus, near in enumerate(near)]
    binding = bind_cpus(gpus())
    assert binding.before == set(own)
    assert binding.after == set(after) == cpus.own


def test_a_refused_binding_keeps_all_cpus(nvml, cpus):
    nvml.gpus.append(FakeGpu(cpus={1}))
    cpus.refuses = True
    binding = bind_cpus(gpus())
    assert binding.after == binding.before == set(range(128))
    assert "Operation not permitted" in binding.reason


def in_a_thread(function):
    """Affinity belongs to a thread, so a binding made in this one ends with it."""
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def test_the_system_really_binds(nvml):
    before = os.sched_getaffinity(0)
    one = min(before)
    nvml.gpus.append(FakeGpu(cpus={one, max(before) + 1}))
    binding, bound, inherited = in_a_thread(
        lambda: (bind_cpus(gpus()), os.sched_getaffinity(0), in_a_thread(lambda: os.sched_getaffinity(0)))
    )
    assert bound == inherited == binding.after == {one}
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize(
    ("cluster", "own", "parent", "quota", "intra_op"),
    [
        (ALONE, 128, 128, None, 128),
        (TWO_HERE, 128, 128, None, 64),
        (TWO_HERE, 16, 128, None, 16),  # the launcher gave this worker its own 16
        (TWO_HERE, 5, 5, None, 2),
        (TWO_HERE, 1, 1, None, 1),
        (ALONE, 128, 128, 4.0, 4),
        (TWO_HERE, 128, 128, 4.0, 2),
        (TWO_HERE, 16, 128, 4.0, 2),
        (TWO_HERE, 128, 128, 0.5, 1),
        (Cluster("arguments", ("here:1", "there:1"), 0), 128, 128, None, 128),
    ],
)
def test_threads(cpus, monkeypatch, cluster, own, parent, quota, intra_op):
    cpus.own, cpus.parent = set(range(own)), set(range(parent))
    set_quota(monkeypatch, quota)
    size, text = threads(cluster, bind_cpus([]))
    assert size == intra_op
    assert text.startswith(f"{intra_op} intra-op and {intra_op} inter-op threads: ")


@pytest.mark.parametrize(("workers", "near", "intra_op"), [(8, 64, 16), (1, 64, 64), (2, 8, 8)])
def test_threads_after_binding_to_a_gpu(cpus, workers, near, intra_op):
    """With eight workers on two sockets, four share the 64 CPUs of one."""
    cluster = Cluster("arguments", tuple(f"here:{port + 1}" for port in range(workers)), 0)
    binding = CpuBinding(frozenset(range(128)), frozenset(range(near)), "those near the GPUs")
    cpus.own = set(binding.after)
    assert threads(cluster, binding)[0] == intra_op


def test_a_parent_that_has_ended_counts_as_shared(cpus, monkeypatch):
    def get(pid):
        if pid:
            raise ProcessLookupError
        return {0, 1, 2, 3}

    monkeypatch.setattr(os, "sched_getaffinity", get)
    assert threads(TWO_HERE, bind_cpus([]))[0] == 2


def test_str(cpus, monkeypatch):
    set_quota(monkeypatch, 12.5)
    binding = bind_cpus([])
    assert threads(TWO_HERE, binding) == (
        6,
        "6 intra-op and 6 inter-op threads: 128 CPUs shared by 2 workers, of which the control group allows 12.5",
    )
    assert str(binding) == "128 of 128 CPUs: no GPU to be near to"
    assert binding.after == frozenset(range(128))
