"""Rows of several documents: each computes as it does alone."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from plain_attention import LENGTH, draw, largest_error

from tfopt.kernels import explain, segment_mask, use_flash_attention


def segments_of(*lengths):
    row = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    return np.pad(row, (0, LENGTH - len(row)))


SEGMENTS = np.stack([segments_of(10, 30, 24), segments_of(64), segments_of(7, 1, 9)]).astype(np.int32)


@pytest.mark.parametrize("causal", [False, True])
def test_the_mask(causal):
    found = np.asarray(segment_mask(SEGMENTS, causal=causal))
    for row, mask in zip(SEGMENTS, found, strict=True):
        for query in range(LENGTH):
            for key in range(LENGTH):
                attends = row[query] == row[key] > 0 and (key <= query or not causal)
                assert mask[query, key] == attends


@pytest.mark.parametrize("causal", [False, True])
def test_rows_of_unknown_length(causal):
    expected = np.asarray(segment_mask(SEGMENTS, causal=causal))
    inputs = keras.Input((None,), dtype="int32")
    assert np.array_equal(keras.Model(inputs, segment_mask(inputs, causal=causal))(SEGMENTS), expected)
    graph = tf.function(lambda segments: segment_mask(segments, causal=causal), autograph=False)
    assert np.array_equal(graph.get_concrete_function(tf.TensorSpec((None, None), tf.int32))(SEGMENTS), expected)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
def test_each_document_computes_as_alone(cudnn, uncompiled, causal):
    inputs, segments = keras.Input((LENGTH, 16)), keras.Input((LENGTH,), dtype="int32")
    layer = keras.layers.MultiHeadAttention(2, 8, dtype="bfloat16")
    outputs = layer(inputs, inputs, attention_mask=segment_mask(segments, causal=causal))
    model = keras.Model([inputs, segments], outputs)
    rows = draw(3, LENGTH, 16, dtype="bfloat16")
    assert use_flash_attention(model) == 1
    found = tf.function(model, autograph=False)([rows, tf.constant(SEGMENTS)])
    assert [row.inference for row in explain(model).layers] == [()]
    assert len(cudnn.calls) == 1
    for row, numbers, output in zip(rows, SEGMENTS, found, strict=True):
        for segment in range(1, numbers.max() + 1):
            place = np.flatnonzero(numbers == segment)
            alone = tf.gather(row, place)[None]
            expected = layer(alone, alone, use_causal_mask=causal)[0]
            part = tf.gather(output, place)
            assert largest_error([tf.cast(part, tf.float64)], [tf.cast(expected, tf.float64)]) < 0.05
