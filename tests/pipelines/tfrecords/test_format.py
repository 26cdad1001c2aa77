import json

import numpy as np
import pytest
import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.pipelines.tfrecords import format as module
from tfopt.pipelines.tfrecords.format import (
    INDEX_NAME,
    Index,
    Shard,
    describe,
    features,
    has_index,
    pack,
    read_index,
    restore,
    to_strings,
    unpack,
    write_index,
)

SPEC = (
    {"b": tf.TensorSpec((None, 3), tf.bfloat16), "a": (tf.TensorSpec((), tf.string), tf.TensorSpec((2,), tf.string))},
    tf.TensorSpec(None, tf.int8),
)


def test_a_spec_outlives_json():
    described = json.loads(json.dumps(describe(SPEC)))
    assert restore(described) == SPEC
    assert features(described) == ["0/a/0", "0/a/1", "0/b", "1"]


@pytest.mark.parametrize("spec", [tf.TensorSpec((2,), tf.float64), (tf.TensorSpec((), tf.string),)])
def test_a_single_tensor_is_not_a_tuple_of_one(spec):
    assert restore(describe(spec)) == spec


def test_an_example_comes_back_exactly():
    example = (
        {"b": tf.cast([[1, 2, 3]], tf.bfloat16), "a": (tf.constant(b"\xff\x00"), tf.constant(["x", ""]))},
        tf.constant([[[-7]]], tf.int8),
    )
    record = pack(features(describe(SPEC)), to_strings(example).numpy().tolist())
    back = unpack(describe(SPEC), record)
    tf.nest.assert_same_structure(back, example)
    for given, found in zip(tf.nest.flatten(example), tf.nest.flatten(back), strict=True):
        assert given.dtype == found.dtype
        np.testing.assert_array_equal(given.numpy(), found.numpy())


def test_equal_examples_make_equal_records():
    names = [f"feature {number}" for number in range(20)]
    values = [b"x"] * 20
    assert pack(names, values) == pack(names[::-1], values)


def test_texts_are_stored_as_other_programs_read_them():
    record = pack(["0", "1"], to_strings((tf.constant(b"contents"), tf.constant(3))).numpy().tolist())
    stored = tf.train.Example.FromString(record).features.feature
    assert stored["0"].bytes_list.value[0] == b"contents"


def test_another_shape_or_dtype_than_the_spec_is_refused():
    described = describe(tf.TensorSpec((2,), tf.int32))
    for value in (tf.zeros(3, tf.int32), tf.zeros(2, tf.float32)):
        with pytest.raises(tf.errors.InvalidArgumentError):
            unpack(described, pack(["value"], to_strings(value).numpy().tolist()))


@pytest.mark.parametrize(
    ("spec", "found"),
    [
        ((tf.RaggedTensorSpec((None,), tf.int32),), "RaggedTensorSpec.* at 0"),
        ({"x": tf.SparseTensorSpec((2,), tf.int32)}, "SparseTensorSpec.* at x"),
        (tf.TensorSpec((), tf.qint8), "qint8.* at the top"),
        ({3: tf.TensorSpec((), tf.int32)}, "names in UTF-8, not empty and without '/',.* 3"),
        ({"a/b": tf.TensorSpec((), tf.int32)}, "names in UTF-8, not empty and without '/',.* 'a/b'"),
    ],
)
def test_what_cannot_be_stored_is_named(spec, found):
    with pytest.raises(PipelineError, match=found):
        describe(spec)


INDEX = Index(
    shards=(Shard("a", 3, 100, "00ff", "22dd"), Shard("b", 2, 70, "11ee", "33cc")),
    spec={"feature": "value", "dtype": "int32", "shape": [None]},
    compression="GZIP",
    image=True,
    class_names=("Ä", "b"),
)


def test_an_index_is_read_back(tmp_path):
    write_index(str(tmp_path), INDEX)
    assert has_index(str(tmp_path))
    assert read_index(str(tmp_path)) == INDEX
    assert INDEX.count == 5
    assert json.loads((tmp_path / INDEX_NAME).read_text())["shards"][1]["sha256"] == "11ee"


def test_every_altered_byte_and_every_cut_is_found(tmp_path):
    write_index(str(tmp_path), INDEX)
    path = tmp_path / INDEX_NAME
    whole = path.read_bytes()
    for position in range(len(whole)):
        for changed in (whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :], whole[:position]):
            path.write_bytes(changed)
            with pytest.raises(PipelineError, match="damaged or was edited"):
                read_index(str(tmp_path))
            assert has_index(str(tmp_path)) or len(changed) < len(whole), "taken for another program's"


def test_an_index_of_a_newer_version_is_told_from_a_damaged_one(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_VERSION", 2)
    (tmp_path / INDEX_NAME).write_text(module._text(INDEX.to_dict() | {"more": 1}, 2))
    monkeypatch.setattr(module, "_VERSION", 1)
    with pytest.raises(PipelineError, match=r"Found version 2\. Update tfopt"):
        read_index(str(tmp_path))


@pytest.mark.parametrize("contents", [b"[]", b'{"version": 1}', b"\xff", b"3", b""])
def test_another_programs_index_is_none(tmp_path, contents):
    (tmp_path / INDEX_NAME).write_bytes(contents)
    assert not has_index(str(tmp_path))
    with pytest.raises(PipelineError, match="damaged or was edited"):
        read_index(str(tmp_path))
