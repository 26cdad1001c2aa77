"""Softmaxes and sigmoids in 16 bits are found by operation, wherever the code computes them."""

import keras
import pytest
import tensorflow as tf
from precision_nets import X, Y, cross_entropy, functional

from tfopt.precision import check

layers, ops = keras.layers, keras.ops
HALF = "mixed_bfloat16"
CAST = {"activation": "linear", "dtype": "float32", "name": "cast"}


def dense(activation=None, units=3):
    return layers.Dense(units, activation=activation, dtype=HALF, name="dense")


class Called(layers.Layer):
    """A user's layer with a function of a softmax in it."""

    def __init__(self, function, **options):
        super().__init__(dtype=HALF, **options)
        self.function = function

    def call(self, x):
        return self.function(x)


def by_hand(x):
    exponents = ops.exp(x - ops.max(x, axis=-1, keepdims=True))
    return exponents / ops.sum(exponents, axis=-1, keepdims=True)


def traced(x):
    return tf.function(lambda y: tf.nn.softmax(y), autograph=False)(x)


FOUND = {
    "operation": lambda x: (layers.Activation(**CAST)(ops.softmax(dense()(x))), "'net' computes the model's softmax"),
    "sigmoid": lambda x: (layers.Activation(**CAST)(dense("sigmoid")(x)), "'dense' computes the model's sigmoid"),
    "rescaled": lambda x: (layers.Rescaling(2.0, -1.0, dtype="float32")(dense("sigmoid")(x)), "'dense' computes"),
    "cast": lambda x: (ops.cast(dense("softmax")(x), "float32"), "'dense' computes the model's softmax"),
    "logarithm": lambda x: (layers.Activation(**CAST)(ops.log_softmax(dense()(x))), "the model's log-softmax"),
    "function": lambda x: (layers.Activation(**CAST)(Called(traced, name="own")(dense()(x))), "'own' computes"),
    "by hand": lambda x: (layers.Activation(**CAST)(Called(by_hand, name="own")(dense()(x))), "'own' computes"),
    "moved": lambda x: (
        layers.Activation(**CAST)(ops.transpose(ops.stack([dense("softmax")(x)] * 2), (1, 0, 2))[:, 0]),
        "'dense' computes",
    ),
    "mean of two": lambda x: (
        layers.Activation(**CAST)((dense("softmax")(x) + layers.Softmax(dtype=HALF)(x[:, :3])) / 2.0),
        "'dense' computes",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", FOUND)
def test_it_is_found_and_named(how):
    said = []

    def body(x):
        outputs, words = FOUND[how](x)
        said.append(words)
        return outputs

    report = check(functional(body, loss=cross_entropy(from_logits=False)), (X, Y), {})
    assert any(said[0] in problem and "casting its result is too late" in problem for problem in report.problems)


NOT_FOUND = {
    "logits": lambda x: layers.Activation(**CAST)(dense()(x)),
    "in float32": lambda x: layers.Softmax(dtype="float32")(dense()(x)),
    "a gate": lambda x: layers.Dense(3, dtype="float32", name="head")(dense("sigmoid")(x)),
    "swish": lambda x: layers.Activation(**CAST)(dense("silu")(x)),
    "a residual": lambda x: layers.Activation(**CAST)(
        dense("sigmoid")(x) + layers.Dense(3, dtype=HALF, name="other")(x)
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", NOT_FOUND)
def test_what_is_no_probability_passes(how):
    report = check(functional(NOT_FOUND[how], loss=cross_entropy(from_logits=how != "in float32")), (X, Y), {})
    assert report.passed, report.problems


@pytest.mark.slow
def test_the_layers_before_an_operation_come_back_too():
    model = functional(
        lambda x: FOUND["operation"](layers.Dense(8, dtype=HALF, name="body")(x))[0], loss=cross_entropy(False)
    )
    report = check(model, (X, Y), {})
    assert report.fallback["dense"] == "float32"
    assert check(model, (X, Y), report.fallback).passed
