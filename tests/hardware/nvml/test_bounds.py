"""What cannot be true is unknown, and said once; what can be true passes."""

import os
from dataclasses import replace

import pynvml
import pytest
from fake_nvml import GPM, OTHER_PROCESS, READING, FakeGpu, mig_instance, tick

from tfopt.hardware import GpuSampler, gpus
from tfopt.hardware.nvml import driver
from tfopt.hardware.nvml.bounds import BOUNDS
from tfopt.hardware.nvml.gpu_reading import GPU_FIELDS

MIB = 2**20


def test_every_number_has_its_bounds():
    assert BOUNDS.keys() | {"throttle_reasons"} == set(GPU_FIELDS)


@pytest.mark.parametrize(
    ("attribute", "value", "field"),
    [
        ("utilization", 255, "gpu_utilization_percent"),
        ("utilization", 2**32 - 2, "gpu_utilization_percent"),
        ("power_milliwatts", 2**32 - 2, "gpu_power_watts"),
        ("power_milliwatts", 10_001_000, "gpu_power_watts"),
        ("power_limit_milliwatts", 2**32 - 2, "gpu_power_limit_watts"),
        ("power_limit_milliwatts", 0, "gpu_power_limit_watts"),
        ("energy_millijoules", 2**64 - 2, "gpu_energy_joules"),
        ("temperature", 2**32 - 10, "gpu_temperature_celsius"),  # -10 as an unsigned number
        ("temperature", 255, "gpu_temperature_celsius"),
        ("sm_clock", 2**32 - 2, "sm_clock_mhz"),
        ("memory_clock", 2**32 - 2, "memory_clock_mhz"),
        ("pcie_rx", 2**32 - 2, "pcie_rx_mib_per_second"),
        ("pcie_tx", 2**32 - 2, "pcie_tx_mib_per_second"),
        ("memory_used", 143_772 * MIB, "gpu_memory_used_mib"),  # 1 MiB above the total
        ("memory_used", 2**64 - 2, "gpu_memory_used_mib"),
        ("memory_total", 2**64 - 2, "gpu_memory_total_mib"),
        ("processes", [(os.getpid(), 143_772 * MIB), (OTHER_PROCESS, 100 * MIB)], "gpu_memory_process_mib"),
        ("processes", [(os.getpid(), 900 * MIB), (OTHER_PROCESS, 2**64 - 2)], "gpu_memory_others_mib"),
        ("reasons", 2**32 - 2, "throttle_reasons"),
        ("ecc_errors", 2**64 - 2, "gpu_ecc_uncorrected_errors"),
    ],
)
def test_garbage_is_unknown_and_said_once(attribute, value, field, fake_nvml, caplog):
    fake_nvml.gpus += [FakeGpu(uuid=f"GPU-{bus}", bus=bus) for bus in range(3)]
    for gpu in fake_nvml.gpus[:2]:
        setattr(gpu, attribute, value)
    for _ in range(3):
        fake_nvml.now += 1.0
        readings = [driver.door().read(gpu.uuid) for gpu in fake_nvml.gpus]
        assert readings == [replace(READING, **{field: None})] * 2 + [READING]
    assert len(caplog.records) == 2
    for uuid, record in zip(("GPU-0", "GPU-1"), caplog.records, strict=True):
        assert f"Expected {field} of {uuid}: " in record.message


@pytest.mark.parametrize(
    ("attribute", "value", "expected"),
    [
        ("utilization", 0, {"gpu_utilization_percent": 0}),
        ("utilization", 101, {"gpu_utilization_percent": 100}),  # rounded up twice
        ("power_milliwatts", 0, {"gpu_power_watts": 0.0}),
        ("power_milliwatts", 2_700_000, {"gpu_power_watts": 2700.0}),  # a GB200 superchip
        ("temperature", 0, {"gpu_temperature_celsius": 0}),
        ("temperature", 105, {"gpu_temperature_celsius": 105}),
        ("sm_clock", 0, {"sm_clock_mhz": 0}),
        ("memory_clock", 14_001, {"memory_clock_mhz": 14_001}),  # GDDR7
        ("memory_used", 143_771 * MIB, {"gpu_memory_used_mib": 143_771.0}),
        ("memory_total", 0, {"gpu_memory_total_mib": None}),  # the memory is the host's
        ("pcie_rx", 121_000 * 1024, {"pcie_rx_mib_per_second": 121_000.0}),  # 16 lanes of PCIe 6
        ("reasons", 0xFF, {"throttle_reasons": 7}),
        ("ecc_errors", 12, {"gpu_ecc_uncorrected_errors": 12}),
    ],
)
def test_what_can_be_true_passes(attribute, value, expected, gpu, caplog):
    setattr(gpu, attribute, value)
    reading = driver.door().read(gpu.uuid)
    (field,) = expected
    if field == "throttle_reasons":
        assert len(reading.throttle_reasons or ()) == expected[field]
        expected = {field: reading.throttle_reasons}
    assert reading == replace(READING, **expected)
    assert not caplog.records


def test_a_temperature_below_zero_passes_where_the_driver_has_a_sign(gpu, fake_nvml):
    fake_nvml.lacks.add("nvmlDeviceGetTemperature")
    gpu.temperature = -10
    assert driver.door().read(gpu.uuid) == replace(READING, gpu_temperature_celsius=-10)


def test_no_memory_of_its_own_and_none_used_is_unknown(gpu):
    gpu.memory_used = gpu.memory_total = 0
    reading = driver.door().read(gpu.uuid)
    assert reading == replace(READING, gpu_memory_used_mib=None, gpu_memory_total_mib=None)


def test_the_list_of_gpus_has_no_impossible_memory(fake_nvml):
    fake_nvml.gpus += [FakeGpu(uuid="GPU-a", memory_total=2**64 - 2)]
    assert gpus()[0].memory_mib is None
    fake_nvml.gpus[:] = [FakeGpu(instances=[mig_instance("MIG-1", memory_total=2**64 - 2)])]
    assert gpus()[0].memory_mib is None


def test_metrics_beyond_their_bounds_are_said_once(fake_nvml, caplog):
    fake_nvml.gpus.append(FakeGpu(gpm=GPM | {"NVML_GPM_METRIC_SM_UTIL": 4e9}))
    sampler = GpuSampler()
    for _ in range(4):
        fake_nvml.now += 1.0
        (row,) = tick(sampler)
    assert (row.sm_active_percent, row.tensor_active_percent) == (None, 92.0)
    assert [record.message.split()[1] for record in caplog.records] == ["sm_active_percent"]


@pytest.mark.parametrize(
    ("joules", "expected"),
    [
        ([5000, 5500, 6000], [5000, 5500, 6000]),
        ([5000, 5000, 5000], [5000, 5000, 5000]),
        ([5000, 0, 6000, 6500], [5000, None, 6000, 6500]),  # one zero
        ([5000, 4_294_967, 6000, 6500], [5000, None, 6000, 6500]),  # 4 MW for a second
        ([5000, 300, 800, 1300], [5000, None, 800, 1300]),  # began anew
        ([4_294_967, 5000, 5500, 6000], [4_294_967, None, 5500, 6000]),  # the first was wrong
        ([5000, 300, 70, 6000, 6500], [5000, None, None, 6000, 6500]),
        ([5000, None, 5500, 6000], [5000, None, 5500, 6000]),  # not answered
    ],
)
def test_the_energy_counter_goes_on(joules, expected, gpu, fake_nvml, caplog):
    found = []
    for value in joules:
        fake_nvml.now += 1.0
        gpu.energy_millijoules = 2**64 - 1 if value is None else 1000 * value
        found.append(driver.door().read(gpu.uuid).gpu_energy_joules)
    assert found == expected
    assert len(caplog.records) == (None not in joules and None in expected)


def test_the_energy_of_an_hour_between_two_readings_passes(gpu, fake_nvml):
    before = driver.door().read(gpu.uuid).gpu_energy_joules
    fake_nvml.now += 3600.0
    gpu.energy_millijoules += 700_000 * 3600
    after = driver.door().read(gpu.uuid).gpu_energy_joules
    assert after == pytest.approx(before + 2_520_000)


def test_counters_of_a_gpu_that_was_lost_begin_anew(gpu, fake_nvml):
    gpu.ecc_errors = 7
    assert driver.door().read(gpu.uuid).gpu_ecc_uncorrected_errors == 7
    fake_nvml.fail("nvmlDeviceGetPowerUsage", pynvml.NVML_ERROR_RESET_REQUIRED)
    with pytest.raises(driver.NvmlError):
        driver.door().read(gpu.uuid)
    fake_nvml.recover()
    gpu.ecc_errors = 0
    assert driver.door().read(gpu.uuid).gpu_ecc_uncorrected_errors == 0
