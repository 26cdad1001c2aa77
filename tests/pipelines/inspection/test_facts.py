import pathlib
import random
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from unwrapped import unwrapped

from tfopt.errors import PipelineError
from tfopt.pipelines import Source, arrays, build_pipeline, plan_pipeline

IMAGES = np.zeros((8, 4, 4, 3), np.float32)


def flip(image):
    return tf.image.random_flip_left_right(image)


def python(image):
    result = tf.py_function(lambda x: x + 1, [image], tf.float32)
    result.set_shape(image.shape)
    return result


def flip_with_seed(image, seed):
    return tf.image.stateless_random_flip_left_right(image, seed)


def both(image, *, seed):
    return flip_with_seed(flip(image), seed)


def python_with_seed(image, *, seed):
    return python(flip_with_seed(image, seed))


def plan(source=IMAGES, **options):
    return plan_pipeline(source, batch_size=2, **options)


@pytest.mark.parametrize("cache", ["auto", "memory"])
def test_a_random_transform_before_the_cache_is_refused_by_name(cache, free_memory):
    free_memory(0.0)  # nothing would fit: refused all the same
    text = r"`transform`.*RandomUniform \(transform/.*freeze.*`augment`.*cache=None"
    with pytest.raises(ValueError, match=text):
        plan(transform=flip, cache=cache)


def test_a_keras_layer_before_the_cache_is_refused():
    with pytest.raises(ValueError, match=r"AssignVariableOp.*freeze"):
        plan(transform=keras.layers.RandomFlip(seed=1))


def test_a_random_transform_without_a_cache_draws_anew_in_each_epoch():
    def noisy(image):
        return image + tf.random.normal(())

    dataset = build_pipeline(IMAGES, batch_size=8, transform=noisy, cache=None)
    first, second = (next(iter(dataset)).numpy() for _ in range(2))
    assert not np.array_equal(first, second)


@pytest.mark.parametrize("options", [{}, {"cache": "memory"}])
def test_a_random_source_before_the_cache_is_refused(options):
    source = tf.data.Dataset.from_tensor_slices(IMAGES).map(flip)
    with pytest.raises(ValueError, match=r"deterministic source.*RandomUniform.*freeze.*`augment`.*cache=None"):
        plan(source, **options)
    plan(source, cache=None)


def test_a_source_whose_order_the_cache_would_freeze_is_refused():
    source = tf.data.Dataset.from_tensor_slices(IMAGES).shuffle(8)
    with pytest.raises(ValueError, match=r"Dataset\.shuffle.*freeze its order.*shuffle=True"):
        plan(source, shuffle=False)
    plan(source)
    plan(source, shuffle=False, cache=None)
    plan(source, training=False)


def test_python_before_the_cache_is_not_cached_unasked():
    assert plan(transform=python).to_dict()["cache"] is None
    assert "calls Python" in unwrapped(plan(transform=python))
    assert plan(transform=python, cache="memory").to_dict()["cache"] == "memory"


@pytest.mark.parametrize("augment", [flip, python, both])
def test_an_augment_that_a_seed_could_not_repeat_is_refused(augment):
    with pytest.raises(ValueError, match=r"`augment`.*(RandomUniform|PyFunc) .*keyword `seed`.*stateless.*seed=None"):
        plan(augment=augment, seed=1)
    plan(augment=augment)


@pytest.mark.parametrize("augment", [flip_with_seed, python_with_seed])
def test_an_augment_that_takes_the_seed_is_not(augment):
    assert "a fresh seed each time" in unwrapped(plan(augment=augment, seed=1))


def test_a_keras_layer_under_a_seed_is_refused():
    with pytest.raises(ValueError, match=r"`augment`.*AssignVariableOp"):
        plan(augment=keras.layers.RandomFlip(seed=1), seed=1)


def test_a_random_transform_under_a_seed_is_refused_without_a_cache_too():
    with pytest.raises(ValueError, match=r"`transform`.*seed=1 could not.*keyword `seed`"):
        plan(transform=flip, seed=1, cache=None)


@pytest.mark.parametrize("make", [lambda data: data.shuffle(8), lambda data: data.shuffle(8, seed=1)])
def test_a_source_that_shuffles_under_a_seed_is_refused(make):
    with pytest.raises(ValueError, match=r"deterministic source.*Dataset\.shuffle.*seed=1"):
        plan(make(tf.data.Dataset.from_tensor_slices(IMAGES)), seed=1)


@pytest.mark.parametrize("nested", [False, True])
def test_a_seed_refuses_a_source_without_an_order(nested):
    def free(numbers):
        return numbers.map(lambda number: number + 1, num_parallel_calls=2, deterministic=False)

    numbers = tf.data.Dataset.range(8)
    source = numbers.interleave(lambda first: free(tf.data.Dataset.range(first))) if nested else free(numbers)
    with pytest.raises(ValueError, match=r"deterministic source.*ParallelMap.*seed=1 could not"):
        plan_pipeline(source, batch_size=2, seed=1)
    assert plan_pipeline(source, batch_size=2).stage("order").setting == "drawn"


def test_nothing_is_refused_without_need():
    source = tf.data.Dataset.from_tensor_slices(IMAGES).shuffle(8, seed=1, reshuffle_each_iteration=False)
    plan(source, seed=1)
    plan(arrays(IMAGES), transform=tf.image.per_image_standardization, augment=flip_with_seed, seed=1)


@pytest.mark.filterwarnings("ignore:Seed 1 from outer graph")
def test_an_augment_that_would_repeat_itself_in_every_epoch_is_refused():
    def seeded_flip(image):
        return tf.image.random_flip_left_right(image, seed=3)

    text = r"'augment' to draw new numbers in each epoch.*RandomUniform.*fixed seed.*set_random_seed.*keyword `seed`"
    with pytest.raises(ValueError, match=text):
        plan(augment=seeded_flip)
    with pytest.raises(ValueError, match="'transform' to draw new numbers"):
        plan(transform=seeded_flip, cache=None)
    early = plan(augment=flip)
    tf.random.set_seed(1)
    with pytest.raises(ValueError, match=text):
        plan(augment=flip)
    with pytest.raises(ValueError, match=text):
        early.build()
    plan(augment=flip_with_seed)


def test_stock_repeats_itself_under_a_global_seed():
    """The defect behind the refusal above; if this fails, TensorFlow has mended it."""
    tf.random.set_seed(1)
    dataset = tf.data.Dataset.range(8).map(lambda _: tf.random.uniform(()))
    first, second = ([float(draw) for draw in dataset] for _ in range(2))
    assert first == second


GENERATOR = np.random.default_rng()


def by_numpy(image):
    return image + np.random.rand()


def by_python(image):
    return image * random.random()


def by_array(image):
    return image + tf.constant(GENERATOR.random(image.shape), tf.float32)


def nested(image):
    return tf.map_fn(lambda row: tf.cond(row[0, 0] > 0, lambda: row, lambda: by_numpy(row)), image)


def with_seed(image, *, seed):
    return by_numpy(flip_with_seed(image, seed))


@pytest.mark.parametrize("function", [by_numpy, by_python, by_array, nested, tf.function(by_numpy)])
@pytest.mark.parametrize("stage", ["transform", "augment"])
def test_draws_of_numpy_and_python_are_refused(stage, function):
    text = rf"Expected '{stage}' to be the same.*Found a draw from `.*every.*keyword `seed`.*tf\.random"
    with pytest.raises(ValueError, match=text):
        plan(**{stage: function}, cache=None)


def test_draws_of_numpy_are_refused_beside_a_seed_and_in_a_decode():
    with pytest.raises(ValueError, match="Expected 'augment' to be the same"):
        plan(augment=with_seed, seed=1)
    source = Source(name="noisy", dataset=lambda: tf.data.Dataset.from_tensor_slices(IMAGES), decode=by_numpy)
    with pytest.raises(ValueError, match="Expected 'decode' to be the same"):
        plan(source)


def test_a_branch_drawn_by_python_is_refused():
    turns = iter([tf.sin, tf.cos, tf.sin, tf.cos])
    with pytest.raises(ValueError, match=r"Found an operation (Sin|Cos) and then an operation (Sin|Cos)"):
        plan(transform=lambda image: next(turns)(image))


@pytest.mark.slow
def test_functions_that_only_look_as_if_they_drew_are_not_refused():
    layer = keras.layers.Dense(2)  # built when first traced
    plan(transform=lambda image: layer(image), cache=None)
    plan(transform=lambda image: image + np.random.default_rng(0).random())
    plan(augment=keras.layers.RandomFlip(seed=1))
    table = np.random.rand(1000).astype("float32")
    plan(transform=lambda image: image + tf.gather(table, tf.cast(image, tf.int32)))
    plan(augment=python)
    plan(augment=flip)

    def asserts(image):
        image = keras.layers.Rescaling(1 / 255)(image)  # another layer, of another name, in each trace
        tf.debugging.assert_less(image, 5.0)
        return image

    plan(transform=asserts)


@pytest.mark.parametrize("layer", [keras.layers.Rescaling(1.0), keras.Sequential([keras.layers.Rescaling(1.0)])])
def test_a_bare_layer_is_refused_for_tuples(layer):
    with pytest.raises(TypeError, match="Wrap it: lambda image, label"):
        build_pipeline((np.zeros((8, 4)), np.arange(8)), batch_size=4, transform=layer)


def test_a_variable_is_not_cached_over_unasked():
    scale = tf.Variable(2.0)

    def scaled(image):
        return image + scale

    assert re.search(r"ReadVariableOp \(.*\) reads a variable, which may change", unwrapped(plan(transform=scaled)))
    dataset = build_pipeline(IMAGES, batch_size=8, transform=scaled)
    assert float(next(iter(dataset))[0, 0, 0, 0]) == 2.0
    scale.assign(3.0)
    assert float(next(iter(dataset))[0, 0, 0, 0]) == 3.0
    assert plan(transform=scaled, cache="memory").to_dict()["cache"] == "memory"
    assert plan(tf.data.Dataset.from_tensor_slices(IMAGES).map(scaled)).to_dict()["cache"] is None


@pytest.mark.parametrize("stage", ["transform", "augment"])
@pytest.mark.parametrize("returned", [lambda image: None, lambda image: (image, None), lambda image: {"x": (None,)}])
def test_none_is_refused_by_stage(stage, returned):
    with pytest.raises(
        PipelineError, match=rf"Expected tensors from the pipeline's stage '{stage}'.*Found None.*Return"
    ):
        plan(**{stage: returned})


def test_sources_of_none_or_of_datasets_are_refused():
    numbers = tf.data.Dataset.range(4)
    for source, found in ((numbers.map(lambda x: (x, None)), "None"), (numbers.window(2), "a dataset")):
        with pytest.raises(PipelineError, match=f"stage 'read'.*Found {found} in"):
            plan(source)


def misshapen(image):
    return tf.reshape(image, (7, 7))


def by_helper(image):
    if tf.reduce_sum(image) > 0:
        image += 1
    return misshapen(image)


@pytest.mark.parametrize("stage", ["transform", "augment"])
@pytest.mark.parametrize(
    ("function", "lines"),
    [
        (by_helper, ["return misshapen(image)", "return tf.reshape(image, (7, 7))"]),
        (tf.function(misshapen), ["return tf.reshape(image, (7, 7))"]),
        (tf.autograph.experimental.do_not_convert(misshapen), ["return tf.reshape(image, (7, 7))"]),
        (lambda image: image.nothing, ["image.nothing"]),
    ],
)
def test_an_error_in_a_function_shows_its_lines_and_none_of_ours(stage, function, lines):
    with pytest.raises(PipelineError, match=rf"stage '{stage}' .* failed .*Error: in user code") as caught:
        plan(**{stage: function}, cache=None)
    found = re.findall(r'File "(.*)", line (\d+), in .*\n\s+(.*)\n', str(caught.value))
    assert [file for file, _, _ in found] == [__file__] * len(lines)
    source = pathlib.Path(__file__).read_text().splitlines()
    for (_, number, shown), line in zip(found, lines, strict=True):
        assert line in shown
        assert line in source[int(number) - 1]


class Both(keras.layers.Layer):
    def call(self, image, label):
        return image, label


def test_a_layer_for_one_input_is_refused_where_examples_are_tuples():
    pairs = (IMAGES, np.zeros(8))
    for layer in (keras.layers.RandomFlip(), keras.layers.Rescaling(2.0)):
        with pytest.raises(
            TypeError, match=r"function of 2 arguments for 'augment'.*lambda image, label: \(layer\(image"
        ):
            plan(pairs, augment=layer)
    plan(pairs, augment=lambda image, label: (layer(image), label))
    plan(pairs, augment=Both())
    plan(IMAGES, augment=keras.layers.Rescaling(2.0))
