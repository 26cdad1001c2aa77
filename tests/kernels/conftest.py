import pytest
from fake_cudnn import FakeCudnn

from tfopt.kernels import flash, obstacles


@pytest.fixture
def cudnn(monkeypatch):
    """A machine that looks like one with an H200, on which TensorFlow computes what cuDNN would."""
    fake = FakeCudnn()
    monkeypatch.setattr(obstacles, "compute_capabilities", lambda: [(9, 0)])
    monkeypatch.setattr(obstacles, "device_type", lambda: "GPU")
    monkeypatch.setattr(flash, "call_module", fake)
    return fake


@pytest.fixture
def uncompiled(monkeypatch):
    """Takes everything for part of a step under XLA: to compile a model takes seconds, and the fake does without."""
    monkeypatch.setattr(obstacles, "in_xla", lambda: True)
