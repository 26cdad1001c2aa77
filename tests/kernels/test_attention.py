"""Attention for layers of one's own: what it computes, on either path, and what it refuses."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from plain_attention import attend, draw, largest_error, with_gradients

from tfopt.kernels import dot_product_attention

CASES = [
    # query heads, key heads, query length, key length, causal, masked, scale
    (2, 2, 64, 64, True, False, None),
    (4, 2, 64, 64, False, False, 0.5),
    (4, 1, 64, 64, True, False, None),
    (2, 2, 64, 72, False, False, None),
    (2, 1, 64, 64, True, True, None),
]


def operands(query_heads, key_heads, query_length, key_length, dtype):
    shapes = [(query_length, query_heads), (key_length, key_heads), (key_length, key_heads)]
    return [draw(2, *shape, 8, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes)]


@pytest.mark.parametrize(
    ("path", "dtype", "limit"), [("plain", "float32", 1e-5), ("plain", "bfloat16", 0.03), ("flash", "bfloat16", 0.02)]
)
@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients(request, case, path, dtype, limit):
    *sizes, causal, masked, scale = case
    tensors = operands(*sizes, dtype)
    mask = tf.constant(np.random.default_rng(5).random((2, 1, 64, 64)) < 0.9) | tf.eye(64, dtype=tf.bool)
    options = {"causal": causal, "scale": scale, "mask": mask if masked else None}
    if path == "flash":
        cudnn = request.getfixturevalue("cudnn")
        request.getfixturevalue("uncompiled")
    found = with_gradients(dot_product_attention, *tensors, **options)
    if path == "flash":
        assert len(cudnn.calls) == (0 if masked else 2)
    assert largest_error(found, with_gradients(attend, *tensors, **options)) < limit


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


def test_symbols_and_scales_that_are_no_numbers_are_refused():
    query = tf.zeros((2, 4, 2, 8))
    with pytest.raises(TypeError, match=r"Expected scale to be a number. Received: 'half'"):
        dot_product_attention(query, query, query, scale="half")
    symbol = keras.Input((4, 2, 8))
    with pytest.raises(TypeError, match=r"Expected tensors. Received: a symbolic tensor"):
        dot_product_attention(symbol, symbol, symbol)
