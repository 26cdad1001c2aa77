"""Devices that answer only in part: each gives exactly these readings, and nothing that it does not know is 0."""

from dataclasses import replace

import pytest
from fake_nvml import READING, FakeNvml, tick
from nvml_devices import DEVICES, machine

from tfopt.hardware import GpuSampler, gpus
from tfopt.hardware.nvml import driver
from tfopt.hardware.nvml.gpu_reading import GPU_FIELDS, Reading

FIRST = {
    "mig": Reading(
        gpu_memory_used_mib=1024.0,
        gpu_memory_total_mib=143_771.0,
        gpu_memory_process_mib=900.0,
        gpu_memory_others_mib=100.0,
    ),
    "wsl": replace(
        READING,
        gpu_utilization_percent=None,
        gpu_power_limit_watts=None,
        gpu_energy_joules=None,
        gpu_ecc_uncorrected_errors=None,
        gpu_memory_process_mib=None,
        gpu_memory_others_mib=None,
    ),
    "gb10": replace(
        READING,
        gpu_memory_used_mib=None,
        gpu_memory_total_mib=None,
        gpu_power_limit_watts=None,
        gpu_ecc_uncorrected_errors=None,
        memory_clock_mhz=None,
        pcie_rx_mib_per_second=None,
        pcie_tx_mib_per_second=None,
    ),
    "ampere": READING,
    "old_driver": replace(READING, gpu_memory_process_mib=None, gpu_memory_others_mib=None),
}

LATER = FIRST | {
    "mig": replace(
        FIRST["mig"],
        sm_active_percent=95.0,
        sm_occupancy_percent=14.0,
        tensor_active_percent=92.0,
        dram_active_percent=16.0,
        pcie_rx_mib_per_second=None,
        pcie_tx_mib_per_second=None,
        nvlink_rx_mib_per_second=None,
        nvlink_tx_mib_per_second=None,
    )
}


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, fake_nvml: FakeNvml) -> tuple[str, str]:
    """The device's name here and its UUID."""
    fake_nvml.gpus, uuid = machine(request.param)
    for gpu in fake_nvml.gpus[0].instances or ():
        if gpu is not None:  # links belong to the whole GPU
            gpu.gpm_failed = {name for name in gpu.gpm or () if "PER_SEC" in name}
    return request.param, uuid


def test_readings_are_exact_and_silent(
    device: tuple[str, str], fake_nvml: FakeNvml, caplog: pytest.LogCaptureFixture
) -> None:
    name, uuid = device
    assert driver.door().read(uuid) == FIRST[name]
    fake_nvml.now += 1.0
    assert driver.door().read(uuid) == LATER[name]
    assert not caplog.records


def test_the_device_is_found_and_sampled(device: tuple[str, str], caplog: pytest.LogCaptureFixture) -> None:
    name, uuid = device
    (found,) = gpus()
    assert (found.uuid, found.mig) == (uuid, name == "mig")
    assert found.memory_mib == (None if name == "gb10" else 143_771)
    (row,) = tick(GpuSampler())
    assert Reading(**{field: getattr(row, field) for field in GPU_FIELDS}) == FIRST[name]
    assert not caplog.records
