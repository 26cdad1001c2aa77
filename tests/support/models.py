"""Small models and batches for tests."""

import contextlib

import keras
import numpy as np
import tensorflow as tf

from tfopt.internals.sources import find


def batch(examples=16, seed=0):
    random = np.random.default_rng(seed)
    return random.normal(size=(examples, 8, 8, 1)).astype("float32"), random.integers(10, size=examples).astype("int32")


def small_net(policy="float32", *, dropout=0.5, compiled=True, seed=7, **compile_options):
    """Convolution, batch norm, dropout, Adam and a metric: every kind of state that training has."""
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(4, 3, use_bias=False, dtype=policy),
            layers.BatchNormalization(dtype=policy),
            layers.ReLU(dtype=policy),
            layers.Flatten(dtype=policy),
            layers.Dropout(dropout, dtype=policy),
            layers.Dense(10, dtype="float32"),
        ]
    )
    if compiled:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(**{"optimizer": "adam", "loss": loss, "metrics": ["accuracy"]} | compile_options)
    return model


class WithoutCall(keras.Model):
    """Two networks that its own train_step calls one after the other, as a GAN or an autoencoder does; it has no call.

    Takes six numbers and learns to give them back.
    """

    def __init__(self, built=True):
        super().__init__(name="pair")
        for at, name in enumerate(("encoder", "decoder")):
            body = [keras.layers.Dense(7, activation="relu"), keras.layers.Dropout(0.3)]
            body += [keras.layers.Dense(7, activation="tanh") for _ in range(4)]
            start = [keras.Input((6,))] if built or at else []
            setattr(self, name, keras.Sequential([*start, *body, keras.layers.Dense(6)], name=name))

    def train_step(self, x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.decoder(self.encoder(x, training=True), training=True) - x) ** 2)
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"loss": loss}


@contextlib.contextmanager
def summed_in_one_order():
    """Makes a GPU add up in the same order each time, as a CPU does; else gradients may differ in the last bit."""
    on_gpu = bool(tf.config.list_logical_devices("GPU"))
    if on_gpu:
        tf.config.experimental.enable_op_determinism()
    try:
        yield
    finally:
        if on_gpu:
            getattr(*find("tensorflow.python.framework.config:disable_op_determinism"))()


def state(model):
    """Every variable of a model, its optimizer and its metrics: (name, value), in their order."""
    variables = [*model.variables, *model.metrics_variables, *(model.optimizer.variables if model.optimizer else ())]
    return [(variable.name, variable.numpy()) for variable in variables]


def assert_same_state(one, other):
    assert len(one) == len(other)
    for (name, value), (_, received) in zip(one, other, strict=True):
        assert value.tobytes() == received.tobytes(), f"{name}: {value} became {received}"
