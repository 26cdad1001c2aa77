"""A GPU's memory as the driver tells it; what may be set, and when. The driver is a fake."""

import json
import os
import subprocess
import sys

import pytest
import tensorflow as tf
from fake_nvml import OTHER_PROCESS, FakeGpu

from tfopt import memory
from tfopt.errors import UnsupportedError
from tfopt.memory import MemoryUsage

GPU = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")


def test_the_memory_of_each_gpu(fake_nvml):
    own = (os.getpid(), 900 * 2**20), (OTHER_PROCESS, 100 * 2**20)
    fake_nvml.gpus += [FakeGpu("GPU-0", processes=list(own)), FakeGpu("GPU-1", bus=2, unsupported={MEMORY})]
    known, unknown = memory.usage()
    assert known == MemoryUsage(
        index=0, in_use_mib=None, peak_mib=None, held_mib=900.0, others_mib=100.0, total_mib=143_771.0
    )
    assert str(known) == "GPU:0: 900 MiB held, 100 MiB by others, 143,771 MiB total"
    assert unknown.total_mib is None


MEMORY = "nvmlDeviceGetMemoryInfo"


def test_without_a_gpu_there_is_nothing(fake_nvml):
    assert memory.usage() == ()


@pytest.mark.no_gpu
def test_without_a_gpu_settings_do_nothing(monkeypatch):
    called = []
    for owner, name in (
        (tf.config.experimental, "set_memory_growth"),
        (tf.config, "set_logical_device_configuration"),
        (tf.config.experimental, "reset_memory_stats"),
    ):
        monkeypatch.setattr(owner, name, lambda *arguments: called.append(arguments))
    memory.set_growth()
    memory.set_limit(1000, gpu=3)
    memory.reset_peak()
    assert called == []


@pytest.fixture
def with_gpu(monkeypatch):
    """A GPU that is only listed, with neither growth nor a limit."""
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: [GPU])
    monkeypatch.setattr(tf.config, "get_logical_device_configuration", lambda device: None)
    monkeypatch.setattr(tf.config.experimental, "get_memory_growth", lambda device: False)
    return monkeypatch


def too_late(*arguments):
    raise RuntimeError("Physical devices cannot be modified after being initialized")


def test_what_comes_too_late_is_refused(with_gpu):
    with_gpu.setattr(tf.config.experimental, "set_memory_growth", too_late)
    with_gpu.setattr(tf.config, "set_logical_device_configuration", too_late)
    for call in (memory.set_growth, lambda: memory.set_limit(1000)):
        with pytest.raises(UnsupportedError, match="Call it first in the script"):
            call()


def test_growth_and_a_limit_are_not_combined(with_gpu):
    with_gpu.setattr(tf.config, "get_logical_device_configuration", lambda device: ["a limit"])
    with pytest.raises(UnsupportedError, match="Found: set_limit was called before"):
        memory.set_growth()
    with_gpu.setattr(tf.config.experimental, "get_memory_growth", lambda device: True)
    with pytest.raises(UnsupportedError, match="Found: set_growth was called before"):
        memory.set_limit(1000)


@pytest.mark.usefixtures("with_gpu")
def test_wrong_arguments():
    with pytest.raises(ValueError, match="Expected mib to be"):
        memory.set_limit(0)
    with pytest.raises(ValueError, match=r"Expected a GPU from 0 to 0\. Received: 1"):
        memory.set_limit(1000, gpu=1)


ON_A_GPU = """
import json, tfopt, tensorflow as tf
{set}
big = tf.ones((1024, 1024, 64))
print(json.dumps([each.to_dict() for each in tfopt.memory.usage()]))
try:
    {again}
except tfopt.errors.UnsupportedError as error:
    print(error)
del big
tfopt.memory.reset_peak()
print(tfopt.memory.usage()[0].peak_mib)
"""


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("call", "again"), [("set_growth()", "set_growth(False)"), ("set_limit(2048)", "set_limit(1024)")]
)
def test_on_a_gpu(call, again):
    code = ON_A_GPU.format(set=f"tfopt.memory.{call}", again=f"tfopt.memory.{again}")
    environ = {name: value for name, value in os.environ.items() if name != "TF_FORCE_GPU_ALLOW_GROWTH"}
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120, env=environ
    )
    used, said, peak = ran.stdout.splitlines()
    found = json.loads(used)[0]
    assert found["in_use_mib"] >= 256
    assert found["held_mib"] is None or found["held_mib"] < 4096
    assert "Call it first in the script" in said
    assert float(peak) < 256
