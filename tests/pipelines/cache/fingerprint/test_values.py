import collections
import datetime
import decimal
import enum
import functools
import operator
import pathlib
import re
import types

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfopt.pipelines.cache.fingerprint import fingerprint, values
from tfopt.pipelines.cache.fingerprint.values import digest

plain = st.none() | st.booleans() | st.integers() | st.floats() | st.complex_numbers() | st.text() | st.binary()
hashable = st.recursive(plain, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=5)
nested = st.recursive(
    plain | st.dates() | st.decimals() | st.fractions() | hashable,
    lambda inner: st.lists(inner, max_size=4) | st.tuples(inner) | st.dictionaries(hashable, inner, max_size=3),
    max_leaves=12,
)


def print_of(value):
    return fingerprint(value, name="value")


def told_apart(value):
    """A text that differs between values that differ in type or content; sets are sorted, NaNs alike."""
    if isinstance(value, dict):
        return f"dict{[(told_apart(key), told_apart(item)) for key, item in value.items()]}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}{[told_apart(item) for item in value]}"
    if isinstance(value, frozenset):
        return f"frozenset{sorted(told_apart(item) for item in value)}"
    if isinstance(value, complex):
        return f"complex {value.real!r} {value.imag!r}"
    return f"{type(value).__name__} {value!r}"


@pytest.mark.slow
@settings(max_examples=200)
@given(nested, nested)
def test_fingerprints_are_equal_exactly_where_values_are(first, second):
    assert (print_of(first) == print_of(second)) == (told_apart(first) == told_apart(second))


@settings(max_examples=100)
@given(st.lists(st.text() | st.binary() | st.lists(st.text(max_size=2), max_size=2), max_size=4), st.data())
def test_copies_are_equal_and_a_moved_border_is_not(value, data):
    copy = [bytes(bytearray(item)) if isinstance(item, bytes) else item[:1] + item[1:] for item in value]
    assert print_of(value) == print_of(copy)
    if value:
        at = data.draw(st.integers(0, len(value) - 1))
        assert print_of(value) != print_of([*value[:at], value[at:]])


def test_the_border_between_kind_and_text_counts():
    assert digest("ab", "c", []) != digest("a", "bc", [])


class Colour(enum.Enum):
    RED = 1
    GREEN = 2


Point = collections.namedtuple("Point", "x y")


class Text(str):
    pass


UNLIKE = [
    None,
    False,
    0,
    0.0,
    -0.0,
    0j,
    "",
    b"",
    "0",
    b"0",
    (),
    [],
    {},
    set(),
    frozenset(),
    bytearray(),
    (0,),
    [0],
    {0: 0},
    {0},
    frozenset({0}),
    [[0]],
    [0, 0],
    [(0, 0)],
    float("nan"),
    float("inf"),
    Ellipsis,
    NotImplemented,
    Text(),
    Text("0"),
    Colour.RED,
    Colour.GREEN,
    Colour,
    Point,
    Point(0, 0),
    range(0),
    range(3),
    slice(3),
    slice(None, 3, 2),
    pathlib.PurePosixPath("a"),
    pathlib.PureWindowsPath("a"),
    datetime.date(2020, 1, 1),
    datetime.datetime(2020, 1, 1),
    datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC),
    datetime.timedelta(1),
    decimal.Decimal(0),
    decimal.Decimal("0.0"),
    re.compile("a"),
    re.compile(b"a"),
    re.compile("a", re.I),
    collections.OrderedDict(),
    collections.OrderedDict({0: 0}),
    collections.defaultdict(int),
    collections.defaultdict(list),
    collections.deque([0]),
    collections.deque([0], maxlen=3),
    collections.Counter("a"),
    types.SimpleNamespace(a=1),
    types.MappingProxyType({0: 0}),
    operator.itemgetter(0),
    operator.attrgetter("a"),
    functools.partial(max, 1),
    functools.partial(max, 2),
    functools.partial(max, key=1),
    np.bool_(False),
    np.int32(0),
    np.int64(0),
    np.float32(0),
    np.float32(-0.0),
    np.array(0),
    np.array([0]),
    np.array([[0]]),
    np.array([0], np.int8),
    np.array([0], np.uint8),
    np.array([0], ">i4"),
    np.array([0], "<i4"),
    np.array([], np.int32),
    np.array([], np.float32),
    np.empty((0, 2)),
    np.empty((2, 0)),
    np.array([0.0]),
    np.array([-0.0]),
    np.array([""]),
    np.array(["0"]),
    np.array([b"0"]),
    np.array([0], object),
    np.array(["0"], object),
    np.array(["0"], np.dtypes.StringDType()),
    np.array(["1"], np.dtypes.StringDType()),
    np.array([(0, 1)], [("a", "i4"), ("b", "i4")]),
    np.array([(0, 1)], [("a", "i4"), ("c", "i4")]),
    np.array([(0, 2)], [("a", "i4"), ("b", "i4")]),
    np.array([0], "datetime64[D]"),
    np.array([0], "datetime64[s]"),
    np.ma.masked_array([0, 1], [0, 1]),
    np.ma.masked_array([0, 1], [1, 0]),
    np.dtype("float32"),
    np.dtype("float64"),
    np.float32,
    np.sin,
    np.cos,
    tf.float32,
    tf.bfloat16,
    tf.TensorShape(None),
    tf.TensorShape([]),
    tf.TensorShape([None]),
    tf.TensorShape([1]),
    tf.TensorSpec([]),
    tf.TensorSpec([], tf.int32),
    tf.TensorSpec([None]),
    tf.RaggedTensorSpec([None, None]),
    tf.io.FixedLenFeature([], tf.int64),
    tf.io.FixedLenFeature([], tf.int64, 0),
    tf.io.FixedLenFeature([1], tf.int64),
    tf.io.VarLenFeature(tf.int64),
    tf.io.RaggedFeature(tf.int64),
    tf.constant(0),
    tf.constant(0.0),
    tf.constant(0.0, tf.bfloat16),
    tf.constant([0]),
    tf.constant(["a"]),
    tf.constant(["b"]),
    tf.constant("a"),
    tf.ragged.constant([[0], [1, 2]]),
    tf.ragged.constant([[0, 1], [2]]),
    tf.sparse.from_dense([0, 1]),
    tf.sparse.from_dense([1, 0]),
    tf.sin,
    tf.cos,
]


def test_unlike_values_have_unlike_fingerprints():
    found = {}
    for value in UNLIKE:
        assert found.setdefault(print_of(value), value) is value
    assert len(found) == len(UNLIKE)


@pytest.mark.parametrize(
    "make",
    [
        lambda: {"a", "b", 3, (1, 2)},
        lambda: [Point(1, [2]), Colour.RED, Text("a")],
        lambda: np.arange(12).reshape(3, 4),
        lambda: np.array(["a", None, (1,)], object),
        lambda: tf.constant([[1, 2]]),
        lambda: tf.ragged.constant([[1], [2, 3]]),
        lambda: {"label": tf.io.FixedLenFeature([], tf.int64)},
        lambda: np.vectorize(len),
    ],
)
def test_values_made_alike_have_the_same(make):
    assert print_of(make()) == print_of(make())


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
    monkeypatch.setattr(values, "_CHUNK_BYTES", chunk_bytes)
    array = np.zeros(shape, np.int16)
    found = {print_of(array)}
    for place in (0, 1, 31, 32, 499, 998, 999):
        array.ravel()[place] = 1
        assert print_of(np.asfortranarray(array)) == print_of(array)
        found.add(print_of(array))
    assert len(found) == 8


def test_arrays_are_told_apart_by_structure_type_and_content():
    data = {"x": np.zeros(3), "y": (np.ones(2), tf.constant(1))}
    assert print_of(data) == print_of({"x": np.zeros(3), "y": (np.ones(2), tf.constant(1))})
    assert len({print_of(item) for item in (np.zeros(3), (np.zeros(3),), np.zeros(3, int), np.zeros((3, 1)))}) == 4


def test_values_that_hold_themselves_have_a_fingerprint():
    def loop(first):
        values = [first]
        values.append(values)
        return values

    named = {}
    named["self"] = named
    assert print_of(loop(1)) == print_of(loop(1)) != print_of(loop(2))
    assert print_of(named) != print_of(loop(1))


def test_in_a_cycle_a_difference_far_away_counts():
    def ring(length, last):
        values = [None]
        start = values
        for place in range(length):
            values[0] = [None, last if place == length - 1 else 0]
            values = values[0]
        values[0] = start
        return start

    assert print_of(ring(50, 0)) == print_of(ring(50, 0)) != print_of(ring(50, 1))
    assert print_of(ring(50, 1)) != print_of(ring(51, 1))


def test_depth_and_sharing_cost_no_time():
    deep, shared = [], [1]
    for _ in range(3000):
        deep, shared = [deep], [shared, shared]
    assert print_of(deep) != print_of(deep[0])
    assert print_of(shared) != print_of(shared[0])


def test_types_of_arrow_are_told_apart():
    arrow = pytest.importorskip("pyarrow")
    kinds = [arrow.int64, arrow.int32, lambda: arrow.list_(arrow.int64()), lambda: arrow.list_(arrow.int64(), 2)]
    assert len({print_of(kind()) for kind in kinds}) == 4
    assert [print_of(kind()) for kind in kinds] == [print_of(kind()) for kind in kinds]
