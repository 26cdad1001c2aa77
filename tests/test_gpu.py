"""What only a GPU can show."""

import time

import pytest
import tensorflow as tf
from models import batch, small_net

from tfopt import hardware, precision, xla
from tfopt.measure import StepTimer

pytestmark = pytest.mark.gpu


def test_the_gpus_are_tensorflows():
    found = hardware.gpus()
    details = [tf.config.experimental.get_device_details(gpu) for gpu in tf.config.list_physical_devices("GPU")]
    assert [gpu.name for gpu in found] == [detail["device_name"] for detail in details]
    assert [gpu.compute_capability for gpu in found] == [detail["compute_capability"] for detail in details]


def test_the_sampler_reads_them():
    with hardware.GpuSampler(interval_seconds=0.2) as sampler:
        deadline = time.monotonic() + 30
        while len(sampler.samples) < 3 and time.monotonic() < deadline:
            tf.linalg.matmul(tf.random.normal((4096, 4096)), tf.random.normal((4096, 4096)))
    last = sampler.samples[-1]
    assert last.uuid == hardware.gpus()[-1].uuid
    assert 0 < last.gpu_memory_used_mib <= last.gpu_memory_total_mib
    assert last.gpu_power_watts > 0


def test_a_step_is_timed_on_a_batch_that_lies_on_the_gpu():
    timer = StepTimer(small_net(), batch(64))
    assert all("GPU" in part.device for part in timer._batch if part.dtype == tf.float32)
    assert timer(10).median_ms > 0


def test_xla_computes_the_same_there():
    with precision.policy("auto"):
        assert xla.decide(small_net(policy=None), batch(64), steps=10).drift < 0.1
