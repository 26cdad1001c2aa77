"""What XLA computes where a size depends on values."""

from functools import partial

import keras
import numpy as np
import tensorflow as tf

import tfopt
from defect_cases import Case

VALUES = np.array([[1.0, 2.0, 3.0, -1.0, -2.0]], "float32")


class OfPositive(keras.layers.Layer):
    """A function of the positive values."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, inputs):
        return 0.0 * inputs[:, :1] + self.function(tf.boolean_mask(inputs, inputs > 0))


def last(kept):
    return kept[-1]


def count(kept):
    return tf.reduce_sum(tf.ones_like(kept))


def predicted(function, with_tfopt, folder):
    """What a model predicts under XLA."""
    model = keras.Sequential(
        [keras.Input((5,)), OfPositive(function), keras.layers.Dense(1, kernel_initializer="ones")]
    )
    model.compile("sgd", "mse", jit_compile=not with_tfopt)
    if with_tfopt:
        tfopt.xla.set_jit(model, True, data=(VALUES, np.zeros((1, 1), "float32")))
    return float(model.predict(VALUES, verbose=0)[0, 0])


CASES = (
    Case("D22", "ones counted by `tf.ones_like` of 3 values kept of 5", 3.0, partial(predicted, count), 0.001),
    Case("D22", "the last of 3 values kept of 5", 3.0, partial(predicted, last), 0.001),
)
