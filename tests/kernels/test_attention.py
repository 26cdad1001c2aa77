"""Attention for layers of one's own: what it computes, on either path, and what it refuses."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from plain_attention import attend, draw, largest_error, rounding, with_gradients

from tfopt.kernels import dot_product_attention
from tfopt.precision import tf32

CASES = [
    # query heads, key heads, query length, key length, causal, masked, scale
    (2, 2, 64, 64, True, False, None),
    (4, 2, 64, 64, False, False, 0.5),
    (4, 1, 64, 64, True, False, None),
    (2, 2, 64, 72, False, False, None),
    (2, 1, 64, 64, True, True, None),
    (4, 2, 64, 72, True, False, None),
]


def operands(query_heads, key_heads, query_length, key_length, dtype):
    shapes = [(query_length, query_heads), (key_length, key_heads), (key_length, key_heads)]
    return [draw(2, *shape, 8, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes)]


@pytest.mark.parametrize(("path", "dtype"), [("plain", "float32"), ("plain", "bfloat16"), ("flash", "bfloat16")])
@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients(request, case, path, dtype):
    *sizes, causal, masked, scale = case
    tensors = operands(*sizes, dtype)
    mask = tf.constant(np.random.default_rng(5).random((2, 1, 64, 64)) < 0.9) | tf.eye(64, dtype=tf.bool)
    options = {"causal": causal, "scale": scale, "mask": mask if masked else None}
    if path == "flash":
        cudnn = request.getfixturevalue("cudnn")
        request.getfixturevalue("uncompiled")
    with tf32(False):
        found = with_gradients(tf.function(dot_product_attention), *tensors, **options)
    if path == "flash":
        assert len(cudnn.calls) == 2
    # Three sums follow one another, each over at most the longest key: scores, output, gradient.
    assert largest_error(found, with_gradients(attend, *tensors, **options)) < 3 * rounding(dtype, 72)


def test_it_is_keras_bit_for_bit_where_cudnn_is_not():
    query, key, value = operands(2, 2, 64, 64, "bfloat16")
    ours = dot_product_attention(query, key, value, causal=True)
    keras_own = keras.ops.dot_product_attention(query, key, value, is_causal=True)
    assert ours.numpy().tobytes() == keras_own.numpy().tobytes()


def test_arrays_and_unknown_batches_are_taken():
    arrays = [tensor.numpy() for tensor in operands(2, 1, 4, 4, "float32")]
    spec = tf.TensorSpec((None, None, None, 8))
    traced = tf.function(dot_product_attention, input_signature=[spec] * 3)
    query, key, value = operands(2, 2, 4, 4, "float32")
    np.testing.assert_allclose(traced(query, key, value), attend(query, key, value), atol=1e-5)
    assert dot_product_attention(*arrays).shape == (2, 4, 2, 8)


@pytest.mark.parametrize(
    ("query", "key", "value"),
    [
        ((2, 4, 8), (2, 4, 8), (2, 4, 8)),  # no heads
        ((2, 4, 3, 8), (2, 4, 2, 8), (2, 4, 2, 8)),  # 3 heads on 2
        ((2, 4, 2, 8), (2, 4, 4, 8), (2, 4, 4, 8)),  # 2 heads on 4
        ((2, 4, 2, 8), (3, 4, 2, 8), (3, 4, 2, 8)),  # another batch
        ((2, 4, 2, 8), (2, 4, 2, 6), (2, 4, 2, 8)),  # another size
        ((2, 4, 2, 8), (2, 4, 2, 8), (2, 5, 2, 8)),  # more values than keys
    ],
)
def test_shapes_that_do_not_fit_are_named(query, key, value):
    with pytest.raises(ValueError, match=r"Expected query, key and value of shape .* Received: \(2, 4") as error:
        dot_product_attention(tf.zeros(query), tf.zeros(key), tf.zeros(value))
    assert str(error.value).endswith("Transpose them if the heads come before the length.")


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"scale": "half"}, TypeError, r"Expected scale to be a number. Received: 'half'"),
        ({"scale": True}, TypeError, r"Expected scale to be a number. Received: True"),
        ({"scale": float("nan")}, ValueError, r"Expected scale to be a finite number. Received: nan. Omit it"),
        ({"causal": "no"}, TypeError, r"Expected causal to be a bool. Received: 'no'. Pass a tensor as mask"),
        ({"causal": tf.constant(True)}, TypeError, r"Expected causal to be a bool"),
        ({"mask": tf.ones((4, 4))}, TypeError, r"Expected a boolean mask.* Received: one of float32. Convert it"),
        (
            {"mask": tf.ones((2, 1, 4, 3), tf.bool)},
            ValueError,
            r"here \(2, 2, 4, 4\). Received: one of shape \(2, 1, 4, 3\)",
        ),
        ({"mask": tf.ones((3, 4, 4), tf.bool)}, ValueError, r"Received: one of shape \(3, 4, 4\). .*mask\[:, None\]"),
        ({"mask": tf.ones((5, 2, 1, 4, 4), tf.bool)}, ValueError, r"Expected a mask that broadcasts"),
    ],
)
def test_options_that_do_not_fit_are_named(options, error, text):
    query = tf.zeros((2, 4, 2, 8))
    with pytest.raises(error, match=text):
        dot_product_attention(query, query, query, **options)


@pytest.mark.parametrize("shape", [(4, 4), (1, 1, 4, 4), (2, 1, 1, 4), (2, 2, 4, 4)])
def test_a_mask_broadcasts(shape):
    query, key, value = operands(2, 2, 4, 4, "float32")
    mask = np.random.default_rng(0).random(shape) > 0.3
    found = dot_product_attention(query, key, value, mask=mask.tolist())
    np.testing.assert_allclose(found, attend(query, key, value, mask=mask), atol=1e-5)


def test_numbers_that_are_no_floats_are_refused():
    """Keras computes a softmax of whole numbers, and gives whole numbers."""
    query = tf.ones((2, 4, 2, 8), tf.int32)
    assert keras.ops.dot_product_attention(query, query, query).dtype == tf.int32
    with pytest.raises(TypeError, match=r"Expected query, key and value to hold floats. Received: int32, .*Cast them"):
        dot_product_attention(query, query, query)


def test_symbols_are_refused():
    query = tf.zeros((2, 4, 2, 8))
    with pytest.raises(TypeError, match=r"Expected tensors. Received: a symbolic tensor"):
        dot_product_attention(query, query, query, mask=keras.Input((1, 4, 4), dtype="bool"))
    symbol = keras.Input((4, 2, 8))
    with pytest.raises(TypeError, match=r"Expected tensors. Received: a symbolic tensor"):
        dot_product_attention(symbol, symbol, symbol)
