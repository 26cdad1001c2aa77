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
