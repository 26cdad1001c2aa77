import keras
import numpy as np
import pytest
import tensorflow as tf
from models import assert_same_state, batch, small_net, state
from planted_layers import Noise, ScaledUnderXla, ScaledWithoutXla

from tfopt.errors import UnsupportedError
from tfopt.xla import jit, set_jit, watch

WRONG = r"XLA gets OnesLike in layer .*masked.* at .*test_set_jit\.py:\d+"


def masked(inputs):
    return inputs * tf.reduce_sum(tf.ones_like(tf.boolean_mask(inputs, inputs > 0)))


def in_a_loop(inputs):
    return tf.while_loop(lambda i, x: i < 2, lambda i, x: (i + 1, masked(x)), [0, inputs])[1]


def wrong(function=masked):
    """A layer that XLA gets wrong."""
    return keras.layers.Lambda(function, name="masked")


def net(layer):
    model = keras.Sequential([keras.Input((8, 8, 1)), layer, keras.layers.Flatten(), keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, jit_compile=False)
    return model


def compiled_steps(model, size):
    """Whether `fit` compiled a step for batches of `size`, a size it has not met: XLA compiles for each, anew."""
    with watch() as compilations:
        model.fit(tf.data.Dataset.from_tensors(batch(size)), verbose=0, shuffle=False)
    return any(compilation.function == "one_step_on_data" for compilation in compilations.events)


@pytest.mark.slow
def test_jit_takes_effect_on_a_fitted_model_and_keeps_its_state():
    model = small_net(jit_compile=False)
    assert not compiled_steps(model, 8)
    before = state(model)
    set_jit(model, True)
    assert_same_state(before, state(model))
    assert compiled_steps(model, 9)
    assert model.optimizer.iterations.numpy() == 2
    set_jit(model, False)
    assert not compiled_steps(model, 10)


@pytest.mark.slow
def test_jit_computes_the_same():
    """Without random draws, whose masks XLA makes differently, the weights agree within float32 rounding."""
    models = [small_net(jit_compile=False, dropout=0.0, optimizer="sgd") for _ in range(2)]
    set_jit(models[1], True)
    for model in models:
        model.fit(tf.data.Dataset.from_tensors(batch(32)).repeat(5), verbose=0, shuffle=False)
    for plain, jitted in zip(*(model.get_weights() for model in models), strict=True):
        np.testing.assert_allclose(plain, jitted, rtol=1e-4, atol=1e-6)


def test_what_cannot_run_under_xla_is_refused():
    rotated = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.RandomRotation(0.1), keras.layers.Flatten()])
    rotated.compile("sgd", "mse")
    with pytest.raises(UnsupportedError, match="random_rotation"):
        set_jit(rotated, True)
    with pytest.raises(UnsupportedError, match="run_eagerly"):
        set_jit(small_net(run_eagerly=True), True)
    with pytest.raises(ValueError, match=r"not compiled\. Call model\.compile"):
        set_jit(small_net(compiled=False), True)


@pytest.mark.parametrize("on", ["off", "auto", 1, None])
def test_only_true_and_false_switch(on):
    with pytest.raises(TypeError, match="Expected True or False"):
        set_jit(small_net(), on)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (
            lambda: ScaledUnderXla(1.1),
            "the output of layer .*scaled_under_xla.* is the first that differs, by 0.1 ",
        ),
        (Noise, "the model draws random numbers.*switch it on without data"),
        (wrong, WRONG),
    ],
)
def test_with_data_what_is_not_known_to_be_the_same_is_refused(layer, message):
    model = net(layer())
    model.fit(*batch(), verbose=0)
    before, function = state(model), model.train_function
    with pytest.raises(UnsupportedError, match=message):
        set_jit(model, True, data=batch())
    assert_same_state(before, state(model))
    assert (model.jit_compile, model.train_function) == (False, function)


@pytest.mark.slow
def test_with_data_in_16_bits_only_what_xla_gets_wrong_is_refused():
    keras.config.set_dtype_policy("mixed_bfloat16")
    wrong = net(ScaledUnderXla(1.5))
    with pytest.raises(
        UnsupportedError, match=r"scaled_under_xla.* differs by 0\.5 .*; from float32 it differs by 0\.5 "
    ):
        set_jit(wrong, True, data=batch())
    inexact = net(ScaledWithoutXla(1.5))
    set_jit(inexact, True, data=batch())
    assert inexact.jit_compile


@pytest.mark.parametrize("layer", [lambda: ScaledUnderXla(1.1), Noise])
def test_without_data_nothing_is_compared(layer):
    model = net(layer())
    set_jit(model, True)
    assert model.jit_compile


@pytest.mark.parametrize("function", [masked, tf.function(masked), in_a_loop])
def test_without_data_an_operation_known_to_be_wrong_is_refused(function):
    model = net(wrong(function))
    model.fit(*batch(), verbose=0)
    before, function = state(model), model.train_function
    for switch in (set_jit, lambda model, on: jit(model, on).__enter__()):
        with pytest.raises(UnsupportedError, match=WRONG):
            switch(model, True)
    assert_same_state(before, state(model))
    assert (model.jit_compile, model.train_function) == (False, function)
    set_jit(model, False)


def test_a_callback_may_not_switch_to_wrong_results_during_fit():
    model = net(wrong())
    switch = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: set_jit(model, epoch == 1))
    with pytest.raises(UnsupportedError, match=WRONG):
        model.fit(*batch(), epochs=3, verbose=0, callbacks=[switch])
    assert model.optimizer.iterations.numpy() == 1


@pytest.mark.parametrize(
    "first",
    [
        lambda: [keras.Input((None, 1)), wrong()],
        lambda: [wrong()],
        lambda: [keras.Input((8, 1)), keras.layers.Lambda(lambda x: tf.ensure_shape(x, (4, 8, 1))), wrong()],
    ],
    ids=["sizes unknown", "not built", "another batch size"],
)
def test_a_model_that_cannot_be_searched_is_switched_on(first):
    model = keras.Sequential([*first(), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    set_jit(model, True)
    assert model.jit_compile


@pytest.mark.parametrize(
    "strategy", [tf.distribute.OneDeviceStrategy, lambda device: tf.distribute.MirroredStrategy([device])]
)
def test_in_the_scope_of_a_strategy(strategy):
    with strategy("CPU:0").scope():
        set_jit(net(keras.layers.BatchNormalization(synchronized=True)), True)
        with pytest.raises(UnsupportedError, match=WRONG):
            set_jit(net(wrong()), True)


@pytest.mark.slow
def test_with_data_what_computes_the_same_is_switched_on():
    model = small_net(jit_compile=False)
    model.fit(*batch(), verbose=0)
    before = state(model)
    set_jit(model, True, data=tf.data.Dataset.from_tensors(batch()))
    assert model.jit_compile
    assert_same_state(before, state(model))
    set_jit(model, False, data="whatever")  # nothing to compare
