"""The door to NVML: what it reads, in which units, and what it makes of everything that can go wrong."""

import os
import subprocess
import sys
import threading
from dataclasses import replace

import pynvml
import pytest
from fake_nvml import (
    FIELD_FUNCTIONS,
    OTHER_PROCESS,
    READ_FUNCTIONS,
    READING,
    FakeGpu,
    lost,
    mig_instance,
)

from tfopt.errors import HardwareError
from tfopt.hardware.nvml import driver
from tfopt.hardware.nvml.gpu_reading import GPU_FIELDS, THROTTLE_REASONS, Reading
from tfopt.hardware.nvml.return_codes import NvmlError, explain


def test_all_fields_are_in_the_table_of_fields():
    assert tuple(FIELD_FUNCTIONS) == GPU_FIELDS


@pytest.mark.parametrize("field", FIELD_FUNCTIONS)
def test_an_unsupported_field_is_none_and_the_others_are_read(field, gpu, caplog):
    gpu.unsupported.update(FIELD_FUNCTIONS[field])
    assert driver.door().read(gpu.uuid) == replace(READING, **lost(*FIELD_FUNCTIONS[field]))
    assert not caplog.records


def test_what_an_older_pynvml_lacks_is_none(gpu, fake_nvml):
    fake_nvml.lacks.update(READ_FUNCTIONS)
    assert driver.door().read(gpu.uuid) == Reading()


@pytest.mark.parametrize(
    "code",
    [pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, pynvml.NVML_ERROR_INVALID_ARGUMENT],
)
def test_a_field_that_is_not_there_is_none_without_a_warning(code, gpu, fake_nvml, caplog):
    for name in READ_FUNCTIONS:
        fake_nvml.fail(name, code)
    assert driver.door().read(gpu.uuid) == Reading()
    assert not caplog.records


def test_nvmls_own_no_value_is_none(gpu):
    gpu.utilization = gpu.power_milliwatts = gpu.sm_clock = gpu.memory_clock = gpu.temperature = 2**32 - 1
    gpu.pcie_rx = gpu.pcie_tx = gpu.power_limit_milliwatts = 2**32 - 1
    gpu.memory_used = gpu.memory_total = gpu.energy_millijoules = gpu.reasons = gpu.ecc_errors = 2**64 - 1
    gpu.processes = [(os.getpid(), 2**64 - 1), (OTHER_PROCESS, None)]
    assert driver.door().read(gpu.uuid) == Reading()


def test_the_older_names_of_functions_stand_in_for_the_newer(gpu, fake_nvml):
    gpu.unsupported = {"nvmlDeviceGetTemperature"}
    fake_nvml.lacks.add("nvmlDeviceGetCurrentClocksEventReasons")
    assert driver.door().read(gpu.uuid) == READING


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (0x0, ()),
        (0x1, ()),
        (0x5, ("power_cap",)),
        (0x68, ("hw_slowdown", "thermal", "hw_thermal")),
        (0x1000, ("unknown_0x1000",)),
    ],
)
def test_throttle_reasons_have_names_and_an_idle_gpu_is_not_throttled(mask, expected, gpu):
    gpu.reasons = mask
    assert driver.door().read(gpu.uuid).throttle_reasons == expected


def test_every_throttle_reason_of_pynvml_has_a_name():
    known = {value for name, value in vars(pynvml).items() if name.startswith(("nvmlClocksEventReason", "nvmlClocksT"))}
    bits = {value for value in known if value and value & (value - 1) == 0}
    assert bits <= THROTTLE_REASONS.keys() | {0x1}  # an older pynvml lacks some


def test_a_reading_is_found_by_uuid_wherever_the_gpu_stands(fake_nvml):
    fake_nvml.gpus += [FakeGpu(uuid="GPU-a", utilization=11), FakeGpu(uuid="GPU-b", utilization=22)]
    door = driver.door()
    assert door.read("GPU-b").gpu_utilization_percent == 22
    fake_nvml.gpus.reverse()
    assert door.read("GPU-a").gpu_utilization_percent == 11


def test_mig_instances_are_listed_across_gaps(fake_nvml):
    instances = [None, mig_instance("MIG-1"), None, mig_instance("MIG-3")]
    fake_nvml.gpus += [FakeGpu(instances=instances)]
    (device,) = driver.door().devices()
    assert [instance.uuid for instance in device.instances or ()] == ["MIG-1", "MIG-3"]


def test_every_error_at_the_start_is_explained_in_three_parts(error_codes, fake_nvml):
    for code in error_codes:
        fake_nvml.fail("nvmlInit", code)
        with pytest.raises(HardwareError, match=r"Expected .*\. Found: .*What to do: .*") as caught:
            driver.door().start()
        assert isinstance(caught.value.__cause__, pynvml.NVMLError)
        assert str(code) in str(caught.value)


def test_every_error_of_pynvml_has_its_own_cause():
    names = {name: value for name, value in vars(pynvml).items() if name.startswith("NVML_ERROR_")}
    assert {name: explain(value, "").cause for name, value in names.items()} == {
        name: name.removeprefix("NVML_ERROR_").lower() for name in names
    }


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "NVIDIA_DRIVER_CAPABILITIES"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "modprobe nvidia"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "reboot"),
        (pynvml.NVML_ERROR_NO_PERMISSION, "/dev/nvidia"),
        (pynvml.NVML_ERROR_GPU_IS_LOST, "Xid"),
        (pynvml.NVML_ERROR_UNKNOWN, "dmesg"),
    ],
)
def test_the_fix_is_named(code, remedy, fake_nvml):
    fake_nvml.fail("nvmlInit", code)
    with pytest.raises(NvmlError, match=remedy):
        driver.door().start()


def test_a_missing_module_says_what_to_install(fake_nvml):
    fake_nvml.installed = False
    with pytest.raises(NvmlError, match="pip install nvidia-ml-py"):
        driver.door().start()


def test_a_stranger_called_pynvml_counts_as_missing():
    with pytest.raises(NvmlError, match="pip install nvidia-ml-py"):
        driver.Nvml(load=object).start()


@pytest.mark.parametrize("function", [*READ_FUNCTIONS, "nvmlDeviceGetHandleByUUID"])
def test_every_error_in_a_reading_is_survived(function, error_codes, gpu, fake_nvml, caplog):
    for code in error_codes:
        fake_nvml.fail(function, code)
        for _ in range(2):
            try:
                reading = driver.door().read(gpu.uuid)
            except NvmlError:
                continue
            assert reading == replace(READING, **lost(function)), code
        assert len(caplog.records) <= 1, code
        fake_nvml.recover()
        assert driver.door().read(gpu.uuid) == READING, code


@pytest.mark.parametrize(
    "code",
    [pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED, pynvml.NVML_ERROR_GPU_NOT_FOUND],
)
def test_a_lost_gpu_is_an_error_of_the_whole_reading(code, gpu, fake_nvml):
    fake_nvml.fail("nvmlDeviceGetPowerUsage", code)
    with pytest.raises(NvmlError):
        driver.door().read(gpu.uuid)
    fake_nvml.recover()
    assert driver.door().read(gpu.uuid) == READING
    assert fake_nvml.calls["nvmlDeviceGetHandleByUUID"] == 2  # after a reset the old handle may be no one's


def test_nvml_is_started_once_and_again_after_another_library_ended_it(gpu, fake_nvml):
    door = driver.door()
    for _ in range(3):
        door.read(gpu.uuid)
    assert fake_nvml.calls["nvmlInit"] == 1
    fake_nvml.shut_down()
    with pytest.raises(NvmlError, match="not started"):
        door.read(gpu.uuid)
    assert door.read(gpu.uuid) == READING
    assert fake_nvml.calls["nvmlInit"] == 2


def test_a_gpu_that_does_not_answer_is_left_out_with_a_warning(fake_nvml, caplog):
    fake_nvml.gpus += [FakeGpu(uuid="GPU-a"), FakeGpu(uuid="GPU-b", bus=2)]
    fake_nvml.fail("nvmlDeviceGetUUID", pynvml.NVML_ERROR_GPU_IS_LOST, gpu=fake_nvml.gpus[0])
    for _ in range(2):
        assert [device.uuid for device in driver.door().devices()] == ["GPU-b"]
    assert len(caplog.records) == 1
    assert "fell off the bus" in caplog.text


def test_a_hung_call_frees_its_caller_and_the_next_fail_at_once(gpu, fake_nvml):
    fake_nvml.hang("nvmlInit")
    door = driver.door()
    with pytest.raises(NvmlError, match="hangs"):
        door.call(door.start, deadline_seconds=0.5)
    with pytest.raises(NvmlError, match="hangs"):
        door.call(door.start, deadline_seconds=20.0)  # one that waited would outlast the test's time limit
    assert fake_nvml.calls["nvmlInit"] == 1
    fake_nvml.recover()
    door._worker._overdue.exception(10)
    assert door.call(lambda: door.read(gpu.uuid)) == READING


def test_calls_are_made_in_one_daemon_thread():
    threads = {driver.door().call(threading.current_thread) for _ in range(3)}
    assert [(thread.name, thread.daemon) for thread in threads] == [("tfopt-nvml", True)]


def test_importing_the_package_loads_no_heavy_module():
    code = "import sys, tfopt.hardware; print({'tensorflow', 'keras', 'numpy', 'pynvml'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("error", [SyntaxError("print 1"), FutureWarning("deprecated"), RuntimeError("broken")])
def test_a_module_that_cannot_be_imported_is_none(error):
    def load():
        raise error

    with pytest.raises(NvmlError, match="it cannot be imported") as raised:
        driver.Nvml(load).start()
    assert raised.value.__cause__ is error
