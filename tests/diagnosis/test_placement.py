"""What is noticed of the machine around an experiment: readings that a test sets."""

from contextlib import contextmanager

import pytest

from tfopt.diagnosis import placement
from tfopt.hardware import GpuSample
from tfopt.hardware.host_activity import HostReading
from tfopt.warn import forget_warnings


class Meter:
    throttled = None

    def read(self):
        return HostReading(host_cpu_throttled_percent=self.throttled)


class Others:
    percent = 0.0

    def cpu_percent(self):
        return self.percent


def sample(at, **fields):
    return GpuSample(time_seconds=at, elapsed_seconds=at, index=0, uuid="GPU-0", **fields)


@pytest.fixture
def machine(monkeypatch):
    """A quiet one, without a GPU."""
    monkeypatch.setattr(placement, "HostMeter", Meter)
    monkeypatch.setattr(placement, "OtherProcesses", Others)
    monkeypatch.setattr(placement.hardware, "gpus", list)
    return monkeypatch


def with_gpu(machine, *rows):
    @contextmanager
    def sampler(on_sample):
        for row in rows:
            on_sample((row,))
        yield

    machine.setattr(placement.hardware, "gpus", lambda: ["a GPU"])
    machine.setattr(placement, "GpuSampler", sampler)


def noticed():
    with placement.readings() as found:
        pass
    return [(each.name, each.evidence) for each in found]


def test_a_quiet_machine_without_a_gpu_is_not_mentioned(machine, caplog):
    forget_warnings()
    assert noticed() == []
    assert caplog.records == []  # the sampler would tell that there is no driver


@pytest.mark.parametrize(
    ("owner", "name", "value", "evidence"),
    [
        (Others, "percent", 30.0, "Other processes took 30 % of the CPUs meanwhile."),
        (Meter, "throttled", 40.0, "The CPU quota stopped this process in 40 % of its periods."),
    ],
)
def test_what_takes_the_cpus(machine, owner, name, value, evidence):
    machine.setattr(owner, name, value)
    assert [said for _, said in noticed()] == [evidence]


def test_a_gpu_that_is_shared(machine):
    with_gpu(machine, *(sample(float(at), gpu_memory_others_mib=4096.0) for at in range(4)))
    assert [said for _, said in noticed()] == ["Another process holds 4,096 MiB of GPU:0."]
    with_gpu(machine, *(sample(float(at), gpu_memory_others_mib=0.0) for at in range(4)))
    assert noticed() == []


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("thermal", [("heat", "GPU:0 was throttled by heat (thermal) meanwhile.")]),
        ("power_cap", [("power", "GPU:0 was throttled by power (power_cap) meanwhile.")]),
        ("app_clocks", []),
    ],
)
def test_clocks_that_are_held_back(machine, reason, said):
    fast = [sample(float(at), sm_clock_mhz=1980, throttle_reasons=()) for at in range(3)]
    slow = [sample(float(at), sm_clock_mhz=1200, throttle_reasons=(reason,)) for at in range(3, 9)]
    with_gpu(machine, *fast, *slow)
    assert noticed() == said
