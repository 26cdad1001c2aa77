import gc
import signal
import subprocess
from pathlib import Path

import keras
import pytest
import tensorflow as tf
from by_file import ByFile
from clock import set_clock
from hypothesis import HealthCheck, settings

from tfopt import repairs
from tfopt.distribute import strategies

__all__ = ["set_clock"]
ROOT = Path(__file__).parents[1]

# A job in the background of a shell ignores these, and so would all processes that a test starts and interrupts.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, _handler)


# On a busy machine everything is slow.
settings.register_profile("tfopt", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tfopt")


@pytest.fixture(autouse=True)
def _restored_globals():
    """Each test finds the process as it was: Keras' policy, tfopt's strategy and repairs, handlers of signals."""
    before, made = keras.config.dtype_policy(), [*strategies._made]
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    for repair in repairs.REPAIRS.values():
        if repair.installed:  # asking for the state of all after each test would take 20 ms
            repair.remove()
    keras.config.set_dtype_policy(before)
    strategies._made[:] = made


@pytest.fixture(autouse=True)
def _frozen_garbage():
    """What a test leaves alive is not searched for garbage again; that took a third of all time."""
    yield
    gc.collect()
    gc.freeze()


def pytest_collection_finish():
    gc.collect()
    gc.freeze()


def pytest_addoption(parser):
    parser.addoption(
        "--share", type=int, default=1, metavar="N", help="run one in N of the files, different ones after each commit"
    )


@pytest.hookimpl(trylast=True)  # once -m has chosen
def pytest_collection_modifyitems(config, items):
    chosen = _share(items, config.option.share)
    config.hook.pytest_deselected(items=[item for item in items if item.path not in chosen])
    items[:] = [item for item in items if item.path in chosen]
    if tf.config.list_physical_devices("GPU"):
        marker, reason = "no_gpu", "about a machine without a GPU, and TensorFlow sees one here"
    else:
        marker, reason = "gpu", "needs an NVIDIA GPU, and TensorFlow sees none here"
    for item in items:
        if item.get_closest_marker(marker):
            item.add_marker(pytest.mark.skip(reason=reason))


def _share(items, parts):
    """Returns every so many-th of their files, different ones after each commit."""
    files = sorted({item.path for item in items})
    count = subprocess.run(["git", "rev-list", "--count", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return set(files[int(count.stdout or 0) % parts :: parts])


def pytest_xdist_make_scheduler(config, log):
    return ByFile(config, log)
