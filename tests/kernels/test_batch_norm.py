"""The fused batch norm's numbers, beside Keras' own and beside the formula in float64."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfopt.kernels import batch_norm, fuse_batch_norm

# (shape, axis): every rank and layout that the kernel takes.
LAYOUTS = [
    ((5, 7), -1),
    ((5, 6, 7), -1),
    ((5, 7, 6), 1),
    ((4, 3, 5, 7), -1),
    ((4, 7, 3, 5), 1),
    ((4, 7, 3, 5), -3),
    ((3, 2, 4, 2, 5), -1),
    ((3, 5, 2, 4, 2), 1),
]
ROUNDING = {"float32": 2e-6, "mixed_bfloat16": 2**-8, "mixed_float16": 2**-11}
MOMENTUM, EPSILON = 0.9, 1e-3


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def made(shape, axis=-1, policy="float32", *, fused=True, **options):
    """A model of one layer with averages and weights that differ by channel, and the layer."""
    layer = keras.layers.BatchNormalization(axis, momentum=MOMENTUM, epsilon=EPSILON, dtype=policy, **options)
    inputs = keras.Input(shape[1:], batch_size=shape[0], dtype=layer.compute_dtype)
    model = keras.Model(inputs, layer(inputs))
    for seed, variable in enumerate(model.variables):
        variable.assign(1.5 + 0.5 * np.sin(seed + np.arange(shape[axis])))
    assert fuse_batch_norm(model) == 1 if fused else True
    return model, layer


def upstream(shape):
    return draw(*shape, seed=9)


def step(model, layer, inputs, *, training):
    """Outputs, gradients of (inputs, then weights) and averages afterwards, as float64 arrays."""
    inputs = tf.cast(inputs, layer.compute_dtype)
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        outputs = model(inputs, training=training)
        loss = tf.reduce_sum(outputs * tf.cast(upstream(inputs.shape), outputs.dtype))
    parts = [outputs, *tape.gradient(loss, [inputs, *layer.trainable_variables])]
    averages = [variable.numpy() for variable in (layer.moving_mean, layer.moving_variance)]
    return [np.asarray(tf.cast(part, tf.float64)) for part in (*parts, *averages)]


def expected(layer, inputs, *, training):
    """The same, written out in float64."""
    rank, axis = inputs.ndim, layer.axis % inputs.ndim
    inputs = np.asarray(tf.cast(tf.cast(inputs, layer.compute_dtype), tf.float64))
    others = tuple(place for place in range(rank) if place != axis)
    wide = [1 if place != axis else -1 for place in range(rank)]
    gamma, beta, old_mean, old_variance = (variable.numpy().astype("float64") for variable in layer.variables)
    mean, variance = (inputs.mean(others), inputs.var(others)) if training else (old_mean, old_variance)
    deviation = np.sqrt(variance + EPSILON).reshape(wide)
    unit = (inputs - mean.reshape(wide)) / deviation
    given = np.asarray(tf.cast(tf.cast(upstream(inputs.shape), layer.compute_dtype), tf.float64))
    back = given
    if training:
        back = given - given.mean(others, keepdims=True) - unit * (given * unit).mean(others, keepdims=True)
        old_mean = MOMENTUM * old_mean + (1 - MOMENTUM) * mean
        old_variance = MOMENTUM * old_variance + (1 - MOMENTUM) * variance
    gamma_wide = gamma.reshape(wide)
    weights = (given * unit).sum(others), given.sum(others)
    return [unit * gamma_wide + beta.reshape(wide), gamma_wide / deviation * back, *weights, old_mean, old_variance]


def assert_close(found, reference, tolerance):
    """Each part, within the tolerance of its largest number."""
    for one, other in zip(found, reference, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * max(1, np.abs(other).max()))


def matrix(policy):
    for (shape, axis), training in ((layout, training) for layout in LAYOUTS for training in (True, False)):
        inputs = 3 + 2 * draw(*shape)
        model, layer = made(shape, axis, policy)
        reference = expected(layer, inputs, training=training)
        stock = step(*made(shape, axis, policy, fused=False), inputs, training=training)
        found = step(model, layer, inputs, training=training)
        assert vars(layer)["call"].found(training=training, jit=False) == (), "Keras' own path was taken"
        # Outputs and gradients of inputs are rounded to the compute type; weights and averages are float32.
        for part, tolerance in ((slice(2), ROUNDING[policy]), (slice(2, None), ROUNDING["float32"])):
            assert_close(found[part], reference[part], tolerance)
            assert_close(found[part], stock[part], tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ROUNDING)
def test_every_layout_computes_as_keras_and_as_the_formula(policy):
    matrix(policy)


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ROUNDING)
def test_every_layout_on_a_gpu(policy):
    matrix(policy)


@pytest.mark.parametrize("options", [{"center": False}, {"scale": False}, {"center": False, "scale": False}])
@pytest.mark.parametrize("training", [True, False])
def test_without_offset_or_scale(options, training):
    inputs = draw(6, 4, 4, 3)
    both = (step(*made(inputs.shape, fused=fused, **options), inputs, training=training) for fused in (True, False))
    assert_close(*both, ROUNDING["float32"])


def test_inputs_far_from_zero_lose_no_more_than_in_keras():
    inputs = 3000 + draw(64, 4, 4, 3)
    model, layer = made(inputs.shape)
    reference = expected(layer, inputs, training=True)
    stock = step(*made(inputs.shape, fused=False), inputs, training=True)
    found = step(model, layer, inputs, training=True)
    for ours, keras_own, exact in zip(found, stock, reference, strict=True):
        largest = max(1, np.abs(exact).max())
        assert np.abs(ours - exact).max() <= 2 * np.abs(keras_own - exact).max() + 1e-6 * largest


@pytest.mark.parametrize("shape", [(1, 3), (1, 1, 1, 3)])
def test_one_value_a_channel_has_no_variance(shape):
    found = step(*made(shape), draw(*shape), training=True)
    assert_close(found, step(*made(shape, fused=False), draw(*shape), training=True), ROUNDING["float32"])


@pytest.mark.parametrize("given", [np.inf, np.nan])
def test_one_value_a_channel_whatever_the_kernel_says_of_its_variance(given, monkeypatch):
    """Over n - 1 = 0 the variance is anything: what cuDNN gives there is not written down."""
    fused = tf.compat.v1.nn.fused_batch_norm
    planted = lambda *args, **options: (*fused(*args, **options)[:2], tf.fill([3], given))  # noqa: E731
    monkeypatch.setattr(tf.compat.v1.nn, "fused_batch_norm", planted)
    *_, variance = step(*made((1, 3)), draw(1, 3), training=True)
    before = 1.5 + 0.5 * np.sin(3 + np.arange(3))
    np.testing.assert_allclose(variance, MOMENTUM * before, rtol=1e-6)


def test_a_frozen_layer_infers_while_the_model_trains():
    inputs = draw(6, 4, 4, 3)
    model, layer = made(inputs.shape)
    reference = expected(layer, inputs, training=False)
    layer.trainable = False
    outputs, gradient, *averages = step(model, layer, inputs, training=True)
    assert_close([outputs, gradient, *averages], [*reference[:2], *reference[4:]], ROUNDING["float32"])


@pytest.mark.parametrize(("inputs", "label"), [(np.full((4, 2, 2, 3), np.nan), "NaN"), (np.ones((0, 2, 2, 3)), "none")])
def test_a_batch_of_nothing_good_reaches_the_averages_as_in_keras(inputs, label):
    averages = [
        step(*made((None, 2, 2, 3), fused=fused), inputs, training=True)[-2:]  # fused, stock
        for fused in (True, False)
    ]
    assert np.isnan(averages).all(), label


def gradient_of_a_gradient(function, inputs):
    inputs = tf.constant(inputs)
    with tf.GradientTape() as outer:
        outer.watch(inputs)
        with tf.GradientTape() as inner:
            inner.watch(inputs)
            loss = tf.reduce_sum(tf.sin(function(inputs)))
        penalty = tf.reduce_sum(tf.exp(inner.gradient(loss, inputs)))
    return outer.gradient(penalty, inputs).numpy()


def test_a_gradient_penalty_is_right_through_the_kernel_and_wrong_in_keras():
    """tf.nn.moments, which Keras calls, stops the mean's gradient in the variance: right once, wrong the next time."""
    inputs = draw(6, 2, 2, 3)
    model, layer = made(inputs.shape)
    gamma, beta = (tf.cast(variable.value, tf.float64) for variable in (layer.gamma, layer.beta))

    def formula(inputs):
        centred = inputs - tf.reduce_mean(inputs, [0, 1, 2])
        return centred * tf.math.rsqrt(tf.reduce_mean(centred**2, [0, 1, 2]) + EPSILON) * gamma + beta

    exact = gradient_of_a_gradient(formula, inputs)
    stock, _ = made(inputs.shape, policy="float64", fused=False)
    found = gradient_of_a_gradient(lambda inputs: model(inputs, training=True), inputs.astype("float32"))
    keras_own = gradient_of_a_gradient(lambda inputs: stock(inputs, training=True), inputs)
    np.testing.assert_allclose(found, exact, atol=1e-5 * np.abs(exact).max())
    assert np.abs(keras_own - exact).max() > 1e-2 * np.abs(exact).max()


def test_the_kernel_alone_gives_the_variance_over_n_minus_one():
    """What the moving variance is corrected for; the day it is not so, the correction must go."""
    _, layer = made((2, 3))
    inputs = draw(2, 3).astype("float32")
    *_, variance = batch_norm._normalize(layer, tf.constant(inputs))
    np.testing.assert_allclose(variance, inputs.var(0, ddof=1), rtol=1e-5)
