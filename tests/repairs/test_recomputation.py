"""D4: a recomputed function that draws or assigns is refused; any other is left alone."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from quick import first_quick

from tfopt import precision, repairs, xla
from tfopt.errors import UnsupportedError

layers = keras.layers
X = np.random.default_rng(0).normal(size=(16, 8)).astype("float32")
Y = np.zeros((16, 1), "float32")
OPTIONS = [{}, {"jit_compile": True}, {"run_eagerly": True}]
RECOMPUTE = {"keras.remat": keras.remat, "tf.recompute_grad": tf.recompute_grad, "nothing": lambda function: function}


@pytest.fixture(autouse=True)
def _full_precision():
    """TF32 would round values apart that differ in the last bit."""
    with precision.tf32(False):
        yield


class Block(layers.Layer):
    """Dense layers, and others behind them, whose activations are recomputed in the backward pass."""

    def __init__(self, recompute, *behind, flag=True, **options):
        super().__init__(**options)
        self.flag = flag
        self.dense = layers.Dense(8, activation="tanh", kernel_initializer=keras.initializers.Orthogonal(seed=1))
        self.behind = list(behind)
        self.recomputed = RECOMPUTE[recompute](self.computed)

    def build(self, shape):
        for layer in (self.dense, *self.behind):
            layer.build(shape)

    def computed(self, x):
        x = self.dense(x)
        for layer in self.behind:
            x = layer(x, training=self.training) if self.flag and layer._call_has_training_arg else layer(x)
        return x

    def call(self, x, training=False):
        self.training = training
        return self.recomputed(x)


class Noise(layers.Layer):
    def call(self, x):
        return x + tf.random.normal(tf.shape(x))


def net(recompute, *behind, flag=True, **options):
    model = keras.Sequential(
        [
            keras.Input((8,)),
            Block(recompute, *behind, flag=flag, name="block"),
            layers.Dense(1, kernel_initializer="ones"),
        ],
        name="net",
    )
    model.compile(keras.optimizers.SGD(0.1), "mse", **options)
    return model


def trained(model):
    model.fit(X, Y, batch_size=16, verbose=0)
    return [weight.numpy() for weight in model.trainable_variables]


@pytest.mark.parametrize("flag", [True, False], ids=["training passed", "training not passed"])
def test_stock_keras_draws_another_mask(flag):
    """Without recomputation, the gradient of a dropped unit's weights is zero."""
    moved = {}
    for how in ("nothing", "keras.remat"):
        model = net(how, layers.Dropout(0.5, seed=3, noise_shape=(1, None)), flag=flag)
        before = model.get_weights()[0]
        moved[how] = (trained(model)[0] != before).any(axis=0)
    assert moved["nothing"].sum() < 8
    assert (moved["keras.remat"] != moved["nothing"]).any()


def test_stock_keras_moves_the_averages_twice():
    moved = {}
    for how in ("nothing", "keras.remat"):
        average = layers.BatchNormalization(momentum=0.5)
        trained(net(how, average))
        moved[how] = 1 - average.moving_variance.numpy()
    np.testing.assert_allclose(moved["keras.remat"], 1.5 * moved["nothing"], rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("options", first_quick(OPTIONS), ids=str)
@pytest.mark.parametrize("recompute", ["keras.remat", "tf.recompute_grad"])
def test_the_first_step_is_refused(recompute, options):
    behind = {
        "block/dropout', which changes 'seed_generator_state' again": layers.Dropout(0.5, name="dropout"),
        "block/averages', which changes 'moving_mean' again": layers.BatchNormalization(name="averages"),
        "block/noise', which draws other random numbers": Noise(name="noise"),
    }
    made_before = [net(recompute, layer, **options) for layer in behind.values()]
    repairs.install("recomputation")
    for model, named in zip(made_before, behind, strict=True):
        with pytest.raises(UnsupportedError, match=named):
            model.fit(X, Y, verbose=0)
    unflagged = net(recompute, layers.Dropout(0.5, name="dropout"), flag=False, **options)
    with pytest.raises(UnsupportedError, match="block/dropout', which now computes as in inference"):
        unflagged.fit(X, Y, verbose=0)
    assert np.array_equal(layers.Dropout(0.5)(X), X)  # Keras' call context is closed again
    repairs.remove("recomputation")
    made_before[1].fit(X, Y, verbose=0)


@pytest.mark.slow
@pytest.mark.parametrize("options", first_quick(OPTIONS), ids=str)
def test_a_function_that_computes_the_same_is_left_alone(options):
    expected = trained(net("nothing", layers.LayerNormalization(), **options))
    repairs.install("recomputation")
    for recompute in ("keras.remat", "tf.recompute_grad"):
        model = net(recompute, layers.LayerNormalization(), **options)
        for found, true in zip(trained(model), expected, strict=True):
            np.testing.assert_allclose(found, true, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_layers_outside_the_recomputed_function_may_draw_and_assign():
    repairs.install("recomputation")
    model = keras.Sequential(
        [keras.Input((8,)), Block("keras.remat"), layers.Dropout(0.5), layers.BatchNormalization(), layers.Dense(1)]
    )
    model.compile("adam", "mse", metrics=["mae"])
    model.fit(X, Y, verbose=0)
    assert model.layers[2].moving_mean.numpy().any()
    assert np.isfinite(model.evaluate(X, Y, verbose=0)).all()


@pytest.mark.slow
def test_inference_is_not_refused():
    repairs.install("recomputation")
    plain, recomputed = (
        net(how, layers.Dropout(0.5), layers.BatchNormalization()) for how in ("nothing", "keras.remat")
    )
    np.testing.assert_allclose(recomputed.predict(X, verbose=0), plain.predict(X, verbose=0), rtol=1e-6)
    assert recomputed.evaluate(X, Y, verbose=0) == pytest.approx(plain.evaluate(X, Y, verbose=0))


def test_activations_of_keras_own_scope_are_left_alone():
    repairs.install("recomputation")
    found = []
    for scope in (contextlib.nullcontext(), keras.RematScope("activations")):
        keras.utils.set_random_seed(0)
        with scope:
            model = keras.Sequential([keras.Input((8,)), layers.Dense(8, "tanh"), layers.Dropout(0.5), layers.Dense(1)])
        model.compile("sgd", "mse")
        found.append(trained(model))
    for plain, recomputed in zip(*found, strict=True):
        np.testing.assert_allclose(recomputed, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_check_refuses_it_by_name_and_nothing_else():
    for make in (lambda: layers.Dropout(0.5), layers.BatchNormalization):
        with pytest.raises(UnsupportedError, match=r"keras.remat or tf.recompute_grad.*'net/block/"):
            precision.check(net("keras.remat", make()), (X, Y), "mixed_bfloat16")
    assert precision.check(net("nothing", layers.Dropout(0.5)), (X, Y), "mixed_bfloat16").passed
    assert precision.check(net("keras.remat"), (X, Y), "mixed_bfloat16").passed
    assert not repairs.RECOMPUTATION.installed


@pytest.mark.slow
def test_explain_refuses_it_by_name_and_nothing_else():
    model = net("keras.remat", layers.Dropout(0.5, name="dropout"))
    for data in (None, (X, Y)):
        with pytest.raises(UnsupportedError, match=r"keras.remat or tf.recompute_grad.*'net/block/dropout'"):
            xla.explain(model, data)
    assert xla.explain(net("keras.remat"), (X, Y)).supported
    assert xla.explain(net("nothing", layers.Dropout(0.5)), (X, Y)).supported
