"""What is noticed of the machine around an experiment: readings that a test sets."""

from contextlib import contextmanager
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfopt import precision
from tfopt.diagnosis import readings
from tfopt.diagnosis.training import Training
from tfopt.hardware import Gpu, GpuSample
from tfopt.hardware.host_activity import HostReading
from tfopt.hardware.inventory import PcieLink
from tfopt.warn import forget_warnings

GPU = Gpu(0, "GPU-0", "NVIDIA H200", 143_771, (9, 0), False, "570.1")

LINK = PcieLink(5, 16, 5, 16)
TRAINING = SimpleNamespace(model=SimpleNamespace(_distribute_strategy=None))


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
    monkeypatch.setattr(readings, "HostMeter", Meter)
    monkeypatch.setattr(readings, "OtherProcesses", Others)
    monkeypatch.setattr(readings.hardware, "gpus", list)
    return monkeypatch


def with_gpu(machine, *rows):
    @contextmanager
    def sampler(on_sample):
        for row in rows:
            on_sample((row,))
        yield

    machine.setattr(readings.hardware, "gpus", lambda: [GPU])
    machine.setattr(readings, "GpuSampler", sampler)
    placed(machine)


def placed(machine, *, usable=(0, 1), near=(0, 1), link=LINK):
    machine.setattr(readings, "usable_cpus", lambda: usable)
    machine.setattr(readings, "cpu_affinity", lambda gpu: near and frozenset(near))
    machine.setattr(readings, "pcie_link", lambda gpu: link)


def noticed():
    with readings.readings(TRAINING) as found:
        pass
    return [(each.name, each.evidence) for each in found]


def test_a_quiet_machine_without_a_gpu_is_not_mentioned(machine, caplog):
    forget_warnings()
    assert noticed() == []
    assert caplog.records == []  # the sampler would tell that there is no driver


@pytest.mark.parametrize(
    ("owner", "name", "value", "evidence"),
    [
        (Others, "percent", 30.0, "Other processes used 30 % of the CPU time during the diagnosis."),
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
        ("thermal", [("throttled by heat", "GPU:0 was throttled by heat (thermal) during the diagnosis.")]),
        ("power_cap", [("throttled by power", "GPU:0 was throttled by power (power_cap) during the diagnosis.")]),
        ("app_clocks", []),
    ],
)
def test_clocks_that_are_held_back(machine, reason, said):
    fast = [sample(float(at), sm_clock_mhz=1980, throttle_reasons=()) for at in range(3)]
    slow = [sample(float(at), sm_clock_mhz=1200, throttle_reasons=(reason,)) for at in range(3, 9)]
    with_gpu(machine, *fast, *slow)
    assert noticed() == said


@pytest.mark.parametrize(
    ("how", "name", "said"),
    [
        (
            {"near": (0,)},
            "CPUs far from the GPU",
            "1 of the 2 CPUs of this process are in another NUMA node than its GPUs.",
        ),
        ({"near": None}, "", ""),
        (
            {"link": PcieLink(5, 8, 5, 16)},
            "a PCIe link below its best",
            "GPU:0 runs at PCIe 5.0 ×8; card and slot allow PCIe 5.0 ×16.",
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
    with readings.readings(TRAINING) as found:
        pass
    assert "taskset -c 16-31,40 python" in found[0].remedy
    placed(machine, usable=range(8), near=range(16, 32))  # none of them is near
    with readings.readings(TRAINING) as found:
        pass
    assert "taskset -c 16-31 python" in found[0].remedy


def test_sizes_that_miss_tensor_cores(machine):
    layers = [keras.layers.Dense(64, name="hidden"), keras.layers.Dense(8)]
    model = keras.Sequential([keras.Input((63,)), *layers], name="net")
    model.compile("sgd", "mse")
    training = Training.of(model, {"x": np.zeros((16, 63), "float32"), "y": np.zeros((16, 8), "float32")})
    assert list(readings.tensor_cores(training)) == []  # no GPU
    machine.setattr(readings.hardware, "gpus", lambda: [GPU])
    (found,) = readings.tensor_cores(training)
    assert found.evidence == "Inputs 63 in net/hidden: the next multiple is 64."


@pytest.mark.parametrize(
    ("reverse_dtype", "found"), [(None, 1), ("float32", 1), ("bfloat16", 0)], ids=["Keras' default", "float32", "16"]
)
def test_a_tied_embedding_that_multiplies_in_float32(machine, reverse_dtype, found):
    machine.setattr(readings.hardware, "gpus", lambda: [GPU])
    inputs = keras.Input((8,), dtype="int32")
    with precision.policy("mixed_bfloat16"):
        embedding = keras.layers.ReversibleEmbedding(64, 64, reverse_dtype=reverse_dtype, name="tokens")
        hidden = keras.layers.Dense(64)(keras.layers.Dense(64)(embedding(inputs)))
        model = keras.Model(inputs, embedding(hidden, reverse=True), name="net")
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    ids = np.zeros((16, 8), "int32")
    noticed = [each.evidence for each in readings.tensor_cores(Training.of(model, {"x": ids, "y": ids}))]
    assert noticed == ["tokens, with 33.3 % of the multiply-adds, multiplies in float32."] * found
    # What Keras does: the dtype of the last product in the graph.
    graph = tf.function(model).get_concrete_function(tf.TensorSpec((16, 8), "int32")).graph
    products = [operation.inputs[0].dtype.name for operation in graph.get_operations() if "MatMul" in operation.type]
    assert products[-1] == ("float32" if found else "bfloat16")


def test_gpus_that_the_model_does_not_use_are_left_out(machine):
    others = [Gpu(number, f"GPU-{number}", "NVIDIA H200", 143_771, (9, 0), False, "570.1") for number in range(3)]
    with_gpu(machine, sample(0.0))
    machine.setattr(readings.hardware, "gpus", lambda: others)
    machine.setattr(readings, "pcie_link", lambda gpu: PcieLink(1, 16, 5, 16))  # idle ones lower it
    assert [said[:5] for _, said in noticed()] == ["GPU:0"]
    workers = "/job:localhost/replica:0/task:0/device:GPU:1", "/job:localhost/replica:0/task:0/device:GPU:2"
    strategy = SimpleNamespace(extended=SimpleNamespace(worker_devices=workers))
    with readings.readings(SimpleNamespace(model=SimpleNamespace(_distribute_strategy=strategy))) as found:
        pass
    assert [each.evidence[:5] for each in found] == ["GPU:1", "GPU:2"]
