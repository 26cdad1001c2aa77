import math

import numpy as np
import pytest
import tensorflow as tf

from tfopt.precision.gate.moments import moments, not_finite, worst_deviation


def deviation(*pairs):
    """Of tensors that belong together."""
    return worst_deviation([np.stack([moments(np.float32(a), b).numpy() for a, b in pairs])])


def test_figures_by_hand():
    found = deviation(([3.0, 4.0, 0.0], tf.constant([3.0, 2.0, 1.0], tf.float16)))
    assert found.error == pytest.approx(math.sqrt(5) / 5)
    assert found.difference == pytest.approx(math.sqrt(5))
    assert (found.overflow, found.underflow, found.lost, found.largest, found.norm) == (0, 0, 0, 4, 5)


def test_a_tensor_shrinks_or_grows():
    assert deviation(([3.0, 4.0], [0.0, 2.5])).shrunk == pytest.approx(0.5)
    assert deviation(([3.0], [0.0]), ([4.0], [2.5])).shrunk == pytest.approx(0.5)
    assert deviation(([3.0, 4.0], [-6.0, 8.0])).shrunk == 0


def test_overflow_and_underflow_are_counted_where_float32_has_numbers():
    reference = [1e5, 3.0, 4e-9, 0.0, np.inf]
    found = deviation((reference, tf.cast(reference, tf.float16)))
    assert found.overflow == pytest.approx(1 / 4)
    assert found.underflow == pytest.approx(1 / 3)
    assert found.lost == pytest.approx(4e-14)
    assert found.largest == np.float32(1e5)
    assert found.error == pytest.approx(4e-14)  # what overflowed is not in it


def test_lost_weighs_what_vanished():
    found = deviation(([3.0, 4.0] + [1e-3] * 98, [3.0, 0.0] + [0.0] * 98))
    assert found.underflow == 0.99
    assert found.lost == pytest.approx(0.8, rel=1e-4)


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_squares_of_large_and_tiny_values_stay_in_range(size):
    found = deviation(([3 * size, 4 * size], [3 * size, 2 * size]))
    assert found.error == pytest.approx(0.4)
    assert found.norm == pytest.approx(5 * size)


def test_tensors_together_count_as_one():
    apart = deviation(([3.0], [3.0]), ([4.0], [2.0]))
    assert apart.error == pytest.approx(0.4)
    assert apart.norm == pytest.approx(5)


def test_the_worst_batch_counts():
    batches = [np.stack([moments([1.0], [value]).numpy()]) for value in (1.0, 1.5, 1.25)]
    assert worst_deviation(batches).error == pytest.approx(0.5)


def test_nothing_to_divide_by():
    assert deviation(([0.0], [0.0])).error == 0
    assert deviation(([0.0], [1.0])).error == math.inf
    assert deviation(([0.0], [1.0])).to_dict()["error"] is None
    assert deviation((np.zeros([0]), np.zeros([0]))).largest == 0
    assert worst_deviation([np.zeros([0, 11], "float32")]).overflow == 0


def test_not_finite_is_float32s_own():
    assert not_finite(np.stack([moments([np.nan, 1.0], [1.0, 1.0]).numpy()]))
    assert not not_finite(np.stack([moments([1.0, 1.0], [np.nan, 1.0]).numpy()]))
