import re

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfopt.errors import PipelineError
from tfopt.pipelines import build_pipeline
from tfopt.pipelines.as_source import arrays


def nested(depth, count):
    leaf = st.sampled_from(["float32", "int32", "uint8"]).map(lambda kind: np.arange(count).astype(kind))
    return st.recursive(
        leaf,
        lambda inner: st.tuples(inner, inner) | st.fixed_dictionaries({"a": inner, "b": inner}),
        max_leaves=depth,
    )


@pytest.mark.slow
@settings(max_examples=15)
@given(st.data(), st.integers(1, 20), st.integers(1, 7))
def test_any_nesting_comes_back_whole_and_in_order(data, count, batch_size):
    given_arrays = data.draw(nested(3, count))
    batches = list(build_pipeline(given_arrays, batch_size=batch_size, training=False))
    whole = tf.nest.map_structure(lambda *parts: np.concatenate(parts), *batches)
    tf.nest.assert_same_structure(whole, given_arrays)
    for found, expected in zip(tf.nest.flatten(whole), tf.nest.flatten(given_arrays), strict=True):
        np.testing.assert_array_equal(found, expected)
        assert found.dtype == expected.dtype


def test_tensors_and_strings_are_taken():
    source = arrays((tf.constant([1, 2, 3]), np.array(["a", "b", "c"])))
    (numbers, names) = next(iter(build_pipeline(source, training=False)))
    assert numbers.numpy().tolist() == [1, 2, 3]
    assert names.numpy().tolist() == [b"a", b"b", b"c"]


def test_data_is_copied():
    data = np.zeros(4)
    source = arrays(data)
    data[:] = 1
    assert next(iter(build_pipeline(source, training=False))).numpy().sum() == 0


def test_unlike_lengths_are_named():
    data = {"x": np.zeros((4, 2)), "y": (np.zeros(5), np.zeros(4))}
    with pytest.raises(PipelineError, match=r"data\['x'\] has 4, data\['y'\]\[0\] has 5, data\['y'\]\[1\] has 4"):
        arrays(data)


@pytest.mark.parametrize("data", [np.zeros((0, 3)), (), {}, (np.zeros(0), np.zeros(0))])
def test_nothing_is_refused(data):
    with pytest.raises(PipelineError, match="at least one example"):
        arrays(data)


def test_scalars_are_refused():
    with pytest.raises(ValueError, match=r"Received a scalar at data\[1\]"):
        arrays((np.zeros(3), np.zeros(())))


@pytest.mark.parametrize("leaf", [[1, 2], None, "text"])
def test_other_leaves_are_refused_by_place(leaf):
    with pytest.raises(TypeError, match=rf"Received at data\[1\]: {type(leaf).__name__}"):
        arrays((np.zeros(2), leaf))


def test_masked_arrays_are_refused_with_the_way_out():
    masked = np.ma.masked_array([1.0, 2.0], mask=[True, False])
    with pytest.raises(TypeError, match=r"Received at data\[1\]: a masked array.*\.filled\(value\)"):
        build_pipeline((np.zeros(2), masked))
    build_pipeline((np.zeros(2), masked.filled(0)), batch_size=2)


@pytest.mark.parametrize(
    ("dtype", "remedy"),
    [
        ("M8[s]", "astype(np.int64)"),
        ("m8[s]", "astype(np.int64)"),
        ("i4,f4", "Pass its fields"),
        (np.longdouble, "float64"),
        (np.clongdouble, "complex128"),
        (object, "Give it a type"),
    ],
)
def test_types_without_a_tensor_are_refused_by_place(dtype, remedy):
    leaf = np.zeros(2, dtype)
    message = rf"Received at data\['y'\]: an array of the type {re.escape(str(leaf.dtype))}\. .*{re.escape(remedy)}"
    with pytest.raises(TypeError, match=message):
        arrays({"x": np.zeros(2), "y": leaf})


def test_texts_that_are_no_utf8_are_refused_and_other_objects_taken():
    with pytest.raises(TypeError, match=r"Received at data: .*<U1\. Pass strings that UTF-8 can encode"):
        arrays(np.array(["\udc80"]))
    assert arrays(np.array(["a", b"b"], object)).count == 2


def test_keys_that_do_not_sort_are_refused():
    data = {"z": {1: np.zeros(2), "a": np.zeros(2)}}
    with pytest.raises(TypeError, match=r"keys of one type.*Received at data\['z'\]: \[1, 'a'\]\. Pass strings"):
        build_pipeline(data)


def test_rows_without_values_are_rows():
    batches = list(build_pipeline((np.zeros((3, 0)), np.arange(3)), batch_size=1, training=False))
    assert [batch[0].shape.as_list() for batch in batches] == [[1, 0]] * 3
