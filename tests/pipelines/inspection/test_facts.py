import pathlib
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from unwrapped import unwrapped

from tfopt.errors import PipelineError
from tfopt.pipelines import arrays, build_pipeline, plan_pipeline

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


def seeded_flip(image):
    return tf.image.random_flip_left_right(image, seed=3)


def dataset_of(*, then=lambda dataset: dataset):
    return then(tf.data.Dataset.from_tensor_slices(IMAGES))


def unordered(numbers):
    return numbers.map(lambda number: number + 1, num_parallel_calls=2, deterministic=False)


def in_map(image):
    return tf.map_fn(flip, image[tf.newaxis])[0]


def in_loop(image):
    return tf.while_loop(lambda x: tf.reduce_sum(x) < 3, lambda x: x + tf.random.uniform(()), [image])[0]


def in_branch(image):
    return tf.cond(tf.reduce_sum(image) > 0, lambda: flip(image), lambda: image)


def in_switch(image):
    return tf.switch_case(tf.cast(image[0, 0, 0], tf.int32), [lambda: flip(image), lambda: image])


NUMBERS = tf.data.Dataset.range(8)
GENERATOR = tf.random.Generator.from_seed(1)
LAYER = keras.layers.RandomFlip(seed=1)
RANDOM_SOURCE = dataset_of(then=lambda data: data.map(flip))
SHUFFLED = dataset_of(then=lambda data: data.shuffle(8))
SHUFFLED_BY_SEED = dataset_of(then=lambda data: data.shuffle(8, seed=1))
NESTED = NUMBERS.interleave(lambda first: unordered(tf.data.Dataset.range(first)))


def noises(number):
    return tf.data.Dataset.from_tensors(number).map(lambda _: tf.random.normal(()))


FROZEN = r"deterministic `transform`. It holds RandomUniform \(transform/.*freeze.*`augment`.*cache=None"
FROZEN_SOURCE = r"deterministic source.*RandomUniform.*freeze.*`augment`.*cache=None"
UNSEEDED = r"`augment`.*(RandomUniform|PyFunc) .*keyword `seed`.*stateless.*seed=None"
UNORDERED = r"deterministic source.*ParallelMap.*seed=1 could not"
REPEATED = r"to draw new numbers in each epoch.*RandomUniform.*fixed seed.*set_random_seed.*keyword `seed`"


@pytest.mark.parametrize(
    ("source", "options", "text"),
    [
        # A cache would freeze what is drawn.
        *((IMAGES, {"transform": flip, "cache": cache}, FROZEN) for cache in ("auto", "memory")),
        # Wherever it hides.
        *((IMAGES, {"transform": each}, "RandomUniform.*freeze") for each in (in_map, in_loop, in_branch, in_switch)),
        (IMAGES, {"transform": tf.function(flip)}, "RandomUniform.*freeze"),
        (IMAGES, {"transform": lambda image: image + GENERATOR.normal(())}, "RngReadAndSkip.*freeze"),
        (IMAGES, {"transform": tf.random.shuffle}, "RandomShuffle.*freeze"),
        (IMAGES, {"transform": LAYER}, "AssignVariableOp.*freeze"),
        (NUMBERS.flat_map(noises).batch(2).unbatch(), {}, "RandomStandardNormal.*freeze"),
        (tf.data.Dataset.zip(NUMBERS, tf.data.Dataset.random()), {}, r"Dataset\.random.*freeze"),
        (tf.data.Dataset.random(seed=1, rerandomize_each_iteration=True).take(8), {}, r"Dataset\.random.*freeze"),
        *((RANDOM_SOURCE, options, FROZEN_SOURCE) for options in ({}, {"cache": "memory"})),
        (SHUFFLED, {"shuffle": False}, r"Dataset\.shuffle.*freeze its order.*shuffle=True"),
        # A seed could not repeat it.
        *((IMAGES, {"augment": function, "seed": 1}, UNSEEDED) for function in (flip, python, both)),
        (IMAGES, {"augment": LAYER, "seed": 1}, "`augment`.*AssignVariableOp"),
        (IMAGES, {"transform": flip, "seed": 1, "cache": None}, "`transform`.*seed=1 could not.*keyword `seed`"),
        *((data, {"seed": 1}, "source.*Dataset\\.shuffle.*seed=1") for data in (SHUFFLED, SHUFFLED_BY_SEED)),
        *((data, {"seed": 1}, UNORDERED) for data in (unordered(NUMBERS), NESTED)),
        # Every epoch would repeat it.
        (IMAGES, {"augment": seeded_flip}, f"'augment' {REPEATED}"),
        (IMAGES, {"transform": seeded_flip, "cache": None}, f"'transform' {REPEATED}"),
    ],
)
def test_draws_are_refused_by_name(source, options, text, free_memory):
    free_memory(0.0)  # no cache would fit: refused all the same
    with pytest.raises(ValueError, match=text):
        plan(source, **options)


TABLE = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([1], [2]), 0)


def deterministic(image):
    tf.debugging.assert_less(image, 1e9)
    return tf.random.stateless_normal((), (1, 2)) + image, TABLE.lookup(tf.cast(image, tf.int32))


@pytest.mark.parametrize(
    ("source", "options"),
    [
        (RANDOM_SOURCE, {"cache": None}),
        (SHUFFLED, {}),
        (SHUFFLED, {"shuffle": False, "cache": None}),
        (SHUFFLED, {"training": False}),
        (tf.data.Dataset.random(seed=1).take(8), {"seed": 1}),
        (IMAGES, {"transform": deterministic, "seed": 1}),
        *((IMAGES, {"augment": function}) for function in (flip, python, both)),
        (dataset_of(then=lambda data: data.shuffle(8, seed=1, reshuffle_each_iteration=False)), {"seed": 1}),
        (arrays(IMAGES), {"transform": tf.image.per_image_standardization, "augment": flip_with_seed, "seed": 1}),
    ],
)
def test_nothing_is_refused_without_need(source, options):
    plan(source, **options)


def test_python_before_the_cache_is_not_cached_unasked():
    assert plan(transform=python).to_dict()["cache"] is None
    assert "calls Python" in unwrapped(plan(transform=python))
    assert plan(transform=python, cache="memory").to_dict()["cache"] == "memory"


@pytest.mark.parametrize("augment", [flip_with_seed, python_with_seed])
def test_an_augment_that_takes_the_seed_is_not(augment):
    assert "a fresh seed each time" in unwrapped(plan(augment=augment, seed=1))


@pytest.mark.parametrize("source", [unordered(NUMBERS), NESTED])
def test_a_source_without_an_order_draws_its_order(source):
    assert plan(source).stage("order").setting == "drawn"


@pytest.mark.filterwarnings("ignore:Seed 1 from outer graph")
def test_an_augment_that_a_global_seed_makes_repeat_itself_is_refused():
    early = plan(augment=flip)
    tf.random.set_seed(1)
    for build in (lambda: plan(augment=flip), early.build):
        with pytest.raises(ValueError, match=f"'augment' {REPEATED}"):
            build()
    plan(augment=flip_with_seed)


def test_stock_repeats_itself_under_a_global_seed():
    """The defect behind the refusal above; if this fails, TensorFlow has mended it."""
    tf.random.set_seed(1)
    dataset = tf.data.Dataset.range(8).map(lambda _: tf.random.uniform(()))
    first, second = ([float(draw) for draw in dataset] for _ in range(2))
    assert first == second


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


PAIRS = (IMAGES, np.zeros(8))
SCALED = keras.layers.Rescaling(2.0)


@pytest.mark.parametrize("stage", ["transform", "augment"])
@pytest.mark.parametrize("layer", [SCALED, keras.Sequential([keras.layers.Rescaling(1.0)])])
def test_a_layer_for_one_input_is_refused_where_examples_are_tuples(stage, layer):
    text = rf"function of 2 arguments for '{stage}'.*Wrap it: lambda image, label: \(layer\(image"
    with pytest.raises(TypeError, match=text):
        plan(PAIRS, **{stage: layer})


@pytest.mark.parametrize(
    ("data", "augment"),
    [(PAIRS, lambda image, label: (SCALED(image), label)), (PAIRS, Both()), (IMAGES, SCALED)],
    ids=["wrapped", "of two inputs", "no tuples"],
)
def test_a_layer_that_takes_all_inputs_is_not(data, augment):
    plan(data, augment=augment)
