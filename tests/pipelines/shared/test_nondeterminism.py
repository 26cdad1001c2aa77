import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from tfopt.pipelines.shared import nondeterminism
from tfopt.pipelines.shared.nondeterminism import find_in_dataset, find_in_function

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


def by_generator(value):
    return value + GENERATOR.normal(())


def kinds(function, *spec):
    traced = tf.function(function).get_concrete_function(*(spec or (SCALAR,)))
    return {finding.kind for finding in find_in_function(traced)}


@pytest.mark.parametrize("function", [noise, nested, in_map, in_loop, in_branch, in_switch, by_generator])
def test_random_operations_are_found_wherever_they_hide(function):
    assert "random" in kinds(function)


@pytest.mark.parametrize(
    "function",
    [
        tf.image.random_flip_left_right,
        lambda image: tf.image.random_brightness(image, 0.1),
        lambda image: tf.image.random_crop(image, (2, 2, 3)),
        tf.random.shuffle,
    ],
)
def test_image_operations_are_found(function):
    assert kinds(function, tf.TensorSpec((4, 4, 3), tf.float32)) == {"random"}


def test_keras_seed_generators_are_found():
    generator = keras.random.SeedGenerator(1)
    layer = keras.layers.RandomFlip(seed=1)
    assert kinds(lambda value: value + keras.random.normal((), seed=generator)) == {"assigning", "reading"}
    assert "assigning" in kinds(lambda image: layer(image, training=True), tf.TensorSpec((4, 4, 3), tf.float32))


def test_python_is_opaque():
    assert kinds(lambda value: tf.py_function(np.sin, [value], tf.float32)) == {"opaque"}
    assert kinds(lambda value: tf.numpy_function(np.sin, [value], tf.float32)) == {"opaque"}


def test_deterministic_operations_are_not_found():
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([1], [2]), 0)

    def function(value):
        tf.debugging.assert_less(value, 1e9)
        return (
            tf.random.stateless_normal((), (1, 2)) + value + tf.cast(table.lookup(tf.cast(value, tf.int32)), tf.float32)
        )

    assert kinds(function) == set()


def test_datasets_are_searched_to_their_roots():
    def inner(number):
        return tf.data.Dataset.from_tensors(number).map(lambda x: tf.cast(x, tf.float32)).map(noise)

    random = tf.data.Dataset.range(3).flat_map(inner).batch(2).prefetch(1)
    assert [finding.kind for finding in find_in_dataset(random)] == ["random"]
    zipped = tf.data.Dataset.zip(tf.data.Dataset.range(3), tf.data.Dataset.random())
    assert [str(finding) for finding in find_in_dataset(zipped)] == ["Dataset.random"]
    again = tf.data.Dataset.random(seed=1, rerandomize_each_iteration=True)
    assert [str(finding) for finding in find_in_dataset(again)] == ["Dataset.random"]
    assert find_in_dataset(tf.data.Dataset.random(seed=1)) == []
    assert find_in_dataset(tf.data.Dataset.range(3).map(lambda x: x + 1).cache()) == []


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ({}, True),
        ({"seed": 1}, True),
        ({"reshuffle_each_iteration": False}, True),
        ({"seed": 1, "reshuffle_each_iteration": False}, False),
    ],
)
def test_a_shuffle_is_found_unless_it_is_the_same_every_time(arguments, found):
    shuffled = tf.data.Dataset.range(3).shuffle(3, **arguments).map(lambda x: x)
    assert [finding.kind for finding in find_in_dataset(shuffled)] == ["shuffle"] * found


def test_every_random_operation_of_tensorflow_is_known():
    known = nondeterminism._RANDOM | nondeterminism._ASSIGNING
    definitions = [op_def_registry.get(name) for name in dir(tf.raw_ops)]
    seeded = {
        definition.name
        for definition in definitions
        if definition and definition.is_stateful and any(attribute.name == "seed" for attribute in definition.attr)
    }
    by_name = {
        definition.name
        for definition in definitions
        if definition and definition.is_stateful and definition.name.startswith(("Stateful", "Rng", "NonDet", "Random"))
    } - {"StatefulPartitionedCall"}
    assert len(seeded | by_name) > 25
    assert (seeded | by_name) - known == set()
