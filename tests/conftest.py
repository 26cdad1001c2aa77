import keras
import pytest
import tensorflow as tf

from tfopt import repairs


@pytest.fixture(autouse=True)
def _restored_globals():
    """Each test finds Keras' global state as it was, whatever the one before did to it."""
    before = keras.config.dtype_policy()
    yield
    repairs.remove()
    keras.config.set_dtype_policy(before)


def pytest_collection_modifyitems(config, items):
    if not tf.config.list_physical_devices("GPU"):
        no_gpu = pytest.mark.skip(reason="needs an NVIDIA GPU, and TensorFlow sees none here")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(no_gpu)
    if "slow" not in (config.getoption("-m") or ""):
        skip = pytest.mark.skip(reason="a long campaign: run it with -m slow")
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(skip)
