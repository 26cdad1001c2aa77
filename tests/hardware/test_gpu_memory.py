import subprocess
import sys

import pytest
import tensorflow as tf

from tfopt.hardware import gpu_memory

GPU = tf.config.LogicalDevice("/device:GPU:3", "GPU")


@pytest.mark.parametrize(("devices", "name"), [([], None), ([GPU], "GPU:3")])
def test_the_first_gpu(monkeypatch, devices, name):
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: devices)
    assert gpu_memory.first_gpu() == name


def test_the_limit_is_what_tensorflow_may_take():
    assert gpu_memory.limit_bytes("/device:CPU:0") == 256 * 2**20  # what TensorFlow 2.21 says of every CPU
    assert gpu_memory.limit_bytes("CPU:0") == 256 * 2**20
    assert gpu_memory.limit_bytes("GPU:7") is None


def test_use_and_peak_are_the_allocators(monkeypatch):
    reset = []
    monkeypatch.setattr(tf.config.experimental, "get_memory_info", lambda device: {"current": 30, "peak": 90})
    monkeypatch.setattr(tf.config.experimental, "reset_memory_stats", reset.append)
    assert (gpu_memory.in_use_bytes("GPU:0"), gpu_memory.peak_bytes("GPU:0")) == (30, 90)
    gpu_memory.reset_peak("GPU:0")
    assert reset == ["GPU:0"]


class Allocators:
    """Stands in for TensorFlow's GPUs, each a list of its logical devices' bytes in use and peak."""

    def __init__(self, *gpus, visible=None):
        self.physical = [
            tf.config.PhysicalDevice(f"/physical_device:GPU:{number}", "GPU") for number in range(len(gpus))
        ]
        self.visible = [self.physical[number] for number in (range(len(gpus)) if visible is None else visible)]
        self.configured = {
            device: None if len(parts) == 1 else [object() for _ in parts]
            for device, parts in zip(self.physical, gpus, strict=True)
        }
        self.logical = [part for device in self.visible for part in gpus[self.physical.index(device)]]

    def list_physical_devices(self, kind):
        return self.physical

    def get_visible_devices(self, kind):
        return self.visible

    def get_logical_device_configuration(self, device):
        return self.configured[device]

    def get_memory_info(self, name):
        current, peak = self.logical[int(name.removeprefix("GPU:"))]
        return {"current": current * 2**20, "peak": peak * 2**20}


@pytest.fixture
def allocators(monkeypatch):
    def stand_in(*gpus, **options):
        found = Allocators(*gpus, **options)
        monkeypatch.setattr(tf.config.experimental, "get_memory_info", found.get_memory_info)
        for name in ("list_physical_devices", "get_visible_devices", "get_logical_device_configuration"):
            monkeypatch.setattr(tf.config, name, getattr(found, name))
        tf.constant(0.0)  # initialises TensorFlow's devices
        return [tuple(vars(gpu_memory.read_allocator(number)).values()) for number in range(len(gpus))]

    return stand_in


def test_the_allocator_of_each_gpu(allocators):
    assert allocators([(10, 30)], [(20, 25)]) == [(10.0, 30.0), (20.0, 25.0)]


def test_a_gpu_split_into_logical_devices_is_their_sum(allocators):
    assert allocators([(1, 5), (2, 7)], [(4, 4)], [(8, 9), (16, 20)]) == [(3.0, 12.0), (4.0, 4.0), (24.0, 29.0)]


def test_a_gpu_that_tensorflow_does_not_use_is_unknown(allocators):
    assert allocators([(1, 1)], [(2, 3)], visible=[1]) == [(None, None), (2.0, 3.0)]


@pytest.mark.parametrize("error", [ValueError("no stats"), RuntimeError(), IndexError()])
def test_an_allocator_without_figures_is_unknown(monkeypatch, error):
    def fail(kind):
        raise error

    tf.constant(0.0)
    monkeypatch.setattr(tf.config, "list_physical_devices", fail)
    assert gpu_memory.read_allocator(0) == gpu_memory.AllocatorReading()


LOOKS = """
import sys
from tfopt.hardware.gpu_memory import AllocatorReading, read_allocator
from tfopt.hardware import GpuSampler
assert read_allocator(0) == AllocatorReading()
assert "tensorflow" not in sys.modules
import tensorflow as tf
from tfopt.hardware.gpu_memory import devices_started
tf.config.list_physical_devices("GPU")
assert read_allocator(0) == AllocatorReading()
assert devices_started() is False
halves = [tf.config.LogicalDeviceConfiguration()] * 2
tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], halves)
print("not initialised")
"""


@pytest.mark.slow
def test_looking_initialises_nothing():
    """Otherwise set_memory_growth would fail from the first sample on."""
    done = subprocess.run([sys.executable, "-c", LOOKS], capture_output=True, text=True, check=True)
    assert "not initialised" in done.stdout
