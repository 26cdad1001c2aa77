"""Trainings with and without XLA, and how far apart they end."""

import math

import keras
import numpy as np
import pytest
from models import assert_same_state, batch, small_net, state
from planted_layers import Noise, ScaledUnderXla
from quick import campaign, first_quick

from tfopt.measure import StepTimer
from tfopt.precision import tf32
from tfopt.xla import drift
from tfopt.xla.drift import both_timers, measure_drift


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


@pytest.mark.slow
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


@pytest.mark.parametrize("policy", first_quick(["mixed_bfloat16"], 0) + campaign(["float32"]))
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer", first_quick(["sgd", "adam", "rmsprop", "adagrad", "lion", "adamw", "ftrl", "nadam"], 2, every=3)
)
def test_every_optimizer_leaves_something_to_compare(optimizer):
    with tf32(False):
        assert drift_of(net(optimizer=optimizer), batch(32))[0] < 1e-3


def test_other_random_draws_cannot_be_compared():
    assert drift_of(net(Noise()), batch()) == (None, "the model draws random numbers outside dropout")


def test_weights_that_do_not_move_prove_nothing():
    assert drift_of(net(optimizer=keras.optimizers.SGD(0.0)), batch()) == (None, "its weights did not move")


def test_a_training_that_is_not_finite_proves_nothing():
    model = net()
    model.layers[-1].kernel.assign(model.layers[-1].kernel * np.nan)
    assert drift_of(model, batch()) == (None, "the training gives no finite numbers without XLA either")


@pytest.mark.slow
@pytest.mark.parametrize("factor", [-3.0, float("nan")])
@pytest.mark.parametrize("optimizer", first_quick([{}, {"gradient_accumulation_steps": 8}]))
@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_another_computation_drifts(factor, optimizer, policy):
    keras.config.set_dtype_policy(policy)
    model = net(ScaledUnderXla(factor), optimizer=keras.optimizers.SGD(**optimizer))
    drift, _ = drift_of(model, batch(32))
    assert drift > 0.1 or math.isnan(drift)
