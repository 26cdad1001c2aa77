import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from models import assert_same_state, batch, small_net, state

from tfopt import xla
from tfopt.errors import UnsupportedError
from tfopt.measure import StepTimer, StepTimes
from tfopt.xla import JitDecision, decide, set_jit


def compiled_steps(model):
    """Whether `fit` traces its step for XLA; False, too, where it goes on with a step traced before."""
    data = tf.data.Dataset.from_tensors(batch(8))
    marked = []
    original = tf.function

    def spy(function=None, **options):
        if getattr(function, "__name__", "") == "one_step_on_data":
            marked.append(bool(options.get("jit_compile")))
        return original(function, **options) if function else lambda f: original(f, **options)

    tf.function = spy
    try:
        model.fit(data, verbose=0, shuffle=False)
    finally:
        tf.function = original
    return any(marked)


def test_jit_takes_effect_on_a_fitted_model_and_keeps_its_state():
    model = small_net(jit_compile=False)
    assert not compiled_steps(model)
    before = state(model)
    set_jit(model, True)
    assert_same_state(before, state(model))
    assert compiled_steps(model)
    assert model.optimizer.iterations.numpy() == 2
    set_jit(model, False)
    assert not compiled_steps(model)


def test_jit_computes_the_same():
    """Without random draws, whose masks XLA makes differently, the weights agree within float32 rounding."""
    models = [small_net(jit_compile=False, dropout=0.0, optimizer="sgd") for _ in range(2)]
    set_jit(models[1], True)
    for model in models:
        model.fit(tf.data.Dataset.from_tensors(batch(32)).repeat(5), verbose=0, shuffle=False)
    for plain, jitted in zip(*(model.get_weights() for model in models), strict=True):
        np.testing.assert_allclose(plain, jitted, rtol=1e-4, atol=1e-6)


def unsupported():
    layers = keras.layers
    model = keras.Sequential([keras.Input((8, 8, 1)), layers.RandomRotation(0.1), layers.Flatten(), layers.Dense(10)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def test_a_layer_that_xla_does_not_support_is_named():
    with pytest.raises(UnsupportedError, match=r"random_rotation.* Leave XLA off"):
        set_jit(unsupported(), True)
    decision = decide(unsupported(), batch())
    assert not decision.enabled
    assert "random_rotation" in decision.reason
    assert decision.speedup is None


def test_eager_and_uncompiled_models_are_refused():
    with pytest.raises(UnsupportedError, match="run_eagerly"):
        set_jit(small_net(run_eagerly=True), True)
    with pytest.raises(ValueError, match=r"not compiled\. Call model\.compile"):
        set_jit(small_net(compiled=False), True)
    with pytest.raises(ValueError, match=r"not compiled\. Call model\.compile"):
        decide(small_net(compiled=False), batch())


class Opaque(keras.layers.Layer):
    def call(self, inputs):
        return tf.ensure_shape(tf.py_function(lambda x: x, [inputs], inputs.dtype), inputs.shape)


def test_what_xla_cannot_compile_is_off_with_the_reason():
    model = keras.Sequential([keras.Input((8, 8, 1)), Opaque(), keras.layers.Flatten(), keras.layers.Dense(10)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    decision = decide(model, batch(), steps=5)
    assert not decision.enabled
    assert "EagerPyFunc" in decision.reason


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_a_decision_measures_both_and_changes_nothing(policy):
    model = small_net(policy, jit_compile=False)
    model.fit(*batch(), verbose=0)
    before, function = state(model), model.train_function
    decision = decide(model, batch(32), steps=10)
    assert_same_state(before, state(model))
    assert (model.jit_compile, model.train_function) == (False, function)
    assert [layer.rate for layer in model.layers if isinstance(layer, keras.layers.Dropout)] == [0.5]
    assert len(decision.off.repeats_ms) == len(decision.on.repeats_ms) == 5
    assert decision.compile_seconds > 0
    # Dropout of one half: with other masks under XLA the drift would be above 0.3.
    assert decision.drift < (1e-3 if policy == "float32" else 0.1)
    assert decision.enabled == (decision.comparison.verdict == "faster")
    values = json.loads(json.dumps(decision.to_dict()))
    assert StepTimes.from_dict(values["on"]) == decision.on


def test_with_dropout_in_place_the_masks_would_drift(monkeypatch):
    monkeypatch.setattr(StepTimer, "draws_random_numbers", False)
    decision = decide(small_net(), batch(32), steps=5)
    assert decision.drift > 0.1
    assert not decision.enabled
    assert "does not compute the same" in decision.reason


class Noise(keras.layers.Layer):
    def call(self, inputs):
        return inputs + keras.random.normal(keras.ops.shape(inputs))


def test_other_random_draws_cannot_be_compared():
    model = keras.Sequential([keras.Input((8, 8, 1)), Noise(), keras.layers.Flatten(), keras.layers.Dense(10)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    decision = decide(model, batch(), steps=5)
    assert decision.drift is None
    assert not decision.enabled
    assert "drift unknown" in decision.reason
    assert "drift not measured" in decide(model, batch(), steps=5, tolerance=None).reason


def times(ms, first):
    return StepTimes(repeats_ms=((ms, ms),) * 5, steps_per_sample=1, first_step_seconds=first)


@pytest.mark.parametrize(
    ("on", "drift", "enabled", "break_even"),
    [
        (5.0, 0.0, True, 400),
        (5.0, 0.2, False, 400),
        (5.0, None, False, 400),
        (10.0, 0.0, False, None),
        (20.0, 0.0, False, None),
    ],
)
def test_enabled_where_faster_and_the_same(on, drift, enabled, break_even):
    decision = xla._decided(times(10.0, 1.0), times(on, 3.0), drift, 0.1)
    assert decision.enabled == enabled
    assert decision.break_even_steps == break_even
    assert decision.compile_seconds == 2.0
    assert decision.speedup == pytest.approx(10.0 / on)


def test_apply():
    model = small_net(jit_compile=False)
    JitDecision(enabled=True, reason="measured").apply(model)
    assert model.jit_compile is True
    assert str(JitDecision(enabled=False, reason="slower.")) == "XLA off: slower."
