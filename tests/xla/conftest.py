import os

import pytest
from tensorflow.python.eager.polymorphic_function import polymorphic_function
from watched_functions import levels

from tfopt.xla import watching


@pytest.fixture
def left_as_found():
    """Each test leaves standard error and TensorFlow's log as they were."""

    def found():
        return os.fstat(2).st_ino, levels(), polymorphic_function.Function.__call__

    before = found()
    yield
    assert found() == before
    assert watching._COMPILER._watches == 0
