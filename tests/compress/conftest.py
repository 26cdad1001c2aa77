import sys
from pathlib import Path
from unittest.mock import MagicMock

import keras
import pytest
import tensorflow as tf
from taking import taking

from tfopt.compress import costing, suggesting
from tfopt.compress.versions import footprint
from tfopt.internals.graphs import FuncGraph

# For the models of flops_by_xla.py.
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))


@pytest.fixture
def steps_take(monkeypatch):
    """Lets a step take some milliseconds, and compute no products."""

    def steps_take(ms):
        step = MagicMock(return_value=taking(ms), graph=FuncGraph("none"))
        monkeypatch.setattr(costing, "StepTimer", lambda *_: step)

    return steps_take


@pytest.fixture
def quick(monkeypatch, steps_take):
    """Layers take 2 ms forward and 2 ms with the backward pass, a step 30 ms; 1 TFLOP/s and 1 GiB/s."""
    for module in (costing, suggesting):
        monkeypatch.setattr(module, "BlockTimer", lambda step: lambda: taking(2.0))
    steps_take(30.0)
    monkeypatch.setattr(costing, "matmul_tflops", lambda dtype: 1.0)
    monkeypatch.setattr(costing, "copy_gib_per_second", lambda: 1.0)


@pytest.fixture
def untimed(monkeypatch):
    """Of two models, the first takes 2 ms and the second 1 ms."""
    monkeypatch.setattr(footprint, "_paced", lambda timer: None)
    times = {f"{kind} {place}": taking(2.0 - place, turns=3) for kind in ("step", "forward") for place in (0, 1)}
    monkeypatch.setattr(footprint, "interleave", lambda timers: times)


@pytest.fixture(scope="session")
def compiled():
    """Compiles a model with the mean of its outputs as its loss."""

    def compiled(model, **options):
        model.compile("sgd", lambda _, output: keras.ops.mean(keras.ops.cast(output, "float32")), **options)
        return model

    return compiled


@pytest.fixture(scope="session")
def batch():
    """Makes a batch of three examples of zeros."""

    def batch(*shapes, dtype="float32"):
        inputs = tuple(tf.zeros((3, *shape), dtype) for shape in shapes)
        return (inputs if inputs[1:] else inputs[0]), tf.zeros(3)

    return batch
