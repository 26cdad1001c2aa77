"""Keras layers as functions of whole batches, drawing from the pipeline's seeds."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.pipelines import build_pipeline, per_batch
from tfopt.pipelines.device.device_stage import stage_of
from tfopt.pipelines.shared import layer_function
from tfopt.pipelines.shared.layer_function import LayerFunction

X = np.random.default_rng(0).integers(0, 256, size=(12, 6, 6, 3)).astype("uint8")
Y = np.arange(12)
ONE_HOT = np.eye(12, dtype="float32")
SEED, OTHER = tf.constant([1, 2]), tf.constant([1, 3])


def epochs(count=1, data=(X, Y), **options):
    """The images and the labels of the stage's batches."""
    stage = stage_of(build_pipeline(data, batch_size=4, cache="device", **options))
    batches = [stage.batch(element) for _ in range(count) for element in stage.elements]
    return [np.stack([part.numpy() for part in parts]) for parts in zip(*batches, strict=True)]


class OnGlobalSeed(keras.layers.Layer):
    def call(self, x):
        return x + keras.random.uniform(keras.ops.shape(x))


class TwoParts(keras.layers.Layer):
    """Draws from two generators, one of them made when it is built."""

    def __init__(self):
        super().__init__()
        self.one = keras.random.SeedGenerator(7)

    def build(self, shape):
        self.other = keras.random.SeedGenerator(7)

    def call(self, x):
        return keras.random.uniform((4,), seed=self.one), keras.random.uniform((4,), seed=self.other), x


@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_seed_decides_the_draws_and_the_layer_keeps_its_state(jit_compile):
    layer = keras.layers.GaussianNoise(1.0)
    function = LayerFunction(layer)
    called = tf.function(lambda x, seed: function(x, seed=seed), jit_compile=jit_compile)
    zeros = np.zeros((4, 3), "float32")
    first, again, other = (called(zeros, seed=seed).numpy() for seed in (SEED, SEED, OTHER))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    assert len(np.unique(first)) == first.size
    state = layer.variables[0].numpy().copy()
    called(zeros, seed=SEED)
    np.testing.assert_array_equal(layer.variables[0].numpy(), state)


def test_each_generator_of_a_layer_gets_a_seed_of_its_own():
    one, other, _ = LayerFunction(TwoParts())(np.zeros((4, 2), "float32"), seed=SEED)
    assert not np.array_equal(one, other)


@pytest.mark.slow
def test_a_flip_flips_and_leaves_the_labels():
    images, labels = epochs(3, augment=keras.layers.RandomFlip("horizontal"), training=False)
    flipped = []
    for image, label in zip(images.reshape(-1, 6, 6, 3), labels.ravel(), strict=True):
        flipped.append(np.array_equal(image, X[label][:, ::-1]))
        assert flipped[-1] or np.array_equal(image, X[label])
    assert 0 < sum(flipped) < len(flipped)
    assert labels.dtype == Y.dtype


@pytest.mark.slow
def test_layers_and_functions_run_in_their_order():
    def one_more(x, y):
        return x + 1, y

    chosen = {"training": False, "seed": 1}
    images, _ = epochs(augment=[keras.layers.Rescaling(2.0), per_batch(one_more)], **chosen)
    np.testing.assert_array_equal(images.reshape(X.shape), 2.0 * X + 1)
    images, _ = epochs(augment=[per_batch(one_more), per_batch(keras.layers.Rescaling(2.0))], **chosen)
    np.testing.assert_array_equal(images.reshape(X.shape), 2.0 * (X + 1))


@pytest.mark.slow
@pytest.mark.parametrize("layer", [keras.layers.MixUp(), keras.layers.CutMix()], ids=["MixUp", "CutMix"])
def test_layers_that_mix_labels_mix_both(layer):
    shades = np.arange(12, dtype="float32")[:, None, None, None] * np.ones((12, 6, 6, 3), "float32")
    images, labels = epochs(4, data=(shades, ONE_HOT), augment=layer, training=False)
    np.testing.assert_allclose(labels.sum(axis=-1), 1, rtol=1e-6)
    assert (labels.max(axis=-1) < 1).any()
    if isinstance(layer, keras.layers.MixUp):
        np.testing.assert_allclose(images[..., 0, 0, 0], labels @ np.arange(12), rtol=1e-5)


def test_no_other_layer_of_keras_changes_labels():
    classes = [layer for layer in vars(keras.layers).values() if hasattr(layer, "transform_labels")]
    assert len(classes) > 20
    labels = object()
    for layer in classes:
        if layer.__name__ not in layer_function._MIXING and layer.transform_labels.__qualname__.split(".")[0] != (
            "BaseImagePreprocessingLayer"
        ):
            assert layer.transform_labels(layer.__new__(layer), labels, {}, training=True) is labels, layer


MIXING_INSIDE = keras.layers.Pipeline([keras.layers.MixUp()])


@pytest.mark.parametrize(
    ("layer", "parts", "text"),
    [
        (keras.layers.MixUp(), (X, tf.constant(Y)), "one-hot ones, of shape \\(batch, classes\\). Found 2 parts"),
        (keras.layers.MixUp(), (X, tf.constant(ONE_HOT), tf.ones(12)), "which mixes labels.*Found 3 parts"),
        (keras.layers.MixUp(), (X,), "Found 1 parts"),
        (MIXING_INSIDE, (X, tf.constant(ONE_HOT)), "Found MixUp inside Pipeline: the labels would not be mixed"),
        (keras.layers.Rescaling(1.0), ({"image": X}, Y), "Expected one tensor for the layer Rescaling.*Found dict"),
        (OnGlobalSeed(), (np.zeros((4, 2), "float32"),), "changed another variable, such as Keras' global seed"),
    ],
)
def test_what_a_layer_cannot_be_given_is_refused(layer, parts, text):
    with pytest.raises(ValueError, match=text):
        LayerFunction(layer)(*parts, seed=SEED)


def test_a_layer_that_cannot_take_the_batch_fails_with_the_plan():
    text = r"(?s)stage 'augment' \(MixUp\) failed.*Expected batches \(images, labels\)"
    with pytest.raises(PipelineError, match=text):
        build_pipeline((X, Y), batch_size=4, cache="device", augment=keras.layers.MixUp())
