import gc
import signal

import keras
import pytest
import tensorflow as tf
from by_file import ByFile

from tfopt import repairs

# A job in the background of a shell ignores these, and so would all processes that a test starts and interrupts.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, _handler)


@pytest.fixture(autouse=True)
def _restored_globals():
    """Each test finds Keras' global state as it was, whatever the one before did to it."""
    before = keras.config.dtype_policy()
    yield
    for repair in sorted(repairs.REPAIRS.values(), key=lambda repair: repair.turn, reverse=True):
        if repair.installed:  # asking for the state of all after each test would take 20 ms
            repair.remove()
    keras.config.set_dtype_policy(before)


@pytest.fixture(autouse=True, scope="module")
def _frozen_garbage():
    """What a file leaves alive is not searched for garbage again, which took longer with each file."""
    yield
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config, items):
    if tf.config.list_physical_devices("GPU"):
        marker, reason = "no_gpu", "about a machine without a GPU, and TensorFlow sees one here"
    else:
        marker, reason = "gpu", "needs an NVIDIA GPU, and TensorFlow sees none here"
    for item in items:
        if item.get_closest_marker(marker):
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_xdist_make_scheduler(config, log):
    return ByFile(config, log)
