import keras
import numpy as np
import pytest
import tensorflow as tf

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
    assert plan(transform=python).layout.cached is False
    assert "calls Python" in str(plan(transform=python))
    assert plan(transform=python, cache="memory").layout.cached is True


@pytest.mark.parametrize("augment", [flip, python, both])
def test_an_augment_that_a_seed_could_not_repeat_is_refused(augment):
    with pytest.raises(ValueError, match=r"`augment`.*(RandomUniform|PyFunc) .*keyword `seed`.*stateless.*seed=None"):
        plan(augment=augment, seed=1)
    plan(augment=augment)


@pytest.mark.parametrize("augment", [flip_with_seed, python_with_seed])
def test_an_augment_that_takes_the_seed_is_not(augment):
    assert plan(augment=augment, seed=1).layout.takes_seed


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


def test_nothing_is_refused_without_need():
    source = tf.data.Dataset.from_tensor_slices(IMAGES).shuffle(8, seed=1, reshuffle_each_iteration=False)
    plan(source, seed=1)
    plan(arrays(IMAGES), transform=tf.image.per_image_standardization, augment=flip_with_seed, seed=1)


def test_an_augment_that_would_repeat_itself_in_every_epoch_is_refused():
    def seeded_flip(image):
        return tf.image.random_flip_left_right(image, seed=3)

    text = r"'augment' to draw anew.*RandomUniform.*fixed seed.*set_random_seed.*keyword `seed`"
    with pytest.raises(ValueError, match=text):
        plan(augment=seeded_flip)
    with pytest.raises(ValueError, match="'transform' to draw anew"):
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
