"""Models with a train_step of their own: the gate runs it, with the loss scale that training has."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.optimizers import SGD, LossScaleOptimizer
from models import assert_same_state, state
from precision_nets import X, Y, cross_entropy
from quick import first_quick
from unwrapped import unwrapped

from tfopt.errors import UnsupportedError
from tfopt.precision import apply, check

layers = keras.layers
REAL = np.random.default_rng(1).normal(size=(32, 4)).astype("float32")


def network(inputs, outputs, name, faint=1.0):
    body = [layers.Dense(8, name="first"), layers.Rescaling(faint, name="faint"), layers.Dense(outputs, name="head")]
    return keras.Sequential([keras.Input((inputs,)), *body], name=name)


class Gan(keras.Model):
    """Without a call, and with an optimizer for each network; the noise is drawn by TensorFlow."""

    def __init__(self, faint):
        super().__init__(name="gan")
        self.generator, self.critic = network(8, 4, "generator"), network(4, 1, "critic", faint)

    def compile(self, wrapped, scaling, **options):
        super().compile(**options)
        self.scaling = scaling
        plain = [SGD(1e3, name=name) for name in ("g", "d")]
        self.g_optimizer, self.d_optimizer = [LossScaleOptimizer(x, name=x.name) if wrapped else x for x in plain]

    def _update(self, tape, loss, optimizer, variables):
        with tape:
            scaled = optimizer.scale_loss(loss) if self.scaling == "right" else loss
            if self.scaling == "by hand":
                scaled = loss * 2.0**12
            if self.scaling == "dropped":
                optimizer.scale_loss(loss)
            if self.scaling == "by its variable":
                scaled = loss * optimizer.dynamic_scale
        gradients = tape.gradient(scaled, variables)
        if self.scaling == "by hand":
            gradients = [gradient / 2.0**12 for gradient in gradients]
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    def train_step(self, real):
        noise = tf.random.normal((tf.shape(real)[0], 8))
        with tf.GradientTape() as tape:
            scores = self.critic(real) - self.critic(self.generator(noise))
            loss = tf.reduce_mean(tf.nn.softplus(-scores))
        self._update(tape, loss, self.d_optimizer, self.critic.trainable_variables)
        with tf.GradientTape() as tape:
            loss_g = tf.reduce_mean(tf.nn.softplus(-self.critic(self.generator(noise))))
        self._update(tape, loss_g, self.g_optimizer, self.generator.trainable_variables)
        return {"critic": loss, "generator": loss_g}


def gan(wrapped=True, scaling="right", faint=1e-6):
    keras.utils.set_random_seed(1)
    model = Gan(faint)
    model.compile(wrapped, scaling, jit_compile=False)
    return model


def data():
    return tf.data.Dataset.from_tensors(REAL)


class AsKeras(keras.Sequential):
    def train_step(self, data):
        return super().train_step(data)


class ByGraph(keras.Sequential):
    def train_step(self, data):
        loss = self.compute_loss(x=data[0], y=data[1], y_pred=self(data[0], training=True))
        variables = [variable.value for variable in self.trainable_variables]
        self.optimizer.apply(tf.gradients(loss, variables), self.trainable_variables)
        return {"loss": loss}


def classifier(kind, **options):
    keras.utils.set_random_seed(1)
    body = [layers.Dense(8, kernel_regularizer="l2"), layers.BatchNormalization(), layers.Dropout(0.5), layers.Dense(3)]
    model = kind([keras.Input((8,)), *body], name="net")
    model.compile("adam", cross_entropy(), metrics=["accuracy"], **options)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("options", first_quick([{}, {"jit_compile": True}, {"run_eagerly": True}]))
def test_a_step_that_does_what_keras_does_has_the_same_figures(options):
    keras.utils.set_random_seed(1)
    expected = check(classifier(keras.Sequential), (X, Y), "mixed_float16")
    model = classifier(AsKeras, **options)
    before = state(model)
    report = check(model, (X, Y), "mixed_float16")
    assert_same_state(before, state(model))
    assert report.notes == ()
    assert report.loss_scale == expected.loss_scale
    assert report.reference_loss == pytest.approx(expected.reference_loss, rel=1e-6)
    for row, its in zip(report.layers, expected.layers, strict=True):
        for role in ("output", "weight_gradient", "output_gradient"):
            found, wanted = getattr(row, role), getattr(its, role)
            assert (found is None) == (wanted is None)
            if found:
                assert found.norm == pytest.approx(wanted.norm, rel=1e-5)
                assert found.error == pytest.approx(wanted.error, rel=0.2, abs=1e-6)


@pytest.mark.slow
def test_a_step_that_cannot_be_followed_is_noted():
    report = check(classifier(ByGraph), (X, Y), "mixed_bfloat16")
    assert report.passed
    assert "custom train_step, which was not run (it hands no gradients of a tf.GradientTape" in report.notes[0]


class WithoutLoss(keras.Sequential):
    """Computes the loss in its step, as SimCLR does."""

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.cast(self(data, training=True), tf.float32)))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


class Counts(layers.Layer):
    """Adds in 16 bits, where it stops."""

    def build(self, _):
        self.count = self.add_weight(initializer="zeros", trainable=False, name="count")

    def call(self, x):
        self.count.assign(self.count + 1.0)
        return x


@pytest.mark.slow
@pytest.mark.parametrize("counts", [False, True])
def test_a_step_without_a_compiled_loss_is_checked_with_its_states(counts):
    parts = [layers.Dense(8), layers.BatchNormalization(), *([Counts(name="counts")] if counts else [])]
    model = WithoutLoss([keras.Input((4,)), *parts, layers.Dense(2, dtype="float32")])
    model.compile(SGD(1e-2))
    report = check(model, data(), "mixed_bfloat16")
    assert report.passed != counts, str(report)
    assert not counts or "'counts' adds to its variable 'count' in bfloat16" in report.problems[0]


@pytest.mark.slow
def test_a_gan_under_two_replicas():
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = gan()
    before = state(model)
    report = check(model, data(), "mixed_float16")
    assert report.passed, str(report)
    assert not any("not run" in note for note in report.notes)
    assert_same_state(before, state(model))


HALVES = [{"generator": "mixed_float16", "critic": "mixed_float16"}, "mixed_float16"]


@pytest.mark.slow
@pytest.mark.parametrize("policy", HALVES)
def test_a_gan_is_checked_with_its_own_scales(policy):
    model = gan()
    before = state(model)
    report = check(model, data(), policy)
    assert report.passed, str(report)
    assert report.loss_scale == 2.0**15
    rows = {layer.path: layer for layer in report.layers}
    assert rows["generator/first"].weight_gradient.error < 0.1
    assert rows["critic/first"].weight_gradient.lost == 0
    assert rows["critic/head"].policy == rows["generator/head"].policy == "float32"
    assert any("updates weights 2 times" in note for note in report.notes)
    assert_same_state(before, state(model))
    assert not model.g_optimizer.built
    apply(model, policy)
    model.fit(REAL, verbose=0)
    assert check(model, data(), {}).passed


def moves(model):
    """Whether a step of training changes the layer whose gradient is faint, by more than the smallest steps."""
    kernel = model.critic.get_layer("first").kernel
    before = kernel.numpy()
    model.fit(REAL, batch_size=32, verbose=0)
    return bool(np.abs(kernel.numpy() - before).max() > 1e-7)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrapped", "scaling", "trains"),
    first_quick(
        [
            (False, "none", False),
            (True, "dropped", False),
            (True, "none", False),
            (True, "right", True),
            (False, "by hand", True),
            (True, "by its variable", True),
        ],
        2,
    ),
)
def test_a_verdict_on_the_step_that_trains(wrapped, scaling, trains):
    model = gan(wrapped, scaling)
    if scaling == "by its variable":
        for optimizer, part in ((model.g_optimizer, model.generator), (model.d_optimizer, model.critic)):
            optimizer.build(part.trainable_variables)
    before = state(model)
    report = check(model, data(), "mixed_float16")
    assert report.passed == trains, str(report)
    assert report.loss_scale == (2.0**15 if wrapped else 1)
    assert_same_state(before, state(model))
    unscaled = wrapped and not trains
    assert ("'d' would divide gradients by the loss scale" in unwrapped(report)) == unscaled
    assert ("'d_optimizer' of 'gan' is not a LossScaleOptimizer" in unwrapped(report)) == (not wrapped)
    for layer in (*model.generator.layers[:2], *model.critic.layers[:2]):
        layer.dtype_policy = "mixed_float16"
    assert moves(model) == trains


class Forgets(keras.Sequential):
    """Takes the gradients of a loss that it did not scale."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_float16", {".*dense.*": "mixed_float16"}])
def test_a_forgotten_scale_is_the_only_problem_and_bfloat16_needs_none(policy):
    model = classifier(Forgets)
    report = check(model, (X, Y), policy)
    assert len(report.problems) == 1
    assert "a loss that was not scaled" in report.problems[0]
    assert report.loss_drift < 0.01
    assert not any(layer.blamed for layer in report.layers)
    assert "mixed_bfloat16" in str(report).partition("Passes instead: ")[2].partition("\n")[0]
    assert check(model, (X, Y), report.fallback).passed


def test_fit_refuses_plain_optimizers_compiled_before_apply():
    model = gan(wrapped=False, scaling="none")
    apply(model, "mixed_float16")
    before = state(model)
    with pytest.raises(UnsupportedError, match="'d_optimizer' of 'gan' is a plain SGD"):
        model.fit(REAL, verbose=0)
    assert_same_state(before, state(model))


def test_a_plain_optimizer_trains_the_half_in_float32():
    model = gan(faint=1.0)
    model.d_optimizer = SGD(1e-3)
    apply(model, {"generator": "mixed_float16"})
    kernels = [net.get_layer("first").kernel for net in (model.generator, model.critic)]
    before = [kernel.numpy() for kernel in kernels]
    model.fit(REAL, verbose=0)
    assert all((kernel.numpy() != old).any() for kernel, old in zip(kernels, before, strict=True))
