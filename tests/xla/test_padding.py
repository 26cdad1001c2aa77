"""The one shape that every batch could be padded to."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfopt.measure import StepTimes
from tfopt.xla import shapes
from tfopt.xla.shapes import BatchShapes, padded


def found(*seen, batches=None):
    return BatchShapes(seen=seen, batches=batches or (1,) * len(seen), complete=True)


def times(off, on):
    return {
        name: StepTimes(repeats_ms=((ms,),), steps_per_sample=1, first_step_seconds=1.0)
        for name, ms in (("off", off), ("on", on))
    }


@pytest.fixture
def timed(monkeypatch):
    """The batches that a step was timed on; each took 4 ms."""
    seen = []

    class Timer:
        def __init__(self, model, data, *, jit_compile):
            assert jit_compile is True
            seen.append(data)

        def __call__(self, steps, *, samples):
            return times(1.0, 4.0)["on"]

    monkeypatch.setattr(shapes, "StepTimer", Timer)
    return seen


def batch(length, examples=4):
    return np.ones((examples, length), "float32"), np.ones(examples, "int32")


def tensors(*parts):
    return tuple(map(tf.constant, parts))


def test_the_largest_in_each_dimension_in_eights(timed):
    shapes = found(((4, 5), (4,)), ((4, 17), (4,)), ((4, 9), (4,)))
    pad = padded(keras.Sequential(), tensors(*batch(9)), shapes, times(10.0, 5.0), compile_seconds=1.5, steps=5)
    ((x, y),) = timed
    assert pad.shape == ((4, 24), (4,)) == (tuple(x.shape), tuple(y.shape))
    assert (x.numpy() == np.pad(batch(9)[0], [(0, 0), (0, 15)])).all()
    assert (pad.step_ms, pad.measured) == (4.0, True)
    # The mean batch has (4·5 + 4·17 + 4·9) / 3 + 4 = 45.3 numbers, the measured one 40.
    assert pad.saved_ms == pytest.approx(10.0 * 45.333333 / 40 - 4.0)
    assert pad.break_even_steps == 205
    assert str(pad) == "Padded to one shape, (4, 24), (4,), XLA would pay after 205 steps (4 ms a step, measured)"


def test_a_batch_size_is_not_rounded_and_the_measured_shape_not_measured_again(timed):
    shapes = found(((5, 7), (5,)), ((2, 7), (2,)), batches=(9, 1))
    pad = padded(keras.Sequential(), tensors(*batch(7, 5)), shapes, times(10.0, 5.0), compile_seconds=1.0, steps=5)
    assert timed == []
    assert (pad.shape, pad.step_ms, pad.measured) == (((5, 7), (5,)), 5.0, True)


def test_where_padding_saves_nothing(timed):
    shapes = found(((4, 1), (4,)), ((4, 800), (4,)), batches=(99, 1))
    pad = padded(keras.Sequential(), tensors(*batch(8)), shapes, times(3.0, 2.0), compile_seconds=1.0, steps=5)
    assert pad.saved_ms < 0
    assert pad.break_even_steps is None
    assert "XLA would not pay either" in str(pad)


@pytest.mark.parametrize("error", [ValueError("no"), tf.errors.InvalidArgumentError(None, None, "no")])
def test_where_zeros_are_no_input_it_is_estimated(monkeypatch, error):
    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr(shapes, "StepTimer", fail)
    seen = found(((4, 4), (4,)), ((4, 12), (4,)))
    pad = padded(keras.Sequential(), tensors(*batch(4)), seen, times(10.0, 5.0), compile_seconds=1.0, steps=5)
    assert not pad.measured
    assert pad.step_ms == 5.0 * 68 / 20
    assert str(pad).endswith("(17 ms a step, estimated)")


def test_what_has_no_one_shape():
    ranks = found(((4, 4), (4,)), ((4,), (4,)))
    assert padded(None, tensors(*batch(4)), ranks, times(2.0, 1.0), compile_seconds=1.0, steps=5) is None
    rows = tf.ragged.constant([[1.0], [2.0, 3.0]])
    shapes = found(((3,), (3,)), ((4,), (3,)))
    assert padded(None, (rows,), shapes, times(2.0, 1.0), compile_seconds=1.0, steps=5) is None
