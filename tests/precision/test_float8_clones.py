import random

import keras
import pytest
from models import assert_same_state, state
from precision_nets import X, Y, cross_entropy, functional, mlp, transformer
from quick import first_quick

from tfopt.errors import UnsupportedError
from tfopt.model.layers import layer_paths
from tfopt.precision import check
from tfopt.precision.layer_policies import current_policy

layers = keras.layers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "policy", "count"), first_quick([(mlp, "float8_from_mixed_float16", 3), (transformer, "float8", 6)])
)
def test_float8_is_compared_on_a_clone(make, policy, count):
    model, data = make()
    model.fit(*data, verbose=0)
    before, seeds = state(model), random.getstate()
    report = check(model, data, policy)
    assert_same_state(before, state(model))
    assert random.getstate() == seeds
    assert {current_policy(layer).quantization_mode for layer in layer_paths(model)} == {None}
    assert report.passed, str(report)
    quantized = [layer for layer in report.layers if layer.policy.startswith("float8")]
    assert len(quantized) == count  # of the transformer four in attention and two in the block; not the head
    # Three bits of mantissa round by up to 6 %; without scales that fit, gradients would be zero.
    assert all(0.01 < layer.output.error < 0.2 and layer.weight_gradient.lost < 0.1 for layer in quantized)
    assert report.notes == ()


@pytest.mark.slow
def test_float8_layers_have_taken_their_scales_from_steps_before():
    """Without, gradients of a millionth would be zero: 8 bits end at 10⁻⁵."""
    model = functional(lambda x: layers.Dense(3)(layers.Dense(8, name="body")(x)), loss_weights=[1e-6])
    report = check(model, (X, Y), "float8")
    assert report.passed, str(report)
    assert next(x for x in report.layers if x.path == "body").weight_gradient.lost < 0.1


class Nameless(keras.Model):
    """Keras gives its layers other names in each copy."""

    def __init__(self, factor=1.0):
        super().__init__()
        self.factor = factor
        self.body, self.head = layers.Dense(8), layers.Dense(3)
        self.up, self.down = layers.Rescaling(factor), layers.Rescaling(1 / factor)

    def call(self, x, training=None):
        return self.head(self.down(self.up(self.body(x))))

    def get_config(self):
        return {"factor": self.factor}


class OwnStep(Nameless):
    def train_step(self, data):
        raise AssertionError


class OwnCompile(Nameless):
    def compile(self, rate):
        super().compile(keras.optimizers.SGD(rate), cross_entropy())


def made(kind, *arguments, factor=1.0):
    keras.utils.set_random_seed(1)
    model = kind(factor)
    model.compile(*(arguments or ("adam", cross_entropy())))
    model(X)
    return model


@pytest.mark.slow
def test_layers_without_names_are_compared_in_full_and_taken_back():
    model = made(Nameless)
    report = check(model, (X, Y), "float8")
    assert report.passed, str(report)
    assert [row.path for row in report.layers] == [x.name for x in (model.body, model.up, model.down, model.head)]

    model = made(Nameless, factor=1e5)
    report = check(model, (X, Y), "float8_from_mixed_float16")
    back = {path for path, policy in report.fallback.items() if policy == "float32"}
    assert back == {model.up.name, model.down.name}
    assert check(model, (X, Y), report.fallback).passed


@pytest.mark.slow
def test_a_train_step_of_its_own_is_not_run():
    report = check(made(OwnStep), (X, Y), "float8")
    assert report.passed, str(report)
    assert "custom train_step, which was not run" in report.notes[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`compile\\(\\)` was not called")  # Keras', of the copy
def test_a_compile_of_its_own():
    assert check(made(OwnCompile, 0.1), (X, Y), "float8").passed


class OnlyFloat32(layers.Layer):
    def call(self, x):
        return x + keras.ops.ones(8, "float32") if x.dtype == "float32" else x + x.undefined


def test_a_layer_that_does_not_take_the_dtype():
    model = functional(lambda x: layers.Dense(3)(OnlyFloat32()(layers.Dense(8)(x))))
    with pytest.raises(UnsupportedError, match=r"computes under float8_from_mixed_float16\. Found: .*undefined"):
        check(model, (X, Y), "float8_from_mixed_float16")
