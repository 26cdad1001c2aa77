"""What is noticed of the machine around an experiment: readings that a test sets."""

from contextlib import contextmanager

import keras
import numpy as np
import pytest

from tfopt.diagnosis import placement
from tfopt.diagnosis.training import Training
from tfopt.hardware import Gpu, GpuSample
from tfopt.hardware.host_activity import HostReading
from tfopt.hardware.inventory import PcieLink
from tfopt.warn import forget_warnings

GPU = Gpu(0, "GPU-0", "NVIDIA H200", 143_771, (9, 0), False, "570.1")

LINK = PcieLink(5, 16, 5, 16)


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

    machine.setattr(placement.hardware, "gpus", lambda: [GPU])
    machine.setattr(placement, "GpuSampler", sampler)
    placed(machine)


def placed(machine, *, usable=(0, 1), near=(0, 1), link=LINK):
    machine.setattr(placement, "usable_cpus", lambda: usable)
    machine.setattr(placement, "cpu_affinity", lambda gpu: near and frozenset(near))
    machine.setattr(placement, "pcie_link", lambda gpu: link)


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


def test_memory_that_is_nearly_full(machine):
    full = {"gpu_memory_total_mib": 1000.0, "gpu_memory_allocated_peak_mib": 930.0}
    with_gpu(machine, *(sample(float(at), **full) for at in range(3)))
    assert [said for _, said in noticed()] == ["Tensors took 930 of the 1,000 MiB of GPU:0."]
    with_gpu(machine, *(sample(float(at), **full | {"gpu_memory_allocated_peak_mib": 600.0}) for at in range(3)))
    assert noticed() == []


@pytest.mark.parametrize(
    ("how", "name", "said"),
    [
        ({"near": (0,)}, "CPUs far from the GPU", "CPUs of this process on another socket than GPU:0: 1 of 2."),
        ({"near": None}, "", ""),
        (
            {"link": PcieLink(5, 8, 5, 16)},
            "a PCIe link below its best",
            "GPU:0 is connected by PCIe 5.0 ×8, of PCIe 5.0 ×16 that are possible.",
        ),
        ({"link": None}, "", ""),
    ],
)
def test_how_the_gpu_is_connected(machine, how, name, said):
    with_gpu(machine, sample(0.0))
    placed(machine, **how)
    assert noticed() == ([(name, said)] if name else [])


def test_far_cpus_are_told_with_the_command(machine):
    with_gpu(machine, sample(0.0))
    placed(machine, usable=range(64), near=[*range(16, 32), 40])
    with placement.readings() as found:
        pass
    assert "taskset -c 16-31,40 python" in found[0].remedy
    placed(machine, usable=range(8), near=range(16, 32))  # none of them is near
    with placement.readings() as found:
        pass
    assert "taskset -c 16-31 python" in found[0].remedy


def test_sizes_that_miss_tensor_cores(machine):
    model = keras.Sequential([keras.Input((63,)), keras.layers.Dense(64, name="hidden"), keras.layers.Dense(8)])
    model.compile("sgd", "mse")
    training = Training.of(model, {"x": np.zeros((16, 63), "float32"), "y": np.zeros((16, 8), "float32")})
    assert list(placement.sizes(training)) == []  # no GPU
    machine.setattr(placement.hardware, "gpus", lambda: [GPU])
    (found,) = placement.sizes(training)
    assert found.evidence == "Inputs 63 in sequential/hidden: the next multiple is 64." or "63" in found.evidence
