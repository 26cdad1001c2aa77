"""Xids, the driver's numbers for errors: each GPU's own, the last one, also of a GPU that is lost."""

from dataclasses import replace

import pynvml
import pytest
from fake_nvml import READING, FakeGpu, mig_instance, tick

from tfopt.hardware import GpuSampler
from tfopt.hardware.nvml import driver


def xids(fake):
    return [driver.door().read(gpu.uuid).gpu_xid for gpu in fake.gpus]


def test_each_gpu_has_its_last_xid(fake_nvml):
    fake_nvml.gpus += [FakeGpu(uuid=f"GPU-{bus}", bus=bus) for bus in range(8)]
    assert xids(fake_nvml) == [None] * 8
    fake_nvml.tell(fake_nvml.gpus[3], 31)
    fake_nvml.tell(fake_nvml.gpus[5], 13)
    fake_nvml.tell(fake_nvml.gpus[5], 43)
    for _ in range(2):
        assert xids(fake_nvml) == [None, None, None, 31, None, 43, None, None]
    fake_nvml.tell(fake_nvml.gpus[3], 94)
    assert xids(fake_nvml)[3] == 94
    assert len(fake_nvml.event_sets) == 8


def test_other_events_and_impossible_numbers_are_no_xids(gpu, fake_nvml):
    driver.door().read(gpu.uuid)
    fake_nvml.tell(gpu, 7, kind=pynvml.nvmlEventTypeClock)
    assert xids(fake_nvml) == [None]
    fake_nvml.tell(gpu, 2**64 - 2)
    assert xids(fake_nvml) == [None]


def test_a_storm_of_xids_ends_the_reading(gpu, fake_nvml):
    driver.door().read(gpu.uuid)
    for _ in range(1000):
        fake_nvml.tell(gpu, 74)
    assert xids(fake_nvml) == [74]
    assert fake_nvml.calls["nvmlEventSetWait_v2"] < 200


def test_a_device_without_events_has_none(fake_nvml, caplog):
    fake_nvml.gpus += [FakeGpu(event_types=0), FakeGpu(uuid="GPU-b", instances=[mig_instance("MIG-1")])]
    for uuid in (fake_nvml.gpus[0].uuid, "MIG-1"):
        assert driver.door().read(uuid).gpu_xid is None
    assert not caplog.records
    assert not fake_nvml.event_sets


def test_a_lost_gpu_keeps_its_xid(fake_nvml, caplog):
    fake_nvml.gpus += [FakeGpu(uuid="GPU-a", bus=1), FakeGpu(uuid="GPU-b", bus=2)]
    sampler = GpuSampler()
    tick(sampler)
    fake_nvml.tell(fake_nvml.gpus[0], 95)
    fake_nvml.fail("nvmlDeviceGetUtilizationRates", pynvml.NVML_ERROR_GPU_IS_LOST, gpu=fake_nvml.gpus[0])
    for _ in range(2):
        lost, other = tick(sampler)
        assert (lost.gpu_power_watts, lost.gpu_xid) == (None, 95)
        assert (other.gpu_power_watts, other.gpu_xid) == (686.5, None)
    assert len(caplog.records) == 1
    assert "last Xid was 95" in caplog.text
    fake_nvml.recover()
    lost, _ = tick(sampler)
    assert (lost.gpu_power_watts, lost.gpu_xid) == (686.5, 95)
    fake_nvml.tell(fake_nvml.gpus[0], 45)
    assert tick(sampler)[0].gpu_xid == 45
    assert len(fake_nvml.event_sets) == 2  # the others were freed


def test_a_restart_of_nvml_registers_again(gpu, fake_nvml):
    driver.door().read(gpu.uuid)
    fake_nvml.shut_down()
    with pytest.raises(driver.NvmlError, match="not started"):
        driver.door().read(gpu.uuid)
    assert driver.door().read(gpu.uuid) == READING
    fake_nvml.tell(gpu, 31)
    assert driver.door().read(gpu.uuid) == replace(READING, gpu_xid=31)


def test_the_real_pynvml_passes_xid_ecc_and_power_limit_on(monkeypatch):
    """Through its own code and structures; only the C library is played."""
    waiting, freed = [], []

    def answer(value):
        def fill(*arguments):
            arguments[-1]._obj.value = value
            return 0

        return fill

    def wait(events, data, milliseconds):
        if not waiting:
            return int(pynvml.NVML_ERROR_TIMEOUT)
        data._obj.eventType, data._obj.eventData = pynvml.nvmlEventTypeXidCriticalError, waiting.pop(0)
        return 0

    def free(events):
        freed.append(events)
        return 0

    known = {
        "nvmlDeviceGetHandleByUUID": lambda uuid, handle: 0,
        "nvmlDeviceGetEnforcedPowerLimit": answer(450_000),
        "nvmlDeviceGetTotalEccErrors": answer(3),
        "nvmlDeviceGetSupportedEventTypes": answer(pynvml.nvmlEventTypeAll),
        "nvmlEventSetCreate": lambda events: 0,
        "nvmlDeviceRegisterEvents": lambda handle, types, events: 0,
        "nvmlEventSetWait_v2": wait,
        "nvmlEventSetFree": free,
    }
    unsupported = lambda *arguments: int(pynvml.NVML_ERROR_NOT_SUPPORTED)  # noqa: E731
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer", lambda name: known.get(name, unsupported))
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    door = driver.Nvml()
    first = door.read("GPU-a")
    assert (first.gpu_power_limit_watts, first.gpu_ecc_uncorrected_errors, first.gpu_xid) == (450.0, 3, None)
    waiting += [13, 31]
    assert [door.read("GPU-a").gpu_xid for _ in range(2)] == [31, 31]
    known["nvmlDeviceGetTotalEccErrors"] = lambda *arguments: int(pynvml.NVML_ERROR_GPU_IS_LOST)
    with pytest.raises(driver.NvmlError):
        door.read("GPU-a")
    assert len(freed) == 1
