import keras
import numpy as np
import pytest
import tensorflow as tf

from tfopt.pipelines.shared.nondeterminism import find_in_dataset, find_in_function, kind_of_operation

GENERATOR = tf.random.Generator.from_seed(1)
SCALAR = tf.TensorSpec((), tf.float32)


def noise(value):
    return value + tf.random.normal(())


@tf.function
def nested(value):
    return noise(value)


def in_map(value):
    return tf.reduce_sum(tf.map_fn(noise, tf.stack([value, value])))


def in_loop(value):
    return tf.while_loop(lambda x: x < 3, lambda x: x + tf.random.uniform(()), [value])[0]


def in_branch(value):
    return tf.cond(value > 0, lambda: noise(value), lambda: value)


def in_switch(value):
    return tf.switch_case(tf.cast(value, tf.int32), [lambda: noise(value), lambda: value])


IMAGE = tf.TensorSpec((4, 4, 3), tf.float32)
SEEDS, FLIP = keras.random.SeedGenerator(1), keras.layers.RandomFlip(seed=1)
TABLE = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([1], [2]), 0)


def deterministic(value):
    tf.debugging.assert_less(value, 1e9)
    return tf.random.stateless_normal((), (1, 2)) + value, TABLE.lookup(tf.cast(value, tf.int32))


@pytest.mark.parametrize(
    ("function", "spec", "expected"),
    [
        *((function, SCALAR, {"random"}) for function in (noise, nested, in_map, in_loop, in_branch, in_switch)),
        (lambda value: value + GENERATOR.normal(()), SCALAR, {"random"}),
        (tf.image.random_flip_left_right, IMAGE, {"random"}),
        (lambda image: tf.image.random_crop(image, (2, 2, 3)), IMAGE, {"random"}),
        (tf.random.shuffle, IMAGE, {"random"}),
        (lambda value: value + keras.random.normal((), seed=SEEDS), SCALAR, {"assigning", "reading"}),
        (lambda image: FLIP(image, training=True), IMAGE, {"assigning", "reading"}),
        (lambda value: tf.py_function(np.sin, [value], tf.float32), SCALAR, {"opaque"}),
        (lambda value: tf.numpy_function(np.sin, [value], tf.float32), SCALAR, {"opaque"}),
        (deterministic, SCALAR, set()),
    ],
)
def test_operations_are_found_wherever_they_hide(function, spec, expected):
    traced = tf.function(function).get_concrete_function(spec)
    assert {finding.kind for finding in find_in_function(traced)} == expected


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("random", "Timestamp NonDeterministicInts RngSkip StatefulUniform CudnnRNN RandomGamma Multinomial"),
        ("random", "ShuffleDatasetV3 SampleDistortedBoundingBoxV2 AnonymousSeedGenerator UniformCandidateSampler"),
        ("assigning", "AssignAddVariableOp ResourceScatterNdMax LookupTableInsertV2 ResourceStridedSliceAssign"),
        (None, "StatefulPartitionedCall StatelessRandomUniformV2 Print MapDataset LookupTableFindV2 __inference_f_1"),
    ],
)
def test_the_kind_of_an_operation_follows_from_its_registration(kind, names):
    assert {name: kind_of_operation(name) for name in names.split()} == dict.fromkeys(names.split(), kind)


RANGE = tf.data.Dataset.range(3)


def random_inside(number):
    return tf.data.Dataset.from_tensors(number).map(lambda x: tf.cast(x, tf.float32)).map(noise)


@pytest.mark.parametrize(
    ("dataset", "kinds"),
    [
        (lambda: RANGE.flat_map(random_inside).batch(2).prefetch(1), ["random"]),
        (lambda: tf.data.Dataset.zip(RANGE, tf.data.Dataset.random()), ["random"]),
        (lambda: tf.data.Dataset.random(seed=1, rerandomize_each_iteration=True), ["random"]),
        (lambda: tf.data.Dataset.random(seed=1), []),
        (lambda: RANGE.map(lambda x: x + 1).cache(), []),
        (lambda: RANGE.shuffle(3).map(lambda x: x), ["shuffle"]),
        (lambda: RANGE.shuffle(3, seed=1), ["shuffle"]),
        (lambda: RANGE.shuffle(3, reshuffle_each_iteration=False), ["shuffle"]),
        (lambda: RANGE.shuffle(3, seed=1, reshuffle_each_iteration=False), []),
    ],
)
def test_datasets_are_searched_to_their_roots(dataset, kinds):
    assert [finding.kind for finding in find_in_dataset(dataset())] == kinds
