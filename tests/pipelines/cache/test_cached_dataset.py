import itertools

import numpy as np
import pytest
import tensorflow as tf
from quick import first_quick

from tfopt.pipelines.cache.cached_dataset import RecordFormat, cached
from tfopt.pipelines.cache.folder import read_index
from tfopt.pipelines.cache.store import Store

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
    assert rows.is_at(record, 3 + 7)
    assert not rows.is_at(record, 3 + 8)
    assert not RecordFormat(tf.TensorSpec((2,)), 4).is_at(record, 4 + 7)
    assert not any(rows.is_at(rows.nowhere(), 3 + position) for position in range(3))


PARTS = {
    "scalar": lambda row: tf.cast(row, tf.float64),
    "bool": lambda row: tf.equal(row % [2, 3, 5], 0),
    "bytes": lambda row: tf.cast(row + tf.range(7, dtype=tf.int64), tf.uint8),
    "wide": lambda row: tf.cast(row, tf.bfloat16) * tf.ones((3, 2), tf.bfloat16),
    "complex": lambda row: tf.complex(tf.cast(row, tf.float32), [1.0, -1.0]),
    "unsigned": lambda row: tf.cast(row, tf.uint64) + 2**63,
    "empty": lambda row: tf.zeros((0, 3)),
    "text": lambda row: tf.strings.as_string(row),
    "unknown": lambda row: tf.ones((row % 3, 2)) * 2,
    "nothing": lambda row: tf.ones((row % 3, 0)),
    "ragged": lambda row: tf.RaggedTensor.from_row_lengths(tf.range(row % 4), [row % 4]),
    "sparse": lambda row: tf.sparse.from_dense([row, 0, 2]),
}
ALONE = ("empty", "text", "unknown", "nothing", "ragged", "sparse")


TOGETHER = [tuple(name for name in PARTS if name not in ALONE), *(("bytes", alone) for alone in ALONE)]


@pytest.mark.slow
@pytest.mark.parametrize(("at_once", "parts"), first_quick(itertools.product((7, 1, 1000), TOGETHER), 2, every=3))
def test_examples_come_back_in_order_many_to_a_record_or_alone(tmp_path, parts, at_once):
    calls = itertools.count()

    def transform(row):
        return {name: PARTS[name](row) for name in parts}, row

    def counted(elements):
        counts = elements.map(lambda row: tf.ensure_shape(tf.numpy_function(count, [row], tf.int64), ()))
        return counts.map(transform)

    def count(row):
        next(calls)
        return row

    store = Store(tmp_path, lambda: "tfopt-" + "0" * 64, count=60, expected_bytes=None, limit_bytes=None, what="")
    plain = tf.data.Dataset.range(60).map(transform)
    dataset = cached(store, plain.element_spec, tf.data.Dataset.range(60), counted, at_once=at_once)
    assert dataset.element_spec == plain.element_spec
    for _ in range(3):
        pairs = list(zip(dataset, plain, strict=True))
        assert len(pairs) == 60
        assert all(same(found, expected) for found, expected in pairs)
    for another in (1, 5, 1000):  # another batch size, or another time for each, when it is read
        read = cached(store, plain.element_spec, tf.data.Dataset.range(60), counted, at_once=another)
        assert all(same(found, expected) for found, expected in zip(read, plain, strict=True))
    assert next(calls) == 60
    assert read_index(store.path)["rows"] == (1 if parts[-1] in ALONE else min(at_once, 60))


def test_records_hold_a_mebibyte(tmp_path):
    store = Store(tmp_path, lambda: "tfopt-" + "0" * 64, count=None, expected_bytes=None, limit_bytes=None, what="")
    spec = tf.TensorSpec((300, 1000), tf.uint8)
    rows = tf.data.Dataset.range(8)
    dataset = cached(
        store, spec, rows, lambda rows: rows.map(lambda i: tf.fill((300, 1000), tf.cast(i, tf.uint8))), at_once=99
    )
    for _ in range(2):
        assert [int(row[-1, -1]) for row in dataset] == list(range(8))
    assert read_index(store.path)["rows"] == 3


def test_an_example_that_is_kept_does_not_keep_its_record(tmp_path):
    """A shuffle's buffer of slices would hold many times its size."""
    store = Store(tmp_path, lambda: "tfopt-" + "0" * 64, count=64, expected_bytes=None, limit_bytes=None, what="")
    rows = tf.data.Dataset.range(64)
    dataset = cached(
        store, tf.TensorSpec((64,), tf.int64), rows, lambda rows: rows.map(lambda i: tf.fill((64,), i)), at_once=64
    )
    for _ in range(2):
        starts = [row._numpy().__array_interface__["data"][0] for row in list(dataset)]
        assert len(starts) == 64
        assert len({after - before for before, after in itertools.pairwise(starts)}) > 1 or starts[1] - starts[0] != 512
