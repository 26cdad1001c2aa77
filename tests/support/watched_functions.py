"""What tests of a watch compile."""

import keras
import numpy as np
import tensorflow as tf

from tfopt.internals import patches


def total():
    """A new function each time: what an earlier test compiled is no matter."""
    return tf.function(lambda x: tf.reduce_sum(x * 2), jit_compile=True, reduce_retracing=True)


def linear(**options):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=True, **options)
    return model


def data(examples, size=8):
    x = np.ones((examples, 4), "float32")
    return tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(size)


def is_watched():
    """Whether calls of TensorFlow's functions are being noted."""
    return any(patch.by == "xla.watch" for patch in patches.present())
