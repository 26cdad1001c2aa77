"""Rows of arrays in memory, and what they have in common with those of .npy and HDF5 files: nesting, order, errors."""

import os
import re

import h5py
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from tfopt.errors import PipelineError
from tfopt.pipelines import arrays, build_pipeline, hdf5, npy


def nested(depth, count):
    leaf = st.sampled_from(["float32", "int32", "uint8"]).map(lambda kind: np.arange(count).astype(kind))
    return st.recursive(
        leaf,
        lambda inner: st.tuples(inner, inner) | st.fixed_dictionaries({"a": inner, "b": inner}),
        max_leaves=depth,
    )


@pytest.fixture(params=["arrays", "npy", "hdf5"])
def make(request, tmp_path):
    """Makes a source of nested arrays; what is no array is passed as it is."""

    def keep(leaf, name):
        if not isinstance(leaf, np.ndarray):
            return leaf
        np.save(tmp_path / f"{name}.npy", leaf)
        with h5py.File(tmp_path / "rows.h5", "a") as file:
            file[name] = leaf
        return tmp_path / f"{name}.npy" if request.param == "npy" else name

    def source(data):
        if request.param == "arrays":
            return arrays(data)
        numbers = iter(range(9))
        h5py.File(tmp_path / "rows.h5", "w").close()
        kept = tf.nest.map_structure(lambda leaf: keep(leaf, f"x{next(numbers)}"), data)
        return npy(kept) if request.param == "npy" else hdf5(tmp_path / "rows.h5", kept)

    source.kind = request.param
    return source


def test_the_nesting_and_the_order_are_kept_and_parts_hold_each_row_once(make):
    data = ({"z": np.arange(10), "a": np.arange(20.0).reshape(10, 2)}, np.arange(10) * 10)
    source = make(data)
    parts = [build_pipeline(source.part(index, 3), batch_size=4, training=False) for index in range(3)]
    rows = [int(row) for part in parts for _, batch in part for row in batch]
    assert (sorted(rows), rows == sorted(rows)) == ([*range(0, 100, 10)], make.kind == "hdf5")  # which gives stretches
    batches = list(build_pipeline(source, batch_size=4, training=False))
    found = tf.nest.map_structure(lambda *parts: np.concatenate(parts), *batches)
    tf.nest.assert_same_structure(found, data)
    tf.nest.map_structure(np.testing.assert_array_equal, found, data)


def test_unlike_lengths_are_named(make):
    with pytest.raises(PipelineError, match=r" has 4, .* has 5, .* has 4\. Pass as many labels as examples"):
        make({"x": np.zeros((4, 2)), "y": (np.zeros(5), np.zeros(4))})


@pytest.mark.parametrize("data", [np.zeros((0, 3)), (), {}, (np.zeros(0), np.zeros(0))])
def test_nothing_is_refused(make, data):
    with pytest.raises(PipelineError, match="at least one example"):
        make(data)


def test_what_is_no_leaf_is_refused_by_place(make):
    for leaf in ([1, 2], None, 3, b"bytes"):
        with pytest.raises(TypeError, match=rf"Received at \w+\[1\]\['x'\]: {type(leaf).__name__}"):
            make((np.zeros(2), {"x": leaf}))
    with pytest.raises(TypeError, match=r"keys of one type.*Received at \w+\[1\]: \[1, 'a'\]\. Pass strings"):
        {"arrays": arrays, "npy": npy, "hdf5": lambda names: hdf5("x.h5", names)}[make.kind](("x", {1: "x", "a": "x"}))


def test_the_fingerprint_follows_the_rows(make, tmp_path):
    source = make(np.arange(6))
    before = source.fingerprint()
    if make.kind == "arrays":
        assert before == make(np.arange(6)).fingerprint() != make(np.arange(1, 7)).fingerprint()
    else:
        assert (npy(tmp_path / "x0.npy") if make.kind == "npy" else hdf5(tmp_path / "rows.h5", "x0")).fingerprint() == (
            before
        )
        for file in tmp_path.glob("*.*"):
            os.utime(file, ns=(1, 1))
        assert source.fingerprint() != before
    assert source.fingerprint() != source.part(0, 2).fingerprint() != source.part(1, 2).fingerprint()


def test_tensors_strings_and_rows_without_values_are_taken_and_copied():
    numbers = np.arange(3)
    source = arrays((numbers, tf.constant([1, 2, 3]), np.array(["a", "b", "c"]), np.zeros((3, 0))))
    numbers[:] = 7
    (found,) = build_pipeline(source, batch_size=3, training=False).as_numpy_iterator()
    assert [part.tolist() for part in found] == [[0, 1, 2], [1, 2, 3], [b"a", b"b", b"c"], [[], [], []]]


REFUSED = [
    (np.zeros(()), "a scalar"),
    (np.ma.masked_array([1.0, 2.0], mask=[True, False]), r"a masked array.*\.filled\(value\)"),
    (tf.ragged.constant([[[1]], [[2]]]), "ragged tensors with one ragged axis"),
    *(
        (np.zeros(2, dtype), rf"an array of the type {re.escape(str(np.dtype(dtype)))}\. .*{re.escape(remedy)}")
        for dtype, remedy in [
            ("M8[s]", "astype(np.int64)"),
            ("m8[s]", "astype(np.int64)"),
            ("i4,f4", "Pass its fields"),
            (np.longdouble, "float64"),
            (np.clongdouble, "complex128"),
            (object, "Give it a type"),
        ]
    ),
    (np.array(["\udc80", "a"]), r".*<U1\. Pass strings that UTF-8 can encode"),
]


@pytest.mark.parametrize(("leaf", "message"), REFUSED)
def test_arrays_without_a_tensor_of_rows_are_refused_by_place(leaf, message):
    with pytest.raises((TypeError, ValueError), match=message) as refusal:
        arrays({"x": np.zeros(2), "y": leaf})
    assert "data['y']" in str(refusal.value)


def test_objects_that_are_strings_are_taken():
    assert arrays(np.array(["a", b"b"], object)).count == 2
