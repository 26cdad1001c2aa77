import json

import numpy as np
import pytest
import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.pipelines.tfrecords.spec import describe, features, pack, restore, to_strings, unpack

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
