"""Gradients from activations that are computed again, which should be those of the forward pass."""

import re
from functools import partial

import keras
import tensorflow as tf

import tfopt
from defect_cases import Case, repaired
from tfopt.repairs.probes import one_device

BLOCKS = 4


def ask_for_repairs(with_tfopt):
    """Installs what tfopt has against recomputation that goes wrong."""
    if with_tfopt:
        tfopt.repairs.install("recomputation")


def by_hand(function):
    """Recomputation as one would write it."""

    @tf.custom_gradient
    def recomputed(x):
        def gradient(upstream, variables):
            with tf.GradientTape() as tape:
                tape.watch(x)
                outputs = function(x)
            first, *others = tape.gradient(outputs, [x, *variables], output_gradients=upstream)
            return first, others

        return function(x), gradient

    return recomputed


def times_computed(with_tfopt, folder, recompute):
    """How often XLA computes a tanh in a step of four blocks of two."""
    ask_for_repairs(with_tfopt)
    weights = [tf.Variable(tf.eye(64)) for _ in range(BLOCKS)]

    def step(x):
        with tf.GradientTape() as tape:
            for weight in weights:
                x = recompute(lambda x, weight=weight: tf.tanh(tf.tanh(x @ weight) @ weight))(x)
            loss = tf.reduce_sum(x**2)
        return tape.gradient(loss, weights)

    compiled = tf.function(step, jit_compile=True, autograph=False)
    text = compiled.experimental_get_compiler_ir(tf.ones((256, 64)))(stage="optimized_hlo")
    return len(re.findall(r" tanh\(", text))


with_keras, with_custom_gradient = (partial(times_computed, recompute=how) for how in (keras.remat, by_hand))

CASES = (
    Case(
        "D4",
        "share of dropped elements with a wrong gradient",
        0,
        partial(repaired, name="recomputation", measure=one_device.other_mask),
    ),
    Case(
        "D4",
        "moving mean at momentum 0.9 after a batch of mean 1",
        0.1,
        partial(repaired, name="recomputation", measure=one_device.averaged_twice),
        1e-6,
    ),
    Case("D5", "tanh in XLA's program for 8, each recomputed by `keras.remat`", 16, with_keras),
    Case("D5", "by a `tf.custom_gradient` written by hand", 16, with_custom_gradient, handled=False),
)
