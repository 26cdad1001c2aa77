import collections
import datetime
import pathlib

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfopt.pipelines.cache import value_hash
from tfopt.pipelines.cache.value_hash import digest, hash_value

plain = st.none() | st.booleans() | st.integers() | st.floats() | st.complex_numbers() | st.text() | st.binary()
nested = st.recursive(
    plain,
    lambda inner: st.lists(inner, max_size=4) | st.tuples(inner) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)


def print_of(value):
    return hash_value(value, name="value")


@pytest.mark.slow
@settings(max_examples=200)
@given(nested, nested)
def test_fingerprints_are_equal_exactly_where_values_are(first, second):
    """`repr` tells types apart, and the order of a dict."""
    assert (print_of(first) == print_of(second)) == (repr(first) == repr(second))


@settings(max_examples=100)
@given(st.lists(st.text() | st.binary() | st.lists(st.text(max_size=2), max_size=2), max_size=4), st.data())
def test_copies_are_equal_and_a_moved_border_is_not(value, data):
    copy = [bytes(bytearray(item)) if isinstance(item, bytes) else item[:1] + item[1:] for item in value]
    assert print_of(value) == print_of(copy)
    if value:
        at = data.draw(st.integers(0, len(value) - 1))
        assert print_of(value) != print_of([*value[:at], value[at:]])


def test_the_border_between_parts_counts():
    assert digest(["ab", "c"]) != digest(["a", "bc"])


Point = collections.namedtuple("Point", "x y")

UNLIKE = [
    *(None, False, 0, 0.0, -0.0, 0j, "", b"", "0", b"0", (), [], {}, (0,), [0], {0: 0}, [[0]], [0, 0], [(0, 0)]),
    *(float("nan"), float("inf"), 10**5000, Point(0, 0), (0, 0), range(0), range(3), collections.OrderedDict()),
    *(pathlib.PurePosixPath("a"), pathlib.PureWindowsPath("a"), "\ud800", {0: 1, 1: 0}, {1: 0, 0: 1}),
    *(np.int32(0), np.int64(0), np.float32(0), np.float32(-0.0), np.datetime64("2020-01-01")),
    *(np.array([0]), np.array([[0]]), np.array([0], np.int8), np.array([0], np.uint8), np.array([0], ">i4")),
    *(np.array([], np.int32), np.array([], np.float32), np.empty((0, 2)), np.empty((2, 0))),
    *(np.array([""]), np.array(["0"]), np.array([b"0"]), np.array([0], object), np.array(["0"], object)),
    *(np.array(["0"], np.dtypes.StringDType()), np.array(["1"], np.dtypes.StringDType())),
    *(np.array([(0, 1)], [("a", "i4"), (name, "i4")]) for name in "bc"),
    *(np.array([0], "datetime64[D]"), np.array([0], "datetime64[s]")),
    *(tf.constant(0), tf.constant(0.0), tf.constant(0.0, tf.bfloat16), tf.constant(["a"]), tf.constant(["b"])),
    *(tf.ragged.constant([[0], [1, 2]]), tf.ragged.constant([[0, 1], [2]])),
    *(tf.sparse.from_dense([0, 1]), tf.sparse.from_dense([1, 0])),
]


def test_unlike_values_have_unlike_fingerprints():
    assert len({print_of(value) for value in UNLIKE}) == len(UNLIKE)


@pytest.mark.parametrize(
    "value",
    [len, lambda: 1, datetime.date(2020, 1, 1), {1}, tf.Variable(1), tf.data.Dataset.range(3), np.ma.masked_array([0])],
)
def test_what_is_no_plain_value_is_refused_by_name(value):
    kind = "the function" if callable(value) else f"type {type(value).__module__}.{type(value).__qualname__}"
    with pytest.raises(ValueError, match=rf"plain values in 'source'.*{kind}.*cache_key="):
        hash_value({"a": [value]}, name="source")


def test_how_an_array_lies_in_memory_does_not_count(tmp_path):
    rows = np.arange(60, dtype=np.float32).reshape(5, 12)
    np.save(tmp_path / "rows.npy", rows)
    mapped = np.load(tmp_path / "rows.npy", mmap_mode="r")
    wide = np.zeros((10, 24), np.float32)
    wide[::2, ::2] = rows
    alike = [np.asfortranarray(rows), rows[::-1][::-1], wide[::2, ::2], mapped, mapped[:]]
    assert {print_of(array) for array in alike} == {print_of(rows)}


def test_the_bytes_between_fields_do_not_count():
    kind = np.dtype([("a", "i1"), ("b", "f8")], align=True)
    first, second = (np.full(3 * kind.itemsize, fill, np.uint8).view(kind) for fill in (0, 255))
    for array in (first, second):
        array["a"], array["b"] = 1, 2.0
    assert first.tobytes() != second.tobytes()
    assert print_of(first) == print_of(second)


@pytest.mark.parametrize("shape", [(1000,), (10, 100), (1, 1000), (1000, 1)])
@pytest.mark.parametrize("chunk_bytes", [64, 640, 10**6])
def test_every_element_of_a_large_array_counts(monkeypatch, shape, chunk_bytes):
    monkeypatch.setattr(value_hash, "_CHUNK_BYTES", chunk_bytes)
    array = np.zeros(shape, np.int16)
    found = {print_of(array)}
    for place in (0, 1, 31, 32, 499, 998, 999):
        array.ravel()[place] = 1
        assert print_of(np.asfortranarray(array)) == print_of(array)
        found.add(print_of(array))
    assert len(found) == 8
