"""Layers with planted faults of time or value: with XLA, or without."""

import time

import keras
import tensorflow as tf

from tfopt.internals.graphs import in_xla


def under_xla():
    """Whether what is being traced will be compiled by XLA."""
    return in_xla(tf.compat.v1.get_default_graph())


class SlowWithoutXla(keras.layers.Layer):
    """Sleeps 0.1 s a step where XLA does not compile it, so that XLA is faster beyond doubt."""

    seconds = 0.1

    def call(self, inputs):
        if under_xla():
            return tf.identity(inputs)
        with tf.control_dependencies([tf.py_function(lambda: time.sleep(self.seconds), [], [])]):
            return tf.identity(inputs)


class SlowUnderXla(keras.layers.Layer):
    """Multiplies matrices for some 0.1 s a step where XLA compiles it."""

    def call(self, inputs):
        if not under_xla():
            return inputs
        matrix = tf.ones((600, 600)) * tf.reduce_sum(inputs) / 600
        for _ in range(12):
            matrix = matrix @ matrix
        return inputs + 0.0 * tf.reduce_mean(tf.math.tanh(matrix))


class ScaledUnderXla(keras.layers.Layer):
    """Computes something else under XLA, as a miscompiled operation would."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def call(self, inputs):
        return inputs * self.factor if under_xla() else inputs


class ScaledWithoutXla(ScaledUnderXla):
    """Computes something else in 16 bits without XLA, as an inexact operation of TensorFlow would."""

    def call(self, inputs):
        return inputs if under_xla() or inputs.dtype == "float32" else inputs * self.factor


class Opaque(keras.layers.Layer):
    """An operation that XLA has no kernel for."""

    def call(self, inputs):
        return tf.ensure_shape(tf.py_function(lambda x: x, [inputs], inputs.dtype), inputs.shape)


class Noise(keras.layers.Layer):
    """Draws random numbers, and is no dropout."""

    def call(self, inputs):
        return inputs + keras.random.normal(keras.ops.shape(inputs))
