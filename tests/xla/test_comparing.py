"""Results with and without XLA: which differ, and in 16 bits which of the two is wrong."""

import math
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from models import assert_same_state, batch, small_net, state
from planted_layers import ScaledUnderXla, ScaledWithoutXla, under_xla
from quick import first_quick

from tfopt.xla import comparing
from tfopt.xla.comparing import Errors, compare_results
from tfopt.xla.drift import both_timers


def net(*layers, optimizer="sgd"):
    model = keras.Sequential([keras.Input((8, 8, 1)), *layers, keras.layers.Flatten()])
    model.add(keras.layers.Dense(10, dtype="float32"))
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


class GradientScaledUnderXla(keras.layers.Layer):
    """Its output is the same with and without XLA, its gradient is not."""

    def call(self, inputs):
        factor = 3.0 if under_xla() else 1.0

        @tf.custom_gradient
        def scaled(x):
            return tf.identity(x), lambda upstream: upstream * factor

        return scaled(inputs)


class OwnStep(keras.Model):
    """A train_step of its own that updates only half of what it should under XLA."""

    def halves(self):
        return under_xla()

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True)[:, 0] - tf.cast(y, "float32")) ** 2)
        variables = [variable.value for variable in self.trainable_variables]
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(gradient * (0.001 if self.halves() else 0.002))
        return {"loss": loss}


class InexactStep(OwnStep):
    """It updates only half of what it should in 16 bits without XLA."""

    def halves(self):
        return self.get_layer("first").compute_dtype != "float32" and not under_xla()


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


def own_step(kind, *layers):
    inputs = x = keras.Input((8, 8, 1))
    for layer in [keras.layers.Flatten(), keras.layers.Dense(2, name="first"), *layers]:
        x = layer(x)
    model = kind(inputs, keras.layers.Dense(1, dtype="float32")(x))
    model.compile("sgd")
    return model


def held_optimizer():
    model = own_step(HeldOptimizer, GradientScaledUnderXla())
    model.held = {"only": keras.optimizers.SGD(0.001)}
    return model


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize(
    ("model", "where"),
    first_quick(
        [
            (
                lambda: net(keras.layers.Conv2D(2, 3), GradientScaledUnderXla(), keras.layers.Conv2D(2, 3)),
                "the gradient of {}/conv2d",
            ),
            (lambda: net(keras.layers.Conv2D(2, 3), ScaledUnderXla(1.2)), "the output of layer {}/scaled_under_xla"),
            (lambda: own_step(OwnStep), "the weights after four training steps"),
            (held_optimizer, "the gradient of first/"),
        ]
    ),
)
def test_the_first_result_that_xla_gets_wrong_is_named(model, where, policy):
    keras.config.set_dtype_policy(policy)
    model = model()
    model.optimizer.build(model.trainable_variables)
    before = state(model)
    compared = compare_results(model, batch(32))
    assert compared.wrong
    assert re.sub(r"_\d+", "", compared.where).startswith(re.sub(r"_\d+", "", where.format(model.name)))
    assert compared.distance > compared.tolerance == (0.01 if policy == "float32" else 0.1)
    assert (compared.errors is None) == (policy == "float32")
    assert_same_state(before, state(model))
    assert not {"train_step", "call"} & vars(model).keys()
    assert "apply" not in vars(model.optimizer)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "optimizer"),
    first_quick([("float32", "adam"), ("mixed_float16", "sgd"), ("mixed_bfloat16", "adam")]),
)
def test_what_computes_the_same_is_within_rounding(policy, optimizer, monkeypatch):
    monkeypatch.setattr(comparing, "layers_in_float32", None)  # nothing runs in float32
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


@pytest.mark.parametrize(
    ("errors", "by_xla"),
    [
        ((0.07, 5.3), False),
        ((0.5, 0.3), False),  # chance
        ((0.7, 0.3), True),
        ((0.1, 0.001), True),
        ((0.1, math.inf), False),
        ((math.inf, math.inf), True),
    ],
)
def test_xla_is_to_blame_if_its_error_is_more_than_twice_that_of_tensorflow(errors, by_xla):
    assert Errors(*errors).by_xla == by_xla


@pytest.mark.slow
@pytest.mark.parametrize("policy", first_quick(["mixed_bfloat16", "mixed_float16"]))
@pytest.mark.parametrize(
    "model",
    [
        lambda: net(keras.layers.Conv2D(2, 3), ScaledWithoutXla(1.5), optimizer="adam"),
        lambda: own_step(InexactStep),
    ],
    ids=["results", "training"],
)
def test_where_tensorflow_is_wrong_xla_is_not_to_blame(policy, model):
    keras.config.set_dtype_policy(policy)
    model = model()
    model.fit(*batch(), verbose=0)
    before, policies = state(model), [layer._dtype_policy for layer in model._flatten_layers()]
    compared = compare_results(model, batch(32))
    assert not compared.wrong
    assert compared.where is not None
    assert compared.errors.xla < 0.05 < 0.3 < compared.errors.tensorflow
    assert_same_state(before, state(model))
    assert all(one is other._dtype_policy for one, other in zip(policies, model._flatten_layers(), strict=True))


def test_where_both_are_wrong_the_worse_one_is_to_blame():
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = net(keras.layers.Conv2D(2, 3), ScaledWithoutXla(3.0), ScaledUnderXla(-4.0))
    compared = compare_results(model, batch(32))
    assert compared.layer.split("/")[1].startswith("scaled_under_xla")  # though the layer before it differs too
    assert compared.errors == pytest.approx((5.0, 2.0), rel=0.05)


class InFloat16(keras.layers.Layer):
    """Computes in float16 whatever its policy."""

    def call(self, inputs):
        return tf.cast(inputs, "float16")


class NotInFloat32(keras.layers.Layer):
    """Fails in float32."""

    def call(self, inputs):
        if inputs.dtype == "float32":
            raise TypeError("only 16 bits")
        return inputs


@pytest.mark.slow
@pytest.mark.parametrize("layer", [InFloat16, NotInFloat32])
def test_a_model_that_cannot_run_in_float32_is_not_judged_by_it(layer):
    keras.config.set_dtype_policy("mixed_float16")
    compared = compare_results(net(keras.layers.Conv2D(2, 3), layer(), ScaledWithoutXla(1.5)), batch(32))
    assert compared.wrong
    assert compared.errors is None


class Overflows(keras.layers.Layer):
    """Its first example is beyond the range of float16."""

    def call(self, inputs):
        return tf.concat([inputs[:1] + tf.cast(6e4, inputs.dtype) + tf.cast(6e4, inputs.dtype), inputs[1:]], 0)


@pytest.mark.slow
def test_beside_numbers_that_overflow_in_both_xla_is_judged_by_the_others():
    keras.config.set_dtype_policy("mixed_float16")
    model = net(keras.layers.Conv2D(2, 3), Overflows(), ScaledUnderXla(1.5))
    compared = compare_results(model, batch(32))
    assert compared.layer.split("/")[1].startswith("scaled_under_xla")
    assert compared.errors == pytest.approx((0.5, 0.0), abs=0.01)


@pytest.mark.slow
def test_float32_makes_as_many_updates_as_float16():
    """The first gradients overflow in float16, and the step is skipped."""
    keras.config.set_dtype_policy("mixed_float16")
    keras.utils.set_random_seed(0)
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=200_000)
    model = net(keras.layers.Conv2D(2, 3), ScaledWithoutXla(1.5), optimizer=optimizer)
    updates = [timer.state_after(4).updates for timer in both_timers(model, batch(32)).values()]
    assert updates == [2, 2]
    assert not compare_results(model, batch(32)).wrong


@pytest.mark.slow
def test_stock_attention_in_bfloat16():
    """TensorFlow 2.21 on a CPU sums the gradient of attention's last bias in 16 bits."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    keras.utils.set_random_seed(0)
    tokens = keras.Input((256, 32))
    pooled = keras.layers.GlobalAveragePooling1D()(keras.layers.MultiHeadAttention(4, 8)(tokens, tokens))
    model = keras.Model(tokens, keras.layers.Dense(10, dtype="float32")(pooled))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    random = np.random.default_rng(0)
    compared = compare_results(model, (random.normal(size=(32, 256, 32)), random.integers(10, size=32)))
    assert not compared.wrong
    if compared.where:
        assert compared.where.endswith("attention_output/bias")
        assert compared.errors.xla < 0.05 < compared.errors.tensorflow
