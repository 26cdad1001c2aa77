"""mig_instances(): all of the machine's, unlike gpus()."""

import pynvml
import pytest
from fake_nvml import FakeGpu, FakeNvml, mig_instance

from tfopt.hardware import gpus
from tfopt.hardware.mig import mig_instances


def test_the_instances_of_all_gpus(fake_nvml: FakeNvml) -> None:
    fake_nvml.gpus += [
        FakeGpu("GPU-b", bus=2, instances=[mig_instance("MIG-b1")]),
        FakeGpu("GPU-a", bus=1, instances=[mig_instance("MIG-a1"), None, mig_instance("MIG-a2")]),
        FakeGpu("GPU-c", bus=3),
    ]
    assert mig_instances() == ("MIG-a1", "MIG-a2", "MIG-b1")
    assert len(gpus()) == 1


def test_no_instance(gpu: FakeGpu) -> None:
    assert mig_instances() == ()


def test_no_driver_is_no_fault(fake_nvml: FakeNvml, caplog: pytest.LogCaptureFixture) -> None:
    fake_nvml.fail("nvmlInit", pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    assert mig_instances() == ()
    assert not caplog.text


def test_a_driver_in_trouble_warns(fake_nvml: FakeNvml, caplog: pytest.LogCaptureFixture) -> None:
    fake_nvml.fail("nvmlInit", pynvml.NVML_ERROR_UNKNOWN)
    assert mig_instances() == ()
    assert "What to do" in caplog.text
