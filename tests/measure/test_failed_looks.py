"""Whatever fails, and wherever it does, while a model is only looked at: training goes on as if nobody had looked."""

import functools

import keras
import numpy as np
import pytest
from models import assert_same_state, state
from quick import first_quick

import tfopt
from tfopt.internals.graphs import ConcreteFunction
from tfopt.internals.sources import find
from tfopt.internals.training import BaseOptimizer

layers = keras.layers
X = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
BATCH = X, np.arange(8) % 3

LOOKS = {
    "step_time": lambda model: tfopt.measure.step_time(model, BATCH, steps=2, warmup=0),
    "fit_time": lambda model: tfopt.measure.fit_time(model, BATCH, steps=2, warmup=0),
    "estimate": lambda model: tfopt.memory.estimate(model, BATCH),
    "cost": lambda model: tfopt.compress.cost(model, BATCH),
    "suggest": lambda model: tfopt.compress.suggest(model, BATCH),
    "find": lambda model: tfopt.batch.find(model, BATCH, largest=8),
    "decide": lambda model: tfopt.xla.decide(model, BATCH, steps=2),
    "explain": lambda model: tfopt.xla.explain(model, BATCH),
    "check": lambda model: tfopt.precision.check(model, BATCH, "mixed_bfloat16", batches=1),
    "alignment": lambda model: tfopt.precision.alignment(model, batch_size=8),
    "diagnose": lambda model: tfopt.diagnose(model, BATCH, steps=5),
    "tune": lambda model: tfopt.tune(model, BATCH, allow=("xla",), steps=5),
}
INSIDE = {
    "a layer": (keras.Layer, "__call__"),
    "the training step": (keras.Model, "train_step"),
    "a metric's build": find("keras.src.trainers.compile_utils:CompileMetrics.build"),
    "an optimizer's build": (keras.optimizers.Optimizer, "add_variable_from_reference"),
    "an update": (BaseOptimizer, "apply"),
    "a run": (ConcreteFunction, "_call_flat"),
}


def made():
    keras.utils.set_random_seed(3)
    row = [layers.BatchNormalization(), layers.Dropout(0.3), layers.Dense(3)]
    model = keras.Sequential([keras.Input((4,)), *row])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.1), loss, metrics=["accuracy"], jit_compile=False)
    return model


def fitted(model):
    keras.utils.set_random_seed(4)
    history = model.fit(*BATCH, batch_size=4, epochs=2, shuffle=False, verbose=0).history
    return history, state(model)


class PlantedError(Exception):
    """An error that nothing expects."""


def failing(patch, place, nth, error):
    """Lets the nth call of a method raise."""
    owner, name = INSIDE[place]
    stock, calls = getattr(owner, name), []

    def call(*args, **kwargs):
        calls.append(name)
        if len(calls) == nth:
            raise error
        return stock(*args, **kwargs)

    patch.setattr(owner, name, call)
    return calls


def fails(model, look, place, nth, error):
    """Looks, and returns whether that failed; the nth call inside may not come, or be answered for."""
    policy, attributes, built = keras.config.dtype_policy(), set(vars(model)), model.optimizer.built
    with pytest.MonkeyPatch.context() as patch:
        calls = failing(patch, place, nth, error)
        try:
            LOOKS[look](model)
        except BaseException:
            if len(calls) < nth:
                raise
            assert model.optimizer.built == built
            assert set(vars(model)) == attributes
            return True
        finally:
            assert keras.config.dtype_policy() == policy
            assert getattr(model, "train_function", None) is None
    return False


@functools.cache
def untouched():
    return fitted(made())


def assert_trains_as_untouched(model):
    (found, after), (expected, twin) = fitted(model), untouched()
    assert found == expected
    assert_same_state(after, twin)


CASES = [(look, place) for look in LOOKS for place in INSIDE]


@pytest.mark.parametrize(("look", "place"), first_quick(CASES, 0, every=7))
def test_training_goes_on_after_looks_that_failed(look, place):
    model = made()
    for nth, error in ((1, KeyboardInterrupt), (2, PlantedError), (5, KeyboardInterrupt)):
        if not fails(model, look, place, nth, error):
            break
    assert_trains_as_untouched(model)


@pytest.mark.slow
@pytest.mark.parametrize("error", [PlantedError, KeyboardInterrupt])
def test_an_optimizer_half_built_by_a_trace_is_unbuilt(error):
    model = made()
    assert fails(model, "estimate", "an optimizer's build", 3, error)
    assert_trains_as_untouched(model)
