"""The GPU memory of a variant, on a device whose counters the test sets."""

import gc

import pytest
import tensorflow as tf

from tfopt.bench.cases import Case, Variant
from tfopt.bench.cases.device import MemoryMeter
from tfopt.bench.cases.measuring import measure
from tfopt.measure import StepTimes

MIB = 2**20
TIMES = StepTimes(repeats_ms=((1.0,),), steps_per_sample=1, first_step_seconds=1.0)


class Device:
    """A GPU's allocator: what is in use, and the most since the counter was reset."""

    current = peak = 0

    def take(self, mib):
        self.current += mib * MIB
        self.peak = max(self.peak, self.current)

    def reset(self, name):
        assert name == "GPU:0"
        self.peak = self.current

    def info(self, name):
        assert name == "GPU:0"
        return {"current": self.current, "peak": self.peak}


@pytest.fixture
def device(monkeypatch):
    gpu = Device()
    monkeypatch.setattr(
        tf.config, "list_logical_devices", lambda kind: [tf.config.LogicalDevice("/device:GPU:0", "GPU")]
    )
    monkeypatch.setattr(tf.config.experimental, "reset_memory_stats", gpu.reset)
    monkeypatch.setattr(tf.config.experimental, "get_memory_info", gpu.info)
    return gpu


def variant(device, *, model, step, first=0, kept=0):
    """Takes memory for a model, at each call for a step, and in the first call for compiling and for good."""

    def make(stack=None):
        device.take(model)
        calls = []

        def timer():
            extra = step if calls else step + first
            device.take(extra)
            device.take(-extra)
            if not calls:
                device.take(kept)
            calls.append(1)
            return TIMES

        return timer

    return make


def test_what_others_keep_is_not_counted(device):
    device.take(1000)
    small = MemoryMeter(variant(device, model=10, step=100))
    large = MemoryMeter(variant(device, model=20, step=300))
    assert small.peak_mib is None
    for _ in range(2):
        for meter in (small, large):
            assert meter() is TIMES
    assert (small.peak_mib, large.peak_mib) == (110.0, 320.0)


def test_compiling_does_not_count_and_what_is_made_in_the_first_call_does(device):
    meter = MemoryMeter(variant(device, model=10, step=100, first=5000, kept=30))
    meter()
    meter()
    assert meter.peak_mib == 140.0


def test_a_copy_of_the_state_in_later_calls_does_not_count(device):
    steps = iter([5000, 100, 130, 130])

    def timer():
        extra = next(steps)
        device.take(extra)
        device.take(-extra)
        return TIMES

    meter = MemoryMeter(lambda: timer)
    for _ in range(4):
        meter()
    assert meter.peak_mib == 100.0


def test_garbage_of_others_is_not_counted(device):
    class Garbage:
        def __init__(self):
            self.itself = self
            device.take(500)

        def __del__(self):
            device.take(-500)

    Garbage()
    make = variant(device, model=10, step=100)
    meter = MemoryMeter(lambda: (gc.collect(), make())[1])
    meter()
    assert meter.peak_mib == 110.0


def test_a_case_records_it(device):
    steps = {"a": 5, "b": 7}
    variants = [Variant(name=n, note="", timer=variant(device, model=10, step=step)) for n, step in steps.items()]
    outcome = measure(Case(suite="s", workload="w", question="?", unit="step", variants=variants, repeats=2))
    assert [found.peak_memory_mib for found in outcome.variants] == [15.0, 17.0]
    assert [found.recommended for found in outcome.variants] == [False, False]


def test_a_device_that_does_not_say(monkeypatch):
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: [])
    meter = MemoryMeter(lambda: lambda: TIMES)
    meter()
    assert meter.peak_mib is None
