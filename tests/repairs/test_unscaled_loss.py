import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.optimizers import LossScaleOptimizer
from quick import first_quick

from tfopt import repairs
from tfopt.errors import UnsupportedError

X = np.random.default_rng(0).random((16, 4), "float32")
Y = X.sum(1, keepdims=True)


class Own(keras.Sequential):
    """A training step of one's own, which scales its loss or forgets to."""

    scales = True

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
            to_derive = self.optimizer.scale_loss(loss) if self.scales else loss
        gradients = tape.gradient(to_derive, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"own_loss": loss}


def net(kind=Own, *, scales=True, optimizer=None, **options):
    keras.utils.set_random_seed(1)
    layers = [keras.Input((4,)), *(keras.layers.Dense(n, dtype="mixed_float16") for n in (8, 1))]
    model = kind(layers)
    model.scales = scales
    model.compile(optimizer or LossScaleOptimizer(keras.optimizers.SGD(0.1)), "mse", **options)
    return model


def losses(model, epochs=20):
    return model.fit(X, Y, epochs=epochs, verbose=0).history["own_loss" if isinstance(model, Own) else "loss"]


@pytest.mark.slow
def test_stock_keras_hardly_trains_and_says_nothing():
    forgotten, right = losses(net(scales=False)), losses(net())
    assert forgotten[-1] > 0.99 * forgotten[0]
    assert right[-1] < 0.5 * right[0]


@pytest.mark.parametrize("eagerly", [False, True])
def test_a_step_that_forgets_is_refused(eagerly):
    repairs.install("unscaled_loss")
    model = net(scales=False, run_eagerly=eagerly)
    before = model.get_weights()
    with pytest.raises(UnsupportedError, match=r"loss = self\.optimizer\.scale_loss\(loss\)"):
        losses(model)
    assert all((a == b).all() for a, b in zip(model.get_weights(), before, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("kind", first_quick([Own, keras.Sequential]))
@pytest.mark.parametrize("options", [{}, {"run_eagerly": True}, {"jit_compile": True}], ids=str)
def test_a_right_step_computes_as_before(kind, options):
    expected = losses(net(kind, **options), epochs=3)
    repairs.install("unscaled_loss")
    assert losses(net(kind, **options), epochs=3) == expected


def test_without_a_loss_scale_nothing_is_asked():
    expected = losses(net(scales=False, optimizer=keras.optimizers.SGD(0.1)), epochs=1)
    repairs.install("unscaled_loss")
    assert losses(net(scales=False, optimizer=keras.optimizers.SGD(0.1)), epochs=1) == expected


@pytest.mark.slow
def test_a_loaded_model_and_new_shapes(tmp_path):
    repairs.install("unscaled_loss")
    model = net(keras.Sequential)
    losses(model, epochs=1)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    losses(loaded, epochs=1)
    loaded.fit(X[:5], Y[:5], batch_size=3, verbose=0)  # traced anew
    steps = int(loaded.optimizer.iterations)
    assert np.isfinite(loaded.train_on_batch(X[:2], Y[:2]))
    assert int(loaded.optimizer.iterations) == steps + 1


class Gan(keras.Model):
    """Two networks, each with an optimizer of its own."""

    def __init__(self, forgets=None):
        super().__init__()
        self.forgets = forgets
        self.networks = [keras.layers.Dense(1, dtype="mixed_float16") for _ in range(2)]

    def compile(self):
        super().compile()
        self.both = [LossScaleOptimizer(keras.optimizers.SGD(0.1), name=name) for name in ("generator", "critic")]

    def call(self, inputs):
        return sum(network(inputs) for network in self.networks)

    def train_step(self, data):
        x, y = data
        for number, (network, optimizer) in enumerate(zip(self.networks, self.both, strict=True)):
            with tf.GradientTape() as tape:
                loss = keras.ops.mean(keras.ops.square(keras.ops.cast(self(x), "float32") - y))
                loss = loss if number == self.forgets else optimizer.scale_loss(loss)
            variables = network.trainable_variables
            optimizer.apply(tape.gradient(loss, variables), variables)
        return {"own_loss": loss}


@pytest.mark.slow
@pytest.mark.parametrize("forgets", [None, 0, 1])
def test_two_optimizers(forgets):
    repairs.install("unscaled_loss")
    model = Gan(forgets)
    model(X)
    model.compile()
    if forgets is None:
        model.fit(X, Y, verbose=0)
    else:
        with pytest.raises(UnsupportedError, match=["'generator'", "'critic'"][forgets]):
            model.fit(X, Y, verbose=0)


@pytest.mark.slow
def test_under_a_strategy():
    repairs.install("unscaled_loss")
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        model = net(keras.Sequential, jit_compile=False)
        forgetful = net(scales=False, jit_compile=False)
    losses(model, epochs=2)
    with pytest.raises(UnsupportedError, match="scale_loss was never called"):
        losses(forgetful, epochs=1)


class Held(keras.Sequential):
    """Trains with an optimizer that Keras does not know of."""

    scaling = "none"

    def compile(self, optimizer, **options):
        super().compile(loss="mse", **options)
        self.held = {"only": optimizer}

    def train_step(self, data):
        x, y = data
        optimizer = self.held["only"]
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
            scaled = loss
            if self.scaling == "dropped":
                optimizer.scale_loss(loss)
            elif self.scaling == "by its variable":
                scaled = loss * optimizer.dynamic_scale if optimizer.built else loss
            elif self.scaling == "by a constant":
                scaled = loss * 64.0
            elif self.scaling == "by a variable":
                scaled = loss * self.factor
        gradients = tape.gradient(scaled, self.trainable_variables)
        if self.scaling == "by a constant":
            gradients = [gradient * (1 / 64.0) for gradient in gradients]
        elif self.scaling == "by a variable":
            gradients = [tf.clip_by_norm(gradient / self.factor, 1e6) for gradient in gradients]
        elif self.scaling == "clipped":
            gradients, _ = tf.clip_by_global_norm(gradients, 1e6)
        optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"own_loss": loss}


def held(scaling, optimizer, policy="mixed_float16", **options):
    repairs.install("loss_scaling", "unscaled_loss")
    keras.utils.set_random_seed(1)
    model = Held([keras.Input((4,)), *(keras.layers.Dense(n, dtype=policy) for n in (8, 1))], name="net")
    model.scaling, model.factor = scaling, tf.Variable(64.0, trainable=False)
    model.compile(optimizer(), **{"jit_compile": False} | options)
    return model


def plain():
    return keras.optimizers.SGD(0.1)


def wrapped():
    return LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=64.0)


RIGHT = [("by its variable", wrapped), ("by a constant", plain), ("by a variable", plain)]
WRONG = [("dropped", wrapped), ("none", plain), ("clipped", plain)]
SETTINGS = [{}, {"jit_compile": True}]


@pytest.mark.slow
@pytest.mark.parametrize("options", first_quick(SETTINGS), ids=str)
@pytest.mark.parametrize(("scaling", "optimizer"), RIGHT)
def test_a_loss_scaled_by_hand_trains_as_in_float32(scaling, optimizer, options):
    found = held(scaling, optimizer, **options).fit(X, Y, epochs=3, verbose=0, shuffle=False).history["own_loss"]
    keras.utils.clear_session()
    expected = held("none", plain, "float32").fit(X, Y, epochs=3, verbose=0, shuffle=False).history["own_loss"]
    np.testing.assert_allclose(found, expected, rtol=0.02)


@pytest.mark.parametrize("options", first_quick([*SETTINGS, {"run_eagerly": True}]), ids=str)
@pytest.mark.parametrize(("scaling", "optimizer"), WRONG)
def test_a_loss_that_is_not_scaled_is_refused(scaling, optimizer, options):
    model = held(scaling, optimizer, **options)
    before = model.get_weights()
    said = "its result was not used" if optimizer is wrapped else "'held' of 'net' is a plain SGD"
    with pytest.raises(UnsupportedError, match=said):
        model.fit(X, Y, verbose=0)
    assert all((a == b).all() for a, b in zip(model.get_weights(), before, strict=True))


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_plain_optimizers_train_other_dtypes(policy):
    model = held("none", plain, policy)
    before = model.get_weights()
    model.fit(X, Y, verbose=0)
    assert all((a != b).any() for a, b in zip(model.get_weights(), before, strict=True))


def test_a_users_own_choice_not_to_scale_stands():
    model = held("none", plain, auto_scale_loss=False)
    model.fit(X, Y, verbose=0)
    assert int(model.held["only"].iterations) == 1
