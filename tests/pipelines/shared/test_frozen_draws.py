import functools
import random
import threading
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from quick import first_quick

from tfopt.pipelines import Source, plan_pipeline

IMAGES = np.zeros((8, 4, 4, 3), np.float32)
PYTHON, NUMPY, LEGACY = random.Random(1), np.random.default_rng(1), np.random.RandomState(1)
HELPERS = types.ModuleType("helpers")
HELPERS.generator = np.random.default_rng(2)


def plan(function, stage="augment"):
    return plan_pipeline(IMAGES, batch_size=2, cache=None, **{stage: function})


def by_python(image):
    return -image if random.random() < 0.5 else image


def by_numpy(image):
    return -image if np.random.rand() < 0.5 else image


def by_global(image):
    return -image if PYTHON.random() < 0.5 else image


def by_helper(image):
    return by_global(image)


def by_module(image):
    return -image if HELPERS.generator.random() < 0.5 else image


def by_closure():
    generator = np.random.default_rng(3)

    def inner(image):
        return tf.map_fn(lambda row: -row if generator.random() < 0.5 else row, image)

    return inner


def by_default(image, own=LEGACY):
    return -image if own.rand() < 0.5 else image


def by_argument(image, own):
    return -image if own.random() < 0.5 else image


class Flipper:
    def __init__(self):
        self.generators = {"flip": np.random.RandomState(4)}

    def flip(self, image):
        return -image if self.generators["flip"].rand() < 0.5 else image

    def __call__(self, image):
        return self.flip(image)


FROZEN = {
    "Python's": (by_python, "`random`"),
    "NumPy's": (by_numpy, r"`np\.random`"),
    "global": (by_global, "`PYTHON`"),
    "helper": (by_helper, "`PYTHON`"),
    "module": (by_module, r"`HELPERS\.generator`"),
    "closure": (by_closure(), "`generator`"),
    "default": (by_default, "`own`"),
    "partial": (functools.partial(by_argument, own=NUMPY), "`own`"),
    "method": (Flipper().flip, "`flip`"),
    "object": (Flipper(), "`flip`"),
    "tf.function": (tf.function(by_global), "`PYTHON`"),
    "layer": (keras.layers.AugMix(), "`random`"),
}


def states():
    numpy = np.random.get_state()
    return random.getstate(), PYTHON.getstate(), NUMPY.bit_generator.state, LEGACY.get_state()[2], numpy[2]


@pytest.mark.parametrize(
    ("stage", "kind"), first_quick([("transform", "global"), *(("augment", kind) for kind in FROZEN)], 4)
)
def test_every_build_finds_a_frozen_draw_and_puts_the_state_back(stage, kind):
    """Comparing two traces finds a branch on a coin in some builds only."""
    function, name = FROZEN[kind]
    before = states()
    for _ in range(1 if kind == "layer" else 4):
        with pytest.raises(ValueError, match=rf"Expected '{stage}' to be the same.*Found a draw from {name}.*every el"):
            plan(function, stage)
    assert states() == before


TURNS = iter([tf.sin, tf.cos] * 2)


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda image: image + np.random.default_rng().random(), "Found the constant .* and then"),
        (lambda image: next(TURNS)(image), r"Found an operation (Sin|Cos) and then an operation (Sin|Cos)"),
    ],
    ids=["fresh seed", "another branch"],
)
def test_traces_that_differ_are_refused_without_a_generator(function, found):
    with pytest.raises(ValueError, match=found):
        plan(function)


def test_a_frozen_draw_beside_a_seed_or_in_a_decode_is_refused():
    with pytest.raises(ValueError, match="Expected 'augment' to be the same"):
        plan(lambda image, *, seed: by_numpy(tf.image.stateless_random_flip_left_right(image, seed)))
    source = Source(name="noisy", dataset=lambda: tf.data.Dataset.from_tensor_slices(IMAGES), decode=by_numpy)
    with pytest.raises(ValueError, match="Expected 'decode' to be the same"):
        plan_pipeline(source, batch_size=2)


def fixed_table(image):
    return image + np.random.default_rng(0).random((4, 4, 3)).astype("float32") + random.Random(1).random()


def seeded_table(image):
    np.random.seed(0)
    random.seed(0)
    return image + np.random.rand() + random.random()


@functools.cache
def table():
    return np.random.rand(3).astype("float32")


def kept_table(image):
    return image + table()


def in_python(image):
    drawn = tf.numpy_function(lambda x: x + np.float32(np.random.rand() + PYTHON.random()), [image], tf.float32)
    return tf.ensure_shape(drawn + tf.py_function(lambda x: x + NUMPY.random(), [image], tf.float32), (4, 4, 3))


def by_keras(image):
    return image + keras.random.normal((3,))  # Keras draws the seed of its global generator once


def builds_a_layer(image):
    return DENSE(image)


def makes_layers(image):
    image = keras.layers.Rescaling(1 / 255)(image)  # of another name in each trace
    tf.debugging.assert_less(image, 5.0)
    return image


DENSE = keras.layers.Dense(2)
QUIET = [fixed_table, seeded_table, kept_table, in_python, by_keras, builds_a_layer, makes_layers]


def reached_only(image):
    return image + 0 * len((PYTHON, NUMPY, LEGACY, HELPERS))


@pytest.mark.parametrize("function", [*QUIET, reached_only, keras.layers.RandomFlip(seed=1)])
def test_constants_and_draws_at_run_time_are_no_false_alarm(function):
    keras.utils.clear_session(free_memory=False)
    table.cache_clear()
    plan(function)


def test_what_another_thread_draws_is_no_false_alarm():
    """Such as the workers of a dataset that is still read while the next pipeline is planned."""
    stop = threading.Event()

    def draw():
        while not stop.wait(0.001):
            random.random()
            PYTHON.random()

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        plan(reached_only)
    finally:
        stop.set()
        thread.join()
