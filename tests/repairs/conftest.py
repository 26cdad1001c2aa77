import keras
import pytest


@pytest.fixture
def under():
    """Sets a global dtype policy in the way of stock Keras; the outer conftest restores it."""
    return keras.config.set_dtype_policy
