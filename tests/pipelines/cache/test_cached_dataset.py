import numpy as np
import pytest
import tensorflow as tf

from tfopt.pipelines.cache.cached_dataset import RecordFormat

DTYPES = [
    "bool",
    "uint8",
    "int16",
    "int32",
    "int64",
    "uint64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
]


def stored(example, spec=None, tag=3, position=7):
    """The example behind a record, and the record."""
    rows = RecordFormat(spec or tf.nest.map_structure(tf.type_spec_from_value, example), tag)
    tensors = [tensor.numpy() for tensor in tf.function(rows.flatten)(example)]
    record = rows.pack(position, tensors)
    return tf.function(rows.unpack)(tf.constant(record)), record, rows


def same(found, expected):
    parts = zip(*(tf.nest.flatten(value, expand_composites=True) for value in (found, expected)), strict=True)
    return all(a.dtype == b.dtype and np.array_equal(a.numpy(), b.numpy()) for a, b in parts)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (5,), (3, 0, 2), (7, 9)])
def test_every_type_comes_back(dtype, shape):
    values = tf.cast(tf.reshape(tf.range(np.prod(shape, dtype=int) or 1) % 3, shape if 0 not in shape else (1,)), dtype)
    example = values if 0 not in shape else tf.zeros(shape, dtype)
    found, _, _ = stored(example)
    assert same(found, example)
    assert found.shape == example.shape


def test_nested_examples_come_back():
    example = (
        {"image": tf.constant(np.arange(12, dtype=np.uint8).reshape(3, 4)), "name": tf.constant("ä")},
        (tf.constant(["a", ""]), tf.constant(2.5)),
        tf.ragged.constant([[1], [2, 3], []]),
        tf.sparse.from_dense([0, 5, 0]),
    )
    found, _, _ = stored(example)
    tf.nest.assert_same_structure(found, example, expand_composites=True)
    assert same(found, example)


def test_unknown_dimensions_are_stored_with_the_example():
    spec = (tf.TensorSpec((None, None, 3), tf.uint8), tf.TensorSpec((None,)))
    example = (tf.ones((4, 5, 3), tf.uint8), tf.zeros((0,)))
    found, _, _ = stored(example, spec)
    assert same(found, example)


def test_an_unknown_rank_is_refused():
    with pytest.raises(ValueError, match="Expected tensors of known rank"):
        RecordFormat(tf.TensorSpec(None), 1)


def test_a_record_is_known_by_its_position_and_its_cache():
    example = tf.constant([1.0, 2.0])
    _, record, rows = stored(example)
    assert rows.is_at(record, 7)
    assert not rows.is_at(record, 8)
    assert not RecordFormat(tf.TensorSpec((2,)), 4).is_at(record, 7)
    assert not any(rows.is_at(rows.nowhere(), position) for position in range(3))
