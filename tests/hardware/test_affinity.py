"""cpu_affinity(): NVML's numbers as a set of CPUs."""

import pynvml
import pytest
from fake_nvml import FakeGpu, FakeNvml, mig_instance

from tfopt.hardware import gpus
from tfopt.hardware.affinity import cpu_affinity


def test_the_cpus_near_a_gpu(gpu: FakeGpu) -> None:
    gpu.cpus = {0, 5, 63, 64, 130, 8191}
    assert cpu_affinity(gpus()[0]) == {0, 5, 63, 64, 130, 8191}


def test_a_mig_instance_has_those_of_its_gpu(fake_nvml: FakeNvml) -> None:
    instance = mig_instance("MIG-1")
    fake_nvml.gpus += [FakeGpu("GPU-0", cpus={0}), FakeGpu("GPU-1", bus=2, cpus={3, 4}, instances=[instance])]
    (found,) = gpus()
    assert found.uuid == "MIG-1"
    assert cpu_affinity(found) == {3, 4}


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_UNKNOWN])
def test_a_driver_that_does_not_say(gpu: FakeGpu, code: int) -> None:
    gpu.errors["nvmlDeviceGetCpuAffinity"] = code
    assert cpu_affinity(gpus()[0]) is None


def test_no_cpu_at_all_is_no_answer(gpu: FakeGpu) -> None:
    assert cpu_affinity(gpus()[0]) is None


def test_a_gpu_that_is_gone_warns(gpu: FakeGpu, fake_nvml: FakeNvml, caplog: pytest.LogCaptureFixture) -> None:
    (found,) = gpus()
    fake_nvml.gpus.clear()
    assert cpu_affinity(found) is None
    assert found.uuid in caplog.text
