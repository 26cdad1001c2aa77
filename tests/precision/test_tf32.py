import numpy as np
import pytest
import tensorflow as tf

from tfopt import precision

enabled = tf.config.experimental.tensor_float_32_execution_enabled


@pytest.fixture(autouse=True)
def _restored():
    before = enabled()
    yield
    tf.config.experimental.enable_tensor_float_32_execution(before)


def test_on_from_the_start_and_switched():
    assert enabled()
    precision.set_tf32(False)
    assert not enabled()
    precision.set_tf32(True)
    assert enabled()


@pytest.mark.parametrize("before", [True, False])
def test_a_scope_restores_what_was_there(before):
    precision.set_tf32(before)
    with precision.tf32(False):
        with precision.tf32(True):
            assert enabled()
        assert not enabled()
    assert enabled() == before


def test_a_scope_restores_after_an_exception():
    with pytest.raises(RuntimeError), precision.tf32(False):
        raise RuntimeError
    assert enabled()


@pytest.mark.parametrize("received", [1, 0, None, "on", np.bool_(True)])
def test_only_a_bool(received):
    for use in (precision.set_tf32, lambda value: precision.tf32(value).__enter__()):
        with pytest.raises(
            TypeError, match=r"Expected enabled to be True or False\. Received: enabled=.*Pass False where"
        ):
            use(received)
    assert enabled()


@pytest.mark.gpu
def test_tf32_rounds_products_and_float32_does_not():
    """The example of TensorFlow's documentation: 1.0001 has no place in ten bits of mantissa."""
    capability = tf.config.experimental.get_device_details(tf.config.list_physical_devices("GPU")[0])
    if capability.get("compute_capability", (0, 0)) < (8, 0):
        pytest.skip("needs a GPU of compute capability 8.0 or later")
    x, y = tf.fill((1024, 1024), 1.0001), tf.fill((1024, 1024), 1.0)
    with precision.tf32(True):
        rounded = float(tf.linalg.matmul(x, y)[0, 0])
    with precision.tf32(False):
        exact = float(tf.linalg.matmul(x, y)[0, 0])
    assert rounded == 1024.0
    assert exact == pytest.approx(1024.1024, abs=1e-2)
