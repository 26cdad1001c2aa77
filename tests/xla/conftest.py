import os

import pytest
from watched_functions import levels

from tfopt.internals.graphs import Function
from tfopt.xla import watching


@pytest.fixture
def left_as_found():
    """Each test leaves standard error and TensorFlow's log as they were."""

    def found():
        return os.fstat(2).st_ino, levels(), Function.__call__

    before = found()
    yield
    assert found() == before
    assert watching._COMPILER._watches == 0
