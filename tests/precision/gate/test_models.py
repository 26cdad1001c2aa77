"""The gate on every kind of model that `fit` takes."""

from itertools import product

import keras
import numpy as np
import pytest
import tensorflow as tf
from models import assert_same_state, state
from precision_nets import X, Y, cross_entropy, functional
from quick import first_quick

from tfopt.errors import UnsupportedError
from tfopt.internals.scopes import global_seeds
from tfopt.model.layers import layer_paths
from tfopt.precision import apply, check

layers = keras.layers


def rows(report):
    return {layer.path: layer for layer in report.layers}


class Subclassed(keras.Model):
    """Calls a layer twice, and puts out a dict with whole numbers in it."""

    def __init__(self):
        super().__init__()
        self.first, self.shared = layers.Dense(8, name="first"), layers.Dense(8, name="shared")
        self.drop, self.head = layers.Dropout(0.5, name="drop"), layers.Dense(3, name="head")

    def call(self, x, training=False):
        x = self.shared(tf.nn.relu(self.shared(self.first(x))))
        scores = self.head(self.drop(x, training=training))
        return {"classes": scores, "best": tf.argmax(scores, axis=-1)}


def test_subclassed_and_not_built():
    keras.utils.set_random_seed(1)
    model = Subclassed()
    model.compile("adam", {"classes": cross_entropy(), "best": None})
    report = check(model, (X, {"classes": Y, "best": Y}), "mixed_float16")
    assert report.passed, str(report)
    assert [(x.path, x.kind, x.policy) for x in report.layers] == [
        ("first", "Dense", "mixed_float16"),
        ("shared", "Dense", "mixed_float16"),
        ("drop", "Dropout", "mixed_float16"),
        ("head", "Dense", "float32"),
    ]
    assert all(layer.weight_gradient for layer in report.layers if layer.kind == "Dense")
    assert model.built
    assert not model.optimizer.built  # that is for training to do


def test_sequential_and_not_built():
    model = keras.Sequential([layers.Dense(8), layers.Dense(3)])
    model.compile("adam", cross_entropy())
    assert check(model, (X, Y), "mixed_bfloat16").passed


def test_run_eagerly():
    model = functional(lambda x: layers.Dense(3)(layers.Dense(8)(x)), run_eagerly=True)
    assert check(model, (X, Y), "mixed_float16").passed
    assert model.run_eagerly


def several():
    """Two inputs, one of them whole numbers; two outputs, one made by an operation; a nested model."""
    keras.utils.set_random_seed(1)
    values, tokens = keras.Input((8,), name="values"), keras.Input((5,), dtype="int32", name="tokens")
    embedded = layers.Flatten()(layers.Embedding(10, 4, name="embedding")(tokens))
    x = layers.Concatenate()([values, embedded])
    x = keras.Sequential([keras.Input((28,)), layers.Dense(6, activation="relu", name="inside")], name="inner")(x)
    outputs = {"a": layers.Dense(3, name="a")(x), "b": layers.Dense(1, name="b")(x) * 2.0}
    model = keras.Model({"values": values, "tokens": tokens}, outputs, name="several")
    model.compile("adam", {"a": cross_entropy(), "b": "mse"}, loss_weights={"a": 1.0, "b": 0.3}, metrics={"a": "acc"})
    random = np.random.default_rng(0)
    x = {"values": X, "tokens": random.integers(10, size=(32, 5)).astype("int32")}
    y = {"a": Y, "b": random.normal(size=(32, 1)).astype("float32")}
    return model, x, y, {"a": random.random(32).astype("float32"), "b": np.zeros(32, "float32")}


@pytest.mark.slow
def test_several_inputs_and_outputs_with_sample_weights():
    model, *batch = several()
    dataset = tf.data.Dataset.from_tensor_slices(tuple(batch)).batch(16)
    model.fit(dataset, verbose=0, shuffle=False)
    before = state(model)
    report = check(model, dataset, "mixed_float16")
    assert_same_state(before, state(model))
    assert report.passed, str(report)
    found = rows(report)
    assert {"embedding", "inner/inside", "a", "b"} <= found.keys()
    assert found["a"].weight_gradient.norm > 0
    assert found["b"].weight_gradient.norm == 0  # its sample weights are zero
    assert report.reference_loss == pytest.approx(
        model.evaluate(dataset, verbose=0, return_dict=True)["loss"], rel=1e-4
    )


def test_regularizers_and_added_losses_count():
    class Adding(layers.Layer):
        def call(self, x):
            self.add_loss(100.0 * keras.ops.cast(keras.ops.mean(x**2), "float32"))
            return x

    def body(x):
        return layers.Dense(3)(Adding()(layers.Dense(8, kernel_regularizer=keras.regularizers.L2(10.0))(x)))

    model = functional(body)
    report = check(model, (X, Y), "mixed_float16")
    assert not any(layer._loss_ids or layer._losses for layer in model._flatten_layers())
    assert report.reference_loss == pytest.approx(model.evaluate(X, Y, verbose=0), rel=1e-4)
    assert report.reference_loss > 100


@pytest.mark.slow
def test_recurrent_layers_with_state_and_draws():
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((8,), batch_size=32),
            layers.Reshape((4, 2)),
            layers.LSTM(6, stateful=True, return_sequences=True, recurrent_dropout=0.2, name="lstm"),
            layers.Bidirectional(layers.SimpleRNN(3), name="both"),
            layers.GaussianNoise(0.1),
            layers.Dense(3),
        ]
    )
    model.compile("adam", cross_entropy())
    model.fit(X, Y, verbose=0, batch_size=32)
    before = state(model)
    report = check(model, (X, Y), "mixed_float16")
    assert_same_state(before, state(model))
    assert report.passed, str(report)
    assert {"lstm", "both"} <= rows(report).keys()
    assert sum(x.weight_gradient is not None for x in report.layers) >= 4  # the cells', in whatever row


def test_frozen_layers_have_no_gradient():
    model = functional(lambda x: layers.Dense(3, name="head")(layers.Dense(8, name="body", trainable=False)(x)))
    report = check(model, (X, Y), "mixed_float16")
    assert rows(report)["body"].weight_gradient is None
    assert rows(report)["head"].weight_gradient
    model.trainable = False
    assert check(model, (X, Y), "mixed_float16").passed


class Noise(layers.Layer):
    def call(self, x):
        return x + keras.ops.cast(keras.random.normal(keras.ops.shape(x)), x.dtype)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_float16", "float8"])
def test_draws_that_a_seed_makes_the_same_are_no_difference(policy):
    model = functional(lambda x: layers.Dense(3)(Noise()(layers.Dense(8)(x))))
    keras.random.normal(())  # makes the seed that all layers without one of their own share
    seed = global_seeds().state
    before, shared = state(model), seed.numpy().tolist()
    report = check(model, (X, Y), policy)
    assert_same_state(before, state(model))
    assert seed.numpy().tolist() == shared
    assert report.passed, str(report)
    assert report.notes == ()


class Unseeded(layers.Layer):
    """As in many a variational autoencoder."""

    def call(self, x):
        return x + tf.random.normal(tf.shape(x), dtype=x.dtype)


class Generated(layers.Layer):
    def build(self, shape):
        self.state = tf.random.Generator.from_seed(1)

    def call(self, x):
        return x + tf.cast(self.state.normal(tf.shape(x)), x.dtype)


class Counting(layers.Layer):
    def build(self, shape):
        self.state = tf.Variable(1.0)

    def call(self, x):
        self.state.assign_add(1.0)
        return x + tf.cast(self.state, x.dtype)


class Uniform(layers.Layer):
    def call(self, x):
        return x + 0.01 * tf.random.uniform(tf.shape(x), dtype=x.dtype)


@pytest.mark.parametrize(
    ("layer", "policy"), first_quick(product((Unseeded, Generated, Counting), ("mixed_bfloat16", "mixed_float16")), 1)
)
def test_both_dtypes_draw_the_same_and_start_from_one_state(layer, policy):
    planted = layer()
    model = functional(lambda x: layers.Dense(3)(planted(layers.Dense(8)(x))))
    state = getattr(planted, "state", None)
    before = None if state is None else getattr(state, "state", state).numpy().tolist()
    report = check(model, (X, Y), policy)
    assert report.passed, str(report)
    assert report.notes == ()
    assert {row.path: row for row in report.layers}[planted.name].output.error < 0.05
    assert before is None or getattr(state, "state", state).numpy().tolist() == before


@pytest.mark.slow
def test_uniform_numbers_of_16_bits_are_others():
    model = functional(lambda x: layers.Dense(3)(Uniform()(layers.Dense(8)(x))))
    assert any("different random numbers" in note for note in check(model, (X, Y), "mixed_float16").notes)


@pytest.mark.slow
def test_policies_per_layer_go_in_and_come_out():
    model = functional(lambda x: layers.Dense(3, name="head")(layers.Dense(8, name="b")(layers.Dense(8, name="a")(x))))
    report = check(model, (X, Y), {"a": "mixed_float16", "b": "mixed_bfloat16"})
    assert report.passed
    assert [layer.policy for layer in report.layers] == ["mixed_float16", "mixed_bfloat16", "float32"]
    assert report.policy == "a policy per layer (mixed_bfloat16, mixed_float16)"
    a_map = keras.dtype_policies.DTypePolicyMap("mixed_float16", {"b": keras.DTypePolicy("float32")})
    assert {layer.policy for layer in check(model, (X, Y), a_map).layers} <= {"mixed_float16", "float32"}


@pytest.mark.slow
def test_under_a_strategy():
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        model = functional(lambda x: layers.Dense(3)(layers.BatchNormalization()(layers.Dense(8)(x))))
    model.fit(X, Y, verbose=0)
    before = state(model)
    assert check(model, (X, Y), "mixed_float16").passed
    assert_same_state(before, state(model))
    assert len(layer_paths(model)) == 5


def augmented(*front):
    """Keras' augmentation, whose rotation and zoom have no gradient in bfloat16."""
    keras.utils.set_random_seed(1)
    body = [*front, layers.Rescaling(0.5), layers.RandomZoom(0.1), layers.RandomRotation(0.1, name="turn")]
    head = [layers.Conv2D(2, 3, name="trained"), layers.GlobalAveragePooling2D(), layers.Dense(3, name="head")]
    model = keras.Sequential([keras.Input((8, 8, 3)), keras.Sequential(body, name="before"), *head])
    model.compile("sgd", cross_entropy(), jit_compile=False)
    return model


IMAGES = np.random.default_rng(0).random((4, 8, 8, 3)).astype("float32")


@pytest.mark.slow
def test_augmentation_needs_no_gradient():
    model = augmented()
    report = check(model, (IMAGES, Y[:4]), "mixed_bfloat16")
    assert report.passed, str(report)
    apply(model, "mixed_bfloat16")
    model.fit(IMAGES, Y[:4], verbose=0)
    assert rows(report)["trained"].weight_gradient
    assert rows(report)["before/turn"].output
    assert rows(report)["before/turn"].output_gradient is None


def test_a_layer_without_a_gradient_is_named_where_training_takes_it():
    model = augmented(layers.Conv2D(3, 3, name="early"))
    with pytest.raises(UnsupportedError, match=r"Found: 'before/turn': Invalid dtype"):
        check(model, (IMAGES, Y[:4]), "mixed_bfloat16")
    apply(model, "mixed_bfloat16")
    with pytest.raises(TypeError, match="Invalid dtype"):
        model.fit(IMAGES, Y[:4], verbose=0)


class InFloat32(layers.Layer):
    def call(self, x):
        return tf.add(x, tf.ones([4]))


def test_a_layer_that_does_not_compute_is_named():
    block = keras.Sequential([layers.Dense(4), InFloat32(name="adds")], name="block")
    model = functional(lambda x: layers.Dense(3)(block(x)))
    with pytest.raises(UnsupportedError, match=r"Found: 'block/adds': .*type float32.* type float16"):
        check(model, (X, Y), "mixed_float16")
