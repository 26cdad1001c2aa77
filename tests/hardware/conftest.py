"""Every test here sees a fake NVML, so that none depends on the machine's driver."""

import pytest
from fake_nvml import FakeGpu, error_codes, fake_nvml

__all__ = ["error_codes", "fake_nvml"]


@pytest.fixture(autouse=True)
def _no_real_driver(fake_nvml):
    pass


@pytest.fixture
def gpu(fake_nvml):
    """The one GPU of the machine."""
    fake_nvml.gpus.append(FakeGpu())
    return fake_nvml.gpus[0]
