"""Devices that answer only in part: each gives exactly these readings, and nothing that it does not know is 0."""

from dataclasses import replace

import pytest
from fake_nvml import READING, lost, tick
from nvml_devices import ANSWERS, CLOCKS, DEVICES, machine, ok

from tfopt.hardware import GpuSampler, gpus
from tfopt.hardware.nvml import driver
from tfopt.hardware.nvml.gpu_reading import GPU_FIELDS, Reading

METRICS = {
    "sm_active_percent": 95.0,
    "sm_occupancy_percent": 14.0,
    "tensor_active_percent": 92.0,
    "dram_active_percent": 16.0,
}


def expected(name):
    """What a FakeGpu says, but for the fields that the device does not give."""
    column = DEVICES.index(name)
    unanswered = [function for function, row in ANSWERS.items() if row[column] != ok]
    clocks = {"NVML_CLOCK_SM": "sm_clock_mhz", "NVML_CLOCK_MEM": "memory_clock_mhz"}
    stopped = {clocks[clock]: None for clock, row in CLOCKS.items() if row[column] != ok}
    return replace(READING, **lost(*unanswered), **stopped)


@pytest.fixture(params=DEVICES)
def device(request, fake_nvml):
    """The device's name here and its UUID."""
    fake_nvml.gpus, uuid = machine(request.param)
    for gpu in fake_nvml.gpus[0].instances or ():
        if gpu is not None:  # links belong to the whole GPU
            gpu.gpm_failed = {name for name in gpu.gpm or () if "PER_SEC" in name}
    return request.param, uuid


def test_readings_are_exact_and_silent(device, fake_nvml, caplog):
    name, uuid = device
    assert driver.door().read(uuid) == expected(name)
    fake_nvml.now += 1.0
    assert driver.door().read(uuid) == replace(expected(name), **METRICS if name == "mig" else {})
    assert not caplog.records


def test_the_device_is_found_and_sampled(device, caplog):
    name, uuid = device
    (found,) = gpus()
    assert (found.uuid, found.mig) == (uuid, name == "mig")
    assert found.memory_mib == (None if name == "gb10" else 143_771)
    (row,) = tick(GpuSampler())
    assert Reading(**{field: getattr(row, field) for field in GPU_FIELDS}) == expected(name)
    assert not caplog.records
