import pytest
import tensorflow as tf
from fake_cudnn import FakeCudnn

from tfopt.kernels.cudnn import support


@pytest.fixture
def cudnn(monkeypatch):
    """A machine that looks like one with an H200, on which TensorFlow computes what cuDNN would."""
    return FakeCudnn().install(monkeypatch)


@pytest.fixture
def uncompiled(monkeypatch):
    """Takes everything for part of a step under XLA: to compile a model takes seconds, and the fake does without."""
    monkeypatch.setattr(support, "in_xla", lambda: True)


@pytest.fixture
def exact_products():
    """On a GPU, products of float32 would be rounded to TF32, in each shape differently."""
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(False)
    yield
    tf.config.experimental.enable_tensor_float_32_execution(before)
