import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from models import assert_same_state, batch, small_net, state
from tensorflow.python.ops import control_flow_util

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
    assert decision.on.steps_per_sample == 2  # ten steps in five turns, with one wait a turn
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


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_dataset_that_shuffles_is_compared_on_one_batch(dropout):
    dataset = tf.data.Dataset.from_tensor_slices(batch(200)).shuffle(200).batch(32, drop_remainder=True)
    assert decide(small_net(dropout=dropout), dataset, steps=5).drift < 1e-3


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
    assert decide(model, (x, y), steps=5).drift < (1e-3 if policy == "float32" else 0.1)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "rmsprop", "adagrad", "lion", "adamw", "ftrl", "nadam"])
def test_every_optimizer_leaves_something_to_compare(optimizer):
    assert decide(small_net(dropout=0.0, optimizer=optimizer), batch(32), steps=5).drift < 1e-3


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


def xla_scales(factor):
    class Layer(keras.layers.Layer):
        """Computes something else under XLA, as a miscompiled operation would."""

        def call(self, inputs):
            if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
                return inputs * factor
            return inputs

    return Layer()


@pytest.mark.parametrize("factor", [-3.0, float("nan")])
@pytest.mark.parametrize("optimizer", [{}, {"gradient_accumulation_steps": 8}])
@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_what_xla_computes_wrongly_is_off(factor, optimizer, policy):
    keras.config.set_dtype_policy(policy)
    model = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), xla_scales(factor)])
    model.add(keras.layers.Dense(10, dtype="float32"))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(**optimizer), loss)
    decision = decide(model, batch(32), steps=5)
    assert not decision.enabled
    assert not decision.drift <= 0.1


def test_weights_that_do_not_move_prove_nothing():
    model = small_net(optimizer=keras.optimizers.SGD(0.0))
    decision = decide(model, batch(16), steps=5)
    assert decision.drift is None
    assert "did not move" in decision.reason


def test_what_fails_without_xla_is_raised():
    images, labels = batch()
    with pytest.raises(tf.errors.InvalidArgumentError, match="label value"):
        decide(small_net(jit_compile=False), (images, labels + 10), steps=5)


@pytest.mark.parametrize("on", ["off", "auto", 1, None])
def test_only_true_and_false_switch(on):
    with pytest.raises(TypeError, match="Expected True or False"):
        set_jit(small_net(), on)


@pytest.mark.parametrize("arguments", [{"steps": 0}, {"steps": 2.5}, {"tolerance": -1.0}, {"tolerance": float("nan")}])
def test_bad_arguments(arguments):
    with pytest.raises(ValueError, match=f"Expected {next(iter(arguments))}"):
        decide(small_net(), batch(), **arguments)


def times(ms, first):
    return StepTimes(repeats_ms=((ms, ms),) * 5, steps_per_sample=1, first_step_seconds=first)


@pytest.mark.parametrize(
    ("on", "drift", "enabled", "break_even"),
    [
        (5.0, 0.0, True, 400),
        (5.0, 0.2, False, 400),
        (5.0, None, False, 400),
        (5.0, float("nan"), False, 400),
        (5.0, float("inf"), False, 400),
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
