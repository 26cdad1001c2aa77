import hashlib
import json

import numpy as np
import pytest
import tensorflow as tf
from quick import first_quick

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
    to_strings,
    unpack,
    unpack_batch,
    unpacks_in_batches,
    write_index,
)

SPEC = (
    {"b": tf.TensorSpec((None, 3), tf.bfloat16), "a": (tf.TensorSpec((), tf.string), tf.TensorSpec((2,), tf.string))},
    tf.TensorSpec(None, tf.int8),
)


def record_of(example):
    """The record of an example, whose spec is that of its tensors."""
    spec = tf.nest.map_structure(tf.TensorSpec.from_tensor, example)
    return pack(features(describe(spec)), to_strings(example).numpy().tolist())


def test_an_example_comes_back_exactly():
    example = (
        {"b": tf.cast([[1, 2, 3]], tf.bfloat16), "a": (tf.constant(b"\xff\x00"), tf.constant(["x", ""]))},
        tf.constant([[[-7]]], tf.int8),
    )
    record = record_of(example)
    back = unpack(describe(SPEC), record)
    tf.nest.assert_same_structure(back, example)
    for given, found in zip(tf.nest.flatten(example), tf.nest.flatten(back), strict=True):
        assert given.dtype == found.dtype
        np.testing.assert_array_equal(given.numpy(), found.numpy())
    stored = tf.train.Example.FromString(record).features.feature
    assert stored["0/a/0"].bytes_list.value[0] == b"\xff\x00"  # as other programs read it


def test_equal_examples_make_equal_records():
    names = [f"feature {number}" for number in range(20)]
    values = [b"x"] * 20
    assert pack(names, values) == pack(names[::-1], values)


def packed(spec, examples):
    """The records of examples, and the function of a vector of them that a pipeline calls."""
    described = describe(spec)
    assert unpacks_in_batches(described)
    return tf.constant(list(map(record_of, examples))), tf.function(
        lambda some: unpack_batch(described, some), reduce_retracing=True
    )


@pytest.mark.parametrize("shape", first_quick([((2, 3),), ((0,),), ((),), ((3, 0),), ((1,),), ((200,),)], 2))
def test_a_batch_holds_the_bytes_that_were_written(shape):
    dtypes = {name: tf.as_dtype(name) for name in module._DTYPES - {"string"}}
    written = {
        name: np.random.default_rng(0)
        .integers(0, 2 if name == "bool" else 256, (5, dtype.size * int(np.prod(shape))), np.uint8)
        .view(dtype.as_numpy_dtype)
        .reshape(5, *shape)
        for name, dtype in dtypes.items()
    }
    spec = {name: tf.TensorSpec(shape, dtype) for name, dtype in dtypes.items()}
    examples = [{name: tf.constant(rows[row], dtypes[name]) for name, rows in written.items()} for row in range(5)]
    records, unpack_all = packed(spec, examples)
    for count in (1, 5):
        for name, batch in unpack_all(records[:count]).items():
            assert batch.dtype == dtypes[name]
            assert batch.shape == (count, *shape)
            assert batch.numpy().tobytes() == written[name][:count].tobytes()  # the bits of a NaN, too


def test_a_batch_keeps_structure_strings_and_static_shape():
    spec = {"b": (tf.TensorSpec((), tf.string), tf.TensorSpec((2,), tf.int16)), "a": tf.TensorSpec((), tf.float32)}
    texts, pairs, numbers = [b"", b"\xff\x00", b"x" * 1000], [[1, 2], [-3, 4], [5, 6]], [0.5, float("inf"), -0.0]
    examples = [
        {"b": (tf.constant(text), tf.constant(pair, tf.int16)), "a": tf.constant(number)}
        for text, pair, number in zip(texts, pairs, numbers, strict=True)
    ]
    records, unpack_all = packed(spec, examples)
    batch = unpack_all(records)
    tf.nest.assert_same_structure(batch, spec)
    assert batch["b"][0].numpy().tolist() == texts
    np.testing.assert_array_equal(batch["b"][1].numpy(), np.array(pairs, np.int16), strict=True)
    np.testing.assert_array_equal(batch["a"].numpy(), np.array(numbers, np.float32), strict=True)
    dataset = tf.data.Dataset.from_tensor_slices(records)
    for drop in (True, False):
        single = dataset.map(lambda record: unpack(describe(spec), record)).batch(3, drop_remainder=drop)
        assert dataset.batch(3, drop_remainder=drop).map(unpack_all).element_spec == single.element_spec


def test_what_was_written_is_not_unpacked_one_by_one(monkeypatch):
    spec = (tf.TensorSpec((), tf.string), tf.TensorSpec((2,), tf.bool), tf.TensorSpec((3, 0), tf.int8))
    records, _ = packed(spec, [(tf.constant(b"x"), tf.constant([True, False]), tf.zeros((3, 0), tf.int8))] * 2)
    monkeypatch.setattr(tf, "map_fn", lambda *_, **__: pytest.fail("one by one"))
    assert unpack_batch(describe(spec), records)[1].numpy().tolist() == [[True, False]] * 2


def test_a_batch_reads_what_another_program_wrote():
    def encoded(numbers):  # as float_val, in place of the bytes; TensorFlow repeats the last one
        return tf.make_tensor_proto(numbers, tf.float32, (3,)).SerializeToString()

    described = describe(tf.TensorSpec((3,), tf.float32))
    records = [pack(["value"], [encoded([number] * 3)]) for number in (1, 2)]
    records.append(record_of(tf.constant([3.0, 4.0, 5.0])))
    batch = tf.function(unpack_batch)(described, tf.constant(records))
    assert batch.numpy().tolist() == [[1, 1, 1], [2, 2, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (tf.zeros(3, tf.int32), r"Shape of tensor .* \[3\] is not compatible with expected shape \[2\]"),
        (tf.zeros((2, 1), tf.int32), r"Shape of tensor .* \[2,1\] is not compatible with expected shape \[2\]"),
        (tf.zeros(2, tf.float32), r"Type mismatch between parsed tensor \(float\) and dtype \(int32\)"),
        (tf.zeros(2, tf.uint32), r"Type mismatch between parsed tensor \(uint32\) and dtype \(int32\)"),
        (b"", "Cannot parse tensor from proto"),
        (b"\x08\x03 no tensor", "Could not parse"),
        (b"cut", "Could not parse"),
        (b"longer", "Could not parse"),
    ],
)
def test_one_bad_tensor_of_a_batch_raises_as_it_does_alone(value, found):
    described = describe(tf.TensorSpec((2,), tf.int32))
    whole = tf.io.serialize_tensor(tf.zeros(2, tf.int32)).numpy()
    if not isinstance(value, bytes):
        value = tf.io.serialize_tensor(value).numpy()
    value = {b"cut": whole[:-1], b"longer": whole + b"\x00"}.get(value, value)
    bad, good = pack(["value"], [value]), pack(["value"], [whole])
    for function, given in ((unpack, bad), (unpack_batch, [good, bad, good])):
        with pytest.raises(tf.errors.InvalidArgumentError, match=found):
            tf.function(function)(described, tf.constant(given))


@pytest.mark.parametrize("shape", [None, (None, 2)])
def test_unknown_shapes_and_vectors_of_strings_are_unpacked_one_by_one(shape):
    assert not unpacks_in_batches(describe((tf.TensorSpec((), tf.int32), tf.TensorSpec(shape, tf.int32))))
    assert not unpacks_in_batches(describe(tf.TensorSpec((2,), tf.string)))


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
# Of its file: another would be refused as damaged.
BYTES = "43a0d43e156c3dd7cd46addc3f724c1d422955d65f1e8b33c7849b35245e50b6"


def test_an_index_is_read_back(tmp_path):
    write_index(str(tmp_path), INDEX)
    assert has_index(str(tmp_path))
    assert read_index(str(tmp_path)) == INDEX
    assert INDEX.count == 5
    text = (tmp_path / INDEX_NAME).read_text()
    assert hashlib.sha256(text.encode()).hexdigest() == BYTES
    values = json.loads(text)
    assert values["shards"][1]["sha256"] == "11ee"
    del values["checksum"], values["format"], values["version"], values["only_jpeg"]  # a field that came later
    (tmp_path / INDEX_NAME).write_text(module._text(values))
    assert read_index(str(tmp_path)) == INDEX


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
