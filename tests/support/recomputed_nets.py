"""Small models whose activations are computed again, and trainings of them."""

import contextlib

import keras
import numpy as np
import tensorflow as tf

from tfopt.memory import recompute
from tfopt.memory.recomputing import is_recomputed

layers = keras.layers
VALUES = np.random.default_rng(1).normal(size=(16, 6)).astype("float32")
IDS = np.random.default_rng(0).integers(20, size=(16, 6)).astype("int32")


class Block(layers.Layer):
    """A transformer's block with all that a second run could get wrong; it counts how often it is traced."""

    def __init__(self, size=8, penalty=None, **options):
        super().__init__(**options)
        self.supports_masking = True
        self.traced = []
        self.norm, self.attention = layers.LayerNormalization(), layers.MultiHeadAttention(2, size // 2, dropout=0.2)
        self.averages = layers.BatchNormalization(momentum=0.9)
        self.up = layers.Dense(2 * size, activation="gelu", activity_regularizer=penalty)
        self.down, self.dropout = layers.Dense(size), layers.Dropout(0.2)

    def build(self, shape):
        for layer in (self.norm, self.averages, self.up):
            layer.build(shape)
        self.attention.build(shape, shape)
        self.down.build((*shape[:-1], 2 * shape[-1]))

    def call(self, inputs, mask=None, scale=1.0, training=None):
        self.traced.append((training, mask is not None, scale))
        normed = self.norm(inputs)
        inputs = inputs + self.attention(normed, normed, use_causal_mask=True)
        return inputs + scale * self.dropout(self.down(self.up(self.averages(inputs, mask=mask))))


def functional(count=2, penalty="l2"):
    """Blocks in a row, with masks, losses of their own and a softmax at the end."""
    inputs = keras.Input((6,), dtype="int32")
    outputs = layers.Embedding(20, 8, mask_zero=True)(inputs)
    for _ in range(count):
        outputs = Block(penalty=penalty)(outputs, scale=0.5)
    return keras.Model(inputs, layers.Dense(20, activation="softmax")(outputs))


class Subclassed(keras.Model):
    """The same in a model with a call of its own, which takes no `training`."""

    def __init__(self, count=2):
        super().__init__()
        self.embedding = layers.Embedding(20, 8, mask_zero=True)
        self.blocks = [Block() for _ in range(count)]
        self.head = layers.Dense(20, activation="softmax")

    def call(self, inputs):
        hidden = self.embedding(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def subclassed():
    model = Subclassed()
    model(IDS)
    return model


def sequential():
    """Plain layers in a row."""
    row = [
        part
        for _ in range(6)
        for part in (
            layers.Conv1D(8, 3, padding="same"),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Dropout(0.2),
        )
    ]
    return keras.Sequential([keras.Input((6,)), layers.Embedding(20, 8), *row, layers.Dense(20, activation="softmax")])


def branched():
    """Residual blocks of plain layers, with a second output from the middle."""
    inputs = keras.Input((6,))
    first = outputs = layers.Embedding(20, 8)(inputs)
    for _ in range(6):
        inner = layers.Dropout(0.2)(layers.Dense(16, activation="relu")(outputs))
        outputs = layers.LayerNormalization()(outputs + layers.Dense(8)(inner) + keras.ops.tanh(outputs))
    middle = outputs
    for _ in range(6):
        outputs = outputs * layers.Dense(8, activation="sigmoid")(layers.Dense(8, activation="gelu")(outputs))
    outputs = layers.Concatenate()([outputs, middle, first])
    return keras.Model(inputs, layers.Dense(20, activation="softmax")(outputs))


def recurrent():
    """Layers with loops inside, masks, and random numbers for each sequence."""
    row = [layers.LSTM(8, return_sequences=True, dropout=0.2, recurrent_dropout=0.1) for _ in range(5)]
    embedding = layers.Embedding(20, 8, mask_zero=True)
    return keras.Sequential([keras.Input((6,)), embedding, *row, layers.Dense(20, activation="softmax")])


class Small(layers.Layer):
    """A block that traces fast: dropout, averages, and a custom function."""

    def __init__(self, function=None, **options):
        super().__init__(**options)
        self.function, self.runs = function, 0
        self.dense, self.norm, self.dropout = layers.Dense(6), layers.BatchNormalization(), layers.Dropout(0.5)

    def build(self, shape):
        self.dense.build(shape)
        self.norm.build(shape)
        self.own = self.add_weight(shape=(), trainable=False, name="own", initializer="zeros")
        self.scale = self.add_weight(shape=(), name="scale", initializer="ones")

    def call(self, inputs, training=None):
        self.runs += 1
        outputs = inputs + self.dropout(self.norm(keras.ops.tanh(self.dense(inputs)))) * self.scale
        return self.function(self, outputs) if self.function else outputs


def small(*functions):
    """A model of small blocks."""
    inputs = outputs = keras.Input((6,))
    for function in functions or (None, None):
        outputs = Small(function)(outputs)
    return keras.Model(inputs, layers.Dense(20, activation="softmax")(outputs))


def made(make, **options):
    """A compiled model, the same each time."""
    keras.utils.set_random_seed(7)
    model = make()
    options = {"optimizer": keras.optimizers.SGD(0.1, momentum=0.9), "jit_compile": False} | options
    model.compile(loss="sparse_categorical_crossentropy", **options)
    return model


def trained(model, epochs=2):
    """Losses and all variables of a model, of its optimizer and its metrics after epochs of two steps."""
    inputs, labels = (
        (IDS, IDS)
        if any(isinstance(layer, layers.Embedding) for layer in model._flatten_layers())
        else (VALUES, IDS[:, 0])
    )
    losses = model.fit(inputs, labels, batch_size=8, epochs=epochs, shuffle=False, verbose=0).history["loss"]
    variables = (*model.variables, *model.optimizer.variables, *model.metrics_variables)
    return [np.asarray(losses), *(variable.numpy() for variable in variables)]


def compared(make, choose=lambda model: "auto", *, tolerance=0.0, prepare=lambda model: model, **options):
    """Trains a model as it is and recomputed, compares all that training changes, and returns the recomputed one."""
    expected = trained(prepare(made(make, **options)))
    model = made(make, **options)
    assert recompute(model, choose(model)) > 0
    assert_same(trained(prepare(model)), expected, tolerance)
    assert is_recomputed(model)  # nothing has taken that away meanwhile
    return model


def assert_same(found, expected, tolerance=0.0):
    """Bit for bit on a CPU, within rounding on a GPU, which adds up in another order each time."""
    if tf.config.list_physical_devices("GPU"):
        tolerance = max(tolerance, 1e-4)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.astype("float64"), other.astype("float64"), rtol=0, atol=tolerance)


@contextlib.contextmanager
def as_traced():
    """Computes graphs as they were traced. Grappler joins operations, which rounds differently, where nobody else
    needs what is between them."""
    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False} | before)
