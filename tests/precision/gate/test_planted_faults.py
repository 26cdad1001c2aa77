"""Each planted fault is named by the gate, and the nets beside it pass."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from precision_nets import X, Y, cross_entropy, functional, overflowing, underflowing, with_head, with_late_cast
from quick import first_quick

from tfopt import repairs
from tfopt.precision import apply, check

layers = keras.layers
HALVES = ("mixed_float16", "mixed_bfloat16")


@pytest.mark.slow
def test_an_overflowing_layer_is_named():
    model = overflowing()
    report = check(model, (X, Y), "mixed_float16")
    assert not report.passed
    assert report.first_overflow == "loud"
    assert len(report.problems) == 1  # what comes after it is no problem of its own
    assert report.problems[0].startswith("'loud' overflows, the first layer to do so: ")
    assert "float16, whose largest value is 65504" in report.problems[0]
    blamed = {layer.path: layer for layer in report.layers if layer.blamed}
    assert blamed.keys() == {"loud", "quiet"}  # the second one takes in what the first puts out
    assert blamed["loud"].output.overflow > 0.1
    assert blamed["loud"].output.largest > 65504
    assert report.fallback == {"net": "mixed_float16", "loud": "float32", "quiet": "float32"}
    assert check(model, (X, Y), report.fallback).passed
    assert check(model, (X, Y), "mixed_bfloat16").passed  # it has float32's range


class SumOfSquares(layers.Layer):
    """Overflows on its way to a small result: 300² · 8 elements is beyond 65504, and one by infinity is zero."""

    def call(self, x):
        return x / keras.ops.sqrt(keras.ops.sum((300 * x) ** 2, axis=-1, keepdims=True))


@pytest.mark.slow
def test_an_output_that_vanishes_is_named_though_the_loss_hardly_tells():
    model = functional(lambda x: layers.Dense(3, name="head")(layers.Dense(8)(SumOfSquares(name="norm")(x))))
    report = check(model, (X, Y), "mixed_float16")
    assert report.loss_drift < 0.001
    assert report.problems[0].startswith("The output of 'norm' loses 100 % of its norm to zeros")
    assert report.fallback == {"net": "mixed_float16", "norm": "float32"}


class Exponential(layers.Layer):
    def call(self, x):
        return keras.ops.log(keras.ops.sum(keras.ops.exp(x * 0.0 + 12.0), axis=-1, keepdims=True)) + x


def test_an_overflow_inside_a_layer_is_told_from_one_of_its_result():
    model = functional(lambda x: layers.Dense(3, name="head")(layers.Dense(8)(Exponential(name="logsumexp")(x))))
    report = check(model, (X, Y), "mixed_float16")
    assert report.problems[0].startswith("'logsumexp' overflows inside, the first layer to do so: 100 %")
    assert report.fallback == {"net": "mixed_float16", "logsumexp": "float32"}


@pytest.mark.slow
def test_an_underflowing_gradient_is_named():
    model = underflowing()
    report = check(model, (X, Y), "mixed_float16")
    assert [layer.path for layer in report.layers if layer.blamed] == ["branch"]
    assert len(report.problems) == 1
    said = "The gradient of 'branch' underflows even with loss scaling: 100 %"
    assert report.problems[0].startswith(said)
    found = {layer.path: layer for layer in report.layers}
    assert found["branch"].weight_gradient.lost == found["branch"].weight_gradient.underflow == 1
    assert found["main"].weight_gradient.lost < 0.01
    assert report.fallback == {"net": "mixed_float16", "branch": "float32", "tiny": "float32"}
    assert check(model, (X, Y), "mixed_bfloat16").passed


@tf.custom_gradient
def _faint(x):
    return tf.identity(x), lambda gradient: gradient * 1e-6


class Faint(layers.Layer):
    """Hands on a millionth of the gradient."""

    def call(self, x):
        return _faint(x)


@pytest.mark.slow
def test_scaling_the_loss_saves_a_gradient():
    """10⁻⁵ of the others is below float16's smallest number, and 2¹⁵ times that is not."""

    def report(scale):
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=scale)
        model = functional(lambda x: layers.Dense(3)(Faint()(layers.Dense(8, name="body")(x))), optimizer=optimizer)
        return check(model, (X, Y), "mixed_float16")

    assert report(2.0**15).passed
    assert "The gradient of 'body' underflows" in report(1.0).problems[0]


def test_stock_keras_saturates_the_loss_of_a_float16_head():
    """D10: where float32 tells 16 from 40, float16 gives the same loss for both, no gradient, and no error."""
    logits = tf.Variable([[0.0, 40.0, 0.0]])
    losses, gradients = {}, {}
    for dtype in ("float32", "float16"):
        head = layers.Softmax(dtype=f"mixed_{dtype}" if dtype == "float16" else dtype)
        with tf.GradientTape() as tape:
            loss = cross_entropy(from_logits=False)(tf.constant([0]), head(logits * 0.5))
        losses[dtype], gradients[dtype] = float(loss), np.abs(tape.gradient(loss, logits)).max()
    assert losses["float16"] == pytest.approx(-np.log(1e-7), rel=1e-3)  # where Keras clips a probability of zero
    assert gradients["float16"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("policy", first_quick(HALVES))
def test_a_16_bit_head_is_named(policy):
    """D10: as built, whatever the policy that is asked for would do, or asked for by name."""
    dtype = policy.removeprefix("mixed_")
    said = f"'head' outputs the model's result in {dtype}: 16-bit logits and probabilities silently saturate the loss"
    named = {"body": policy, "head": policy}
    for model, asked in ((with_head(policy), policy), (with_head(policy), {}), (with_head("float32"), named)):
        report = check(model, (X, Y), asked)
        assert [problem.startswith(said) for problem in report.problems] == [True]
        assert report.fallback["head"] == "float32"
        assert check(model, (X, Y), report.fallback).passed
    assert check(with_head("float32"), (X, Y), policy).passed  # which leaves the head in float32
    mended = with_head(policy)
    apply(mended, policy)
    assert check(mended, (X, Y), policy).passed


@pytest.mark.parametrize("policy", HALVES)
def test_a_16_bit_softmax_is_named_that_is_cast_afterwards(policy):
    report = check(with_late_cast(policy), (X, Y), {})
    assert [problem.startswith("'probabilities' computes the model's softmax") for problem in report.problems] == [True]
    assert report.fallback == {"probabilities": "float32"}


def test_an_operation_that_makes_the_output_is_told_by_the_model():
    model = functional(lambda x: layers.Dense(3, name="head", dtype="mixed_float16")(x) * 2.0)
    report = check(model, (X, Y), {"head": "mixed_float16"})
    assert "'head' outputs the model's result in float16" in report.problems[0]
    assert report.layers[-1].path == "net"


@pytest.mark.parametrize("scales", [True, False])
def test_gradients_that_overflow_without_any_scale(scales):
    repairs.install("loss_scaling")  # which keeps the option
    body = [layers.Dense(8, name="body"), layers.Dense(3, name="head")]
    model = functional(lambda x: body[1](body[0](x)), loss_weights=[1e9], auto_scale_loss=scales)
    report = check(model, (X, Y), "mixed_float16")
    assert report.passed == scales
    if scales:  # Keras halves its scale below 1 too
        assert report.loss_scale < 1
    else:
        assert report.loss_scale == 1
        assert report.problems[0].startswith("Gradients overflow even without loss scaling")


def test_the_scale_is_halved_until_gradients_are_finite():
    model = functional(lambda x: layers.Dense(3)(layers.Dense(8)(x)), loss_weights=[1e3])
    report = check(model, (X, Y), "mixed_float16")
    assert report.passed
    assert 1 < report.loss_scale < 2**15


@pytest.mark.slow
def test_a_fitted_optimizers_own_scale_is_taken():
    model = functional(lambda x: layers.Dense(3)(layers.Dense(8)(x)))
    apply(model, "mixed_float16")
    model.fit(X, Y, verbose=0)
    model.optimizer.dynamic_scale.assign(64.0)
    assert check(model, (X, Y), "mixed_float16").loss_scale == 64


class Cancelling(layers.Layer):
    """A difference of large numbers: float16 keeps six bits of it."""

    def call(self, x):
        return (x + 30.0) - 30.0


def test_a_loss_that_drifts_is_named_with_its_root():
    def body(x):
        x = Cancelling(name="cancelling")(layers.Dense(8, name="body")(x))
        return layers.Dense(3, name="head")(x)

    model = functional(body, loss="mse")
    report = check(model, (X, model.predict(X, verbose=0) + 0.01), "mixed_float16")
    assert len(report.problems) == 1
    assert report.problems[0].startswith("The loss is 0.0")
    assert "'cancelling' adds the largest error" in report.problems[0]
    assert report.fallback == {"net": "mixed_float16", "cancelling": "float32"}


def test_a_gradient_that_is_zero_but_for_rounding_is_no_problem():
    """A bias before batch normalisation: float32 leaves 10⁻⁹ of its gradient, float16 10⁻³ or nothing."""

    class Bias(layers.Layer):
        def build(self, shape):
            self.bias = self.add_weight(shape=shape[-1:], name="bias")

        def call(self, x):
            return x + self.bias

    model = functional(lambda x: layers.Dense(3)(layers.BatchNormalization()(Bias(name="bias")(x))))
    for policy in HALVES:
        report = check(model, (X, Y), policy)
        assert report.passed, str(report)
        assert next(x for x in report.layers if x.path == "bias").weight_gradient.error > 2
