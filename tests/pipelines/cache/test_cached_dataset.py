"""Examples of every kind through rows, and through the dataset of a cache."""

import numpy as np
import pytest
import tensorflow as tf

from tfopt.pipelines.cache.cached_dataset import Cached
from tfopt.pipelines.cache.rows import Rows
from tfopt.pipelines.cache.store import Store

PARTS = {
    "scalar": lambda row: tf.cast(row, tf.float64),
    "bool": lambda row: tf.equal(row % [2, 3, 5], 0),
    "bytes": lambda row: tf.cast(row + tf.range(7, dtype=tf.int64), tf.uint8),
    "half": lambda row: tf.cast(row, tf.float16) * tf.ones((2,), tf.float16),
    "wide": lambda row: tf.cast(row, tf.bfloat16) * tf.ones((3, 2), tf.bfloat16),
    "complex": lambda row: tf.complex(tf.cast(row, tf.float32), [1.0, -1.0]),
    "unsigned": lambda row: tf.cast(row, tf.uint64) + 2**63,
    "empty": lambda row: tf.zeros((0, 3)),
    "text": lambda row: tf.strings.join([tf.strings.as_string(row), "ä"]),
    "texts": lambda row: tf.repeat(tf.strings.as_string(row), row % 3),
    "unknown": lambda row: tf.ones((row % 3, 2)) * 2,
    "nothing": lambda row: tf.ones((row % 3, 0)),
    "ragged": lambda row: tf.RaggedTensor.from_row_lengths(tf.range(row % 4), [row % 4]),
    "sparse": lambda row: tf.sparse.from_dense([row, 0, 2]),
}
ALONE = ("empty", "text", "texts", "unknown", "nothing", "ragged", "sparse")
TOGETHER = [tuple(name for name in PARTS if name not in ALONE), ("text",), *(("bytes", alone) for alone in ALONE)]


def same(found, expected):
    parts = zip(*(tf.nest.flatten(value, expand_composites=True) for value in (found, expected)), strict=True)
    return all(a.dtype == b.dtype and np.array_equal(a.numpy(), b.numpy()) for a, b in parts)


def examples_of(rows, parts):
    return rows.map(lambda row: ({name: PARTS[name](row) for name in parts}, row))


def opened(folder, count, spec, prepare, batch_size=10, at_once=10):
    """A dataset of cached examples of the rows below `count`, in their order."""
    store = Store(folder, lambda: "tfopt-" + "0" * 64, count=count, expected_bytes=None, limit_bytes=None, what="")
    cached = Cached(store, tf.data.Dataset.range(count), None, prepare, Rows(spec), batch_size, at_once)
    return cached.in_order(lambda made: made(None), lambda elements, _: elements)


@pytest.mark.parametrize("parts", TOGETHER, ids="-".join)
def test_every_kind_of_example_comes_back_from_its_row(parts):
    numbers = tf.data.Dataset.range(6)
    plain = examples_of(numbers, parts)
    rows = Rows(plain.element_spec)
    assert (rows.size is None) == (parts[-1] in ALONE)
    packed = (plain if rows.size is None else plain.batch(4)).map(lambda *example: rows.pack(example))
    alone = packed.unbatch() if rows.size is None else packed
    found = alone.map(rows.unpack)
    found = found if rows.size is None else found.unbatch()
    assert found.element_spec == plain.element_spec
    pairs = list(zip(found, plain, strict=True))
    assert len(pairs) == 6
    assert all(same(*pair) for pair in pairs)


def test_an_unknown_rank_is_refused():
    with pytest.raises(ValueError, match="Expected tensors of known rank"):
        Rows(tf.TensorSpec(None))


@pytest.mark.parametrize("size", [8, 5000, 300_000])  # many to a call, some one by one, few
def test_rows_are_read_from_any_places_in_a_file(tmp_path, size):
    spec = tf.TensorSpec((size,), tf.uint8)
    dataset = opened(tmp_path, 50, spec, lambda rows: rows.map(lambda row: tf.fill((size,), tf.cast(row, tf.uint8))))
    assert [int(row[-1]) for row in dataset] == list(range(50))
    store = Store(tmp_path, lambda: "tfopt-" + "0" * 64, count=50, expected_bytes=None, limit_bytes=None, what="")
    assert store.begin() == (1, 50)
    for positions in ([0], [49, 0, 7, 7], np.random.default_rng(0).permutation(50), range(20, 40)):
        rows, sums = store.read(size, np.array(positions, np.int64))
        assert rows.shape == (len(positions), size)
        assert [set(row.tolist()) for row in rows] == [{position} for position in positions]
        np.testing.assert_array_equal(sums, tf.fingerprint(rows))
        if (size, len(positions)) == (300_000, 4):  # far apart: read one by one, to be taken over without a copy
            assert rows.ctypes.data % 64 == 0


def test_a_number_that_is_unknown_is_that_of_a_whole_reading(tmp_path):
    """Not that of one which began in the middle, nor of what another has written by then."""
    store = Store(tmp_path, lambda: "tfopt-" + "0" * 64, count=None, expected_bytes=None, limit_bytes=None, what="")

    def read(positions, *, skipped=0, ends=True):
        session, held = store.begin()
        assert store.go_on(session, held)[1]
        for position in positions:
            store.write(session, np.array([position]), np.zeros((1, 2), np.uint8), np.zeros((1, 8), np.uint8))
        if ends:
            store.end_of_source(session, skipped)
        return store.begin()[1]

    other = store.begin()[0]
    assert read(range(4), ends=False) == -1
    store.end_of_source(other, 0)  # which wrote nothing, since it could not when it began
    assert store.begin()[1] == -1
    assert read([2, 0, 4, 3, 1], skipped=1) == -1  # without the last one
    assert read([5, 3, 2, 0, 1, 4]) == 6
