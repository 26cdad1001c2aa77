"""Nets whose forward pass is right in 16 bits and whose gradients are not: sums over positions, and clips."""

import keras
import numpy as np
import tensorflow as tf

from precision_matrix.nets import random

layers = keras.layers


class BroadcastBias(layers.Layer):
    """Its gradient is a sum over the leading axes, which BiasAdd's is not."""

    def build(self, shape):
        self.bias = self.add_weight(shape=(1, 1, shape[-1]), initializer="zeros", name="bias")

    def call(self, x):
        return x + self.bias


class Scale(layers.Layer):
    """As the LayerScale of ConvNeXt."""

    def build(self, shape):
        self.gamma = self.add_weight(shape=shape[-1:], initializer="ones", name="gamma")

    def call(self, x):
        return x * self.gamma


class Clip(layers.Layer):
    """Clips each number of the gradient that passes through it."""

    def call(self, x):
        def backward(gradient):
            return tf.clip_by_value(gradient, tf.cast(-1.0, x.dtype), tf.cast(1.0, x.dtype))

        return tf.custom_gradient(lambda x: (tf.identity(x), backward))(x)


def learned_by(part, shape=(256, 4), optimizer=keras.optimizers.SGD, rate=0.05):
    """A signal of one sign, which `part` alone can learn: the head has no bias and does not train."""

    def make():
        inputs = keras.Input(shape)
        x = part(inputs)
        width = keras.initializers.Constant(x.shape[-1] ** -0.5)
        options = {"use_bias": False, "trainable": False, "dtype": "float32", "kernel_initializer": width}
        model = keras.Model(inputs, layers.Dense(1, name="head", **options)(x), name="net")
        model.compile(optimizer(rate), "mse", jit_compile=False)
        data = random().normal(size=(32, *shape)).astype("float32")
        return model, (data, np.full(model.compute_output_shape(data.shape), 2.0, "float32"))

    return make


def frozen(units=4, **options):
    return layers.Dense(units, use_bias=False, trainable=False, **options)


PARTS = {
    "Dense on a sequence": (lambda x: layers.Dense(8, name="part")(x), (256, 4)),
    "EinsumDense": (lambda x: layers.EinsumDense("abc,cd->abd", (256, 8), bias_axes="d", name="part")(x), (256, 4)),
    "Conv2DTranspose": (lambda x: layers.Conv2DTranspose(4, 3, 2, "same", name="part")(x), (16, 16, 4)),
    "attention": (lambda x: layers.MultiHeadAttention(2, 4, name="part")(x, x), (256, 4)),
    "broadcast bias": (lambda x: BroadcastBias(name="part")(frozen()(x)), (1024, 4)),
    "LayerScale": (lambda x: Scale(name="part")(frozen(activation="softplus")(x)), (1024, 4)),
}
"""What learns the signal, and the shape of an example."""


def clipped(x):
    return Clip(name="clip")(layers.Dense(8, name="part")(x))
