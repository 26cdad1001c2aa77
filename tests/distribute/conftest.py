import os

import pytest


@pytest.fixture(autouse=True, scope="module")
def _children_on_cpus():
    """The processes that a test starts see no GPU of this machine: devices of the CPU stand in for several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "-1")
        yield


@pytest.fixture(autouse=True)
def _restored_environment():
    """What a strategy tells its own process and those that it starts ends with the test."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
