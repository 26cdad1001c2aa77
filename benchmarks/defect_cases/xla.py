"""What XLA computes where a size depends on values or an index is out of range, and how often it compiles."""

import os
import subprocess
import sys
from functools import partial

import keras
import numpy as np
import tensorflow as tf

import tfopt
from defect_cases import Case, RefusedError

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


def looked_up(with_tfopt, folder):
    """The entry that a table of ten gives for index 12 under XLA."""
    table = keras.layers.Embedding(10, 1, embeddings_initializer=lambda shape, dtype: np.arange(10.0)[:, None])
    model = keras.Sequential([keras.Input((), dtype="int32"), table])
    model.compile("sgd", "mse", jit_compile=not with_tfopt)
    index = np.array([12], "int32")
    if with_tfopt:
        try:
            tfopt.xla.set_jit(model, True, data=(index, np.zeros((1, 1), "float32")))
        except ValueError as error:  # of the batch
            raise RefusedError(str(error)) from error
    return float(model.predict(index, verbose=0)[0, 0])


class Window(keras.layers.Layer):
    """Four steps of a series, from a start on."""

    def call(self, series, start):
        return tf.slice(series, [0, start[0]], [-1, 4])


def windows(with_tfopt=False):
    """Trains on four batches of one shape, each with another start."""
    series, start = keras.Input((8,)), keras.Input((), dtype="int32")
    model = keras.Model([series, start], keras.layers.Dense(1)(Window()(series, start)))
    model.compile("sgd", "mse", jit_compile=not with_tfopt)
    inputs, targets = (np.ones((8, 8), "float32"), np.repeat(np.arange(4, dtype="int32"), 2)), np.ones((8, 1))
    if with_tfopt:
        tfopt.xla.set_jit(model, True, data=((inputs[0][:2], inputs[1][:2]), targets[:2]))
    model.fit(inputs, targets, batch_size=2, shuffle=False, verbose=0)


def compilations(with_tfopt, folder):
    """How often XLA compiles the step of `windows`, as TensorFlow logs it in a process of its own."""
    if with_tfopt:
        windows(with_tfopt)  # which is refused
    log = {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "device_compiler=1"}
    environ = {**os.environ, **log, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", f"from {__name__} import windows; windows()"]
    done = subprocess.run(command, env=environ, stderr=subprocess.PIPE, check=True)
    return float(done.stderr.count(b"Compilation of XLA executable"))


CASES = (
    Case("D22", "ones counted by `tf.ones_like` of 3 values kept of 5", 3.0, partial(predicted, count), 0.001),
    Case("D22", "the last of 3 values kept of 5", 3.0, partial(predicted, last), 0.001),
    Case("D29", "entry that a table of 10 gives for index 12", "an error", looked_up),
    Case("D30", "compilations for 4 batches, each with another start of a `tf.slice`", 1.0, compilations),
)
