"""The second run under XLA: it is really done, and memory shrinks by XLA's own account."""

import os
import re
import subprocess
import sys
from pathlib import Path

import keras
import pytest
import tensorflow as tf
from recomputed_nets import VALUES, layers

from tfopt.memory import recompute

SUPPORT = Path(__file__).parents[1] / "support"


def products(model):
    """Matrix products in the program that XLA makes of a model's gradient."""

    @tf.function(jit_compile=True)
    def step(inputs):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(inputs, training=True) ** 2)
        return tape.gradient(loss, model.trainable_variables)

    program = step.experimental_get_compiler_ir(tf.constant(VALUES))(stage="optimized_hlo")
    return len(re.findall(r"= f32\S* (?:dot|custom-call)\(", program))


def test_xla_does_not_merge_the_second_run_with_the_first():
    row = [layers.Dense(6, activation="tanh") for _ in range(4)]
    model = keras.Sequential([keras.Input((6,)), *[keras.Sequential([layer]) for layer in row]])
    plain = products(model)
    recompute(model)
    assert products(model) == plain + 4


@pytest.mark.slow
@pytest.mark.no_gpu
def test_xla_needs_less_memory(tmp_path):
    flags = f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text"
    folders = os.pathsep.join([str(SUPPORT), str(SUPPORT.parents[1])])
    environ = os.environ | {"PYTHONPATH": folders, "XLA_FLAGS": flags}
    job = [sys.executable, SUPPORT / "recomputed_bytes.py", tmp_path]
    done = subprocess.run(job, capture_output=True, text=True, check=True, env=environ)
    plain, again = map(int, done.stdout.split())
    assert again < 0.6 * plain
