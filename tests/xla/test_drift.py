"""What XLA computes is compared with what the step computes without it."""

import math
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from models import assert_same_state, batch, small_net, state
from planted_layers import Noise, ScaledUnderXla, under_xla
from quick import first_quick

from tfopt.measure import StepTimer
from tfopt.xla import drift
from tfopt.xla.drift import both_timers, compare_results, measure_drift


def drift_of(model, data):
    return measure_drift(model, data, both_timers(model, data))


def net(*layers, optimizer="sgd"):
    model = keras.Sequential([keras.Input((8, 8, 1)), *layers, keras.layers.Flatten()])
    model.add(keras.layers.Dense(10, dtype="float32"))
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_rounding_is_small_and_nothing_changes(policy):
    model = small_net(policy, jit_compile=False)
    model.fit(*batch(), verbose=0)
    before = state(model)
    drift, _ = drift_of(model, batch(32))
    # Dropout of one half: with other masks under XLA the drift would be above 0.3.
    assert drift < (1e-3 if policy == "float32" else 0.1)
    assert_same_state(before, state(model))
    assert [layer.rate for layer in model.layers if isinstance(layer, keras.layers.Dropout)] == [0.5]


def test_with_dropout_in_place_the_masks_would_drift(monkeypatch):
    monkeypatch.setattr(StepTimer, "draws_random_numbers", False)
    drift, _ = drift_of(small_net(), batch(32))
    assert drift > 0.1


@pytest.mark.slow
def test_without_random_draws_nothing_is_traced_again(monkeypatch):
    model = small_net(dropout=0.0)
    timers = both_timers(model, batch(32))

    def again(model, data):
        raise AssertionError("traced again")

    monkeypatch.setattr(drift, "both_timers", again)
    found, _ = measure_drift(model, batch(32), timers)
    assert found < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_weights_without_a_gradient_are_no_drift(policy):
    """A bias before batch norm: its gradient is rounding noise, and Adam moves it as far as any other weight."""
    random = np.random.default_rng(0)
    x, y = random.random((32, 13), "float32"), random.random((32, 1), "float32") * 200
    model = keras.Sequential([keras.Input((13,))])
    for units in (16, 8, 4):
        model.add(keras.layers.Dense(units, dtype=policy))
        model.add(keras.layers.BatchNormalization(dtype=policy))
        model.add(keras.layers.ReLU(dtype=policy))
    model.add(keras.layers.Dense(1, dtype="float32"))
    model.compile("adam", "mse")
    assert drift_of(model, (x, y))[0] < (1e-3 if policy == "float32" else 0.1)


@pytest.mark.parametrize(
    "optimizer", first_quick(["sgd", "adam", "rmsprop", "adagrad", "lion", "adamw", "ftrl", "nadam"], 2)
)
def test_every_optimizer_leaves_something_to_compare(optimizer):
    assert drift_of(net(optimizer=optimizer), batch(32))[0] < 1e-3


def test_other_random_draws_cannot_be_compared():
    assert drift_of(net(Noise()), batch()) == (None, "the model draws random numbers outside dropout")


def test_weights_that_do_not_move_prove_nothing():
    assert drift_of(net(optimizer=keras.optimizers.SGD(0.0)), batch()) == (None, "its weights did not move")


def test_a_training_that_is_not_finite_proves_nothing():
    model = net()
    model.layers[-1].kernel.assign(model.layers[-1].kernel * np.nan)
    assert drift_of(model, batch()) == (None, "the training gives no finite numbers without XLA either")


@pytest.mark.parametrize("factor", [-3.0, float("nan")])
@pytest.mark.parametrize("optimizer", first_quick([{}, {"gradient_accumulation_steps": 8}]))
@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_another_computation_drifts(factor, optimizer, policy):
    keras.config.set_dtype_policy(policy)
    model = net(ScaledUnderXla(factor), optimizer=keras.optimizers.SGD(**optimizer))
    drift, _ = drift_of(model, batch(32))
    assert drift > 0.1 or math.isnan(drift)


class GradientScaledUnderXla(keras.layers.Layer):
    """Its output is the same with and without XLA, its gradient is not."""

    def call(self, inputs):
        factor = 3.0 if under_xla() else 1.0

        @tf.custom_gradient
        def scaled(x):
            return tf.identity(x), lambda upstream: upstream * factor

        return scaled(inputs)


class GradientStep(keras.Model):
    """A train_step of its own that updates only half of what it should under XLA."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True)[:, 0] - tf.cast(y, "float32")) ** 2)
        variables = [variable.value for variable in self.trainable_variables]
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(gradient * (0.001 if under_xla() else 0.002))
        return {"loss": loss}


class HeldOptimizer(keras.Model):
    """A train_step of its own, with an optimizer in a dict."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True)[:, 0] - tf.cast(y, "float32")) ** 2)
        self.held["only"].apply_gradients(
            zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables, strict=True)
        )
        return {"loss": loss}


def held_optimizer():
    inputs = keras.Input((8, 8, 1))
    x = GradientScaledUnderXla()(keras.layers.Dense(2, name="first")(keras.layers.Flatten()(inputs)))
    model = HeldOptimizer(inputs, keras.layers.Dense(1)(x))
    model.compile()
    model.held = {"only": keras.optimizers.SGD(0.001)}
    return model


def own_step():
    inputs = keras.Input((8, 8, 1))
    model = GradientStep(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(inputs)))
    model.compile("sgd")
    return model


@pytest.mark.parametrize(
    ("model", "where"),
    first_quick(
        [
            (lambda: net(keras.layers.Conv2D(2, 3), ScaledUnderXla(1.1)), "the output of layer {}/scaled_under_xla"),
            (
                lambda: net(keras.layers.Conv2D(2, 3), GradientScaledUnderXla(), keras.layers.Conv2D(2, 3)),
                "the gradient of {}/conv2d",
            ),
            (own_step, "the weights after four training steps"),
            (held_optimizer, "the gradient of first/"),
        ],
        2,
    ),
)
def test_the_first_result_that_differs_is_named(model, where):
    model = model()
    before = state(model)
    compared = compare_results(model, batch(32))
    assert re.sub(r"_\d+", "", compared.where).startswith(re.sub(r"_\d+", "", where.format(model.name)))
    assert compared.distance > compared.tolerance == 0.01
    assert_same_state(before, state(model))
    assert not {"train_step", "call"} & vars(model).keys()
    assert "apply" not in vars(model.optimizer)


@pytest.mark.parametrize(
    ("policy", "optimizer"),
    first_quick([("float32", "adam"), ("mixed_float16", "sgd"), ("mixed_bfloat16", "adam")]),
)
def test_what_computes_the_same_is_within_rounding(policy, optimizer):
    keras.config.set_dtype_policy(policy)
    model = small_net(policy, optimizer=optimizer)
    compared = compare_results(model, batch(32))
    assert (compared.where, compared.unknown) == (None, None)
    assert 0 < compared.distance < compared.tolerance == (0.01 if policy == "float32" else 0.1)


def test_what_is_not_finite_in_the_same_places_is_the_same():
    images, labels = batch()
    images[0] = np.nan
    compared = compare_results(net(), (images, labels))
    assert compared.where is None
    assert "no finite numbers" in compared.unknown
