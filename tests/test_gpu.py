"""What only a GPU can show."""

import subprocess
import time
from functools import partial

import keras
import pytest
import tensorflow as tf
from models import batch, small_net

from tfopt import hardware, precision, xla
from tfopt.callbacks import UtilizationLogger
from tfopt.hardware.nvml import driver
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


def test_readings_are_those_of_nvidia_smi():
    with hardware.GpuSampler(interval_seconds=0.2) as sampler:
        time.sleep(1)
        query = "--query-gpu=uuid,memory.used,power.draw,enforced.power.limit,temperature.gpu,clocks.sm"
        said = subprocess.check_output(["nvidia-smi", query, "--format=csv,noheader,nounits"], text=True)
        time.sleep(0.5)
    theirs = {uuid: map(float, rest) for uuid, *rest in (line.split(", ") for line in said.splitlines())}
    for gpu in hardware.gpus():
        ours = [sample for sample in sampler.samples if sample.uuid == gpu.uuid and sample.gpu_power_watts is not None]
        power = ("gpu_power_watts", "gpu_power_limit_watts")
        fields = ("gpu_memory_used_mib", *power, "gpu_temperature_celsius", "sm_clock_mhz")
        # What nvidia-smi rounds to, and for what changes by itself a little beyond what was read around it. Of memory
        # nvidia-smi leaves out what the driver keeps for itself, which is not free either.
        for name, found, slack in zip(fields, theirs[gpu.uuid], (1024, 10, 0.01, 1, 15), strict=True):
            values = [getattr(sample, name) for sample in ours]
            assert min(values) - slack <= found <= max(values) + slack, name


def test_energy_is_the_counters():
    counted = []

    def count(*_):
        door = driver.door()
        uuids = [gpu.uuid for gpu in hardware.gpus()]
        counted.append(sum(door.call(partial(door.read, uuid)).gpu_energy_joules for uuid in uuids))

    model, data = small_net(), tf.data.Dataset.from_tensors(batch(4096)).repeat()
    counting = keras.callbacks.LambdaCallback(on_epoch_begin=count, on_epoch_end=count)
    callbacks = [UtilizationLogger(None, 0.1), counting]
    history = model.fit(data, steps_per_epoch=5000, epochs=3, verbose=0, callbacks=callbacks).history
    for epoch, joules in list(enumerate(history["gpu_energy_joules"]))[1:]:  # the first compiles
        assert joules == pytest.approx(counted[2 * epoch + 1] - counted[2 * epoch], rel=0.02)


def test_gpm_tells_of_the_tensor_cores():
    """On Hopper and later."""
    if any(gpu.compute_capability < (9, 0) for gpu in hardware.gpus()):
        pytest.skip("needs a GPU of Hopper's generation or later")
    matrix = tf.random.normal((8192, 8192), dtype=tf.bfloat16)
    product = tf.function(lambda: tf.linalg.matmul(matrix, matrix), jit_compile=True)
    with hardware.GpuSampler(interval_seconds=0.5) as sampler:
        deadline = time.monotonic() + 4
        while time.monotonic() < deadline:
            for _ in range(20):
                last = product()
            _ = last[0, 0].numpy()
    last = sampler.samples[-2]
    assert last.sm_active_percent > 50
    assert last.tensor_active_percent > 30
    assert last.gpu_memory_process_mib is None or last.gpu_memory_process_mib > 100
