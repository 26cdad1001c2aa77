import functools

import pytest
import tensorflow as tf

from tfopt.fit import overlapping, undo
from tfopt.fit.overlapping import PATCH
from tfopt.internals.sources import find
from tfopt.internals.training import pythonify_logs


@pytest.fixture
def conversions(monkeypatch):
    """Counts how often logs with tensors in them are made numbers, by Keras and by tfopt alike."""
    counted, stock = [], pythonify_logs

    @functools.wraps(stock)  # overlap looks at the source of what it knows
    def convert(logs):
        counted.extend([logs] if any(tf.is_tensor(value) for value in (logs or {}).values()) else [])
        return stock(logs)

    if not hasattr(find("keras.src.backend.tensorflow.trainer:TensorFlowTrainer")[0], "pythonify_logs"):
        pytest.skip("about Keras 3.14 and later, which converts logs elsewhere")
    for module in ("keras.src.utils.python_utils", "keras.src.backend.tensorflow.trainer", "tfopt.fit.logs"):
        monkeypatch.setattr(f"{module}.pythonify_logs", convert)
    return lambda: len(counted)


@pytest.fixture(scope="module", autouse=True)
def _nothing_left():
    """Gives Keras its own functions back."""
    yield
    for model in list(overlapping._overlapped):
        undo(model)
    PATCH.remove()  # a model that was collected has left it there
