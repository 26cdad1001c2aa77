"""A step that fails is not counted by the optimizer, and all others train as before."""

import os
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from models import assert_same_state, batch, small_net, state, summed_in_one_order

from tfopt import repairs

PLACES = ("forward", "backward", "update")
ERROR = tf.errors.InvalidArgumentError


def require(flag):
    """Fails in the step that computes it, unless the flag is 0."""
    with tf.control_dependencies([tf.debugging.assert_equal(flag, 0.0)]):
        return tf.identity(flag)


class Fragile(keras.layers.Layer):
    """Fails in its forward pass by the first flag of a batch, and in its backward pass by the second."""

    def call(self, inputs):
        @tf.custom_gradient
        def fragile(values, flags):
            def gradient(upstream):
                return upstream + require(flags[1]), tf.zeros_like(flags)

            return values + require(flags[0]), gradient

        values, examples = inputs
        return fragile(values, examples[0, :2])


def fragile_update(optimizer):
    """An optimizer of this class that fails in the update of the last layer's kernel by `flag`."""

    class Fragile(optimizer):
        def update_step(self, gradient, variable, learning_rate):
            if gradient.shape == (4, 1):
                gradient += tf.cast(require(self.flag), gradient.dtype)
            super().update_step(gradient, variable, learning_rate)

    return Fragile


def fragile_net(optimizer=keras.optimizers.Adam, policy="float32", **options):
    inputs = keras.Input((3,))
    hidden = keras.layers.Dense(4, dtype=policy)(inputs)
    hidden = Fragile(dtype="float32")([hidden, inputs])
    net = keras.Model(inputs, keras.layers.Dense(1, dtype="float32")(hidden))
    own = fragile_update(optimizer)(0.1, **options)
    own.flag = tf.Variable(0.0)
    net.compile(
        keras.optimizers.LossScaleOptimizer(own, initial_scale=8.0) if policy == "mixed_float16" else own,
        "mse",
        jit_compile=False,
    )
    return net, own


def train(net, own, place=None):
    """Trains on a batch; with a place, the step fails there."""
    flags = [float(place == one) for one in PLACES]
    own.flag.assign(flags[2])
    net.train_on_batch(np.array([[*flags[:2], 1.0]] * 2, "float32"), np.ones((2, 1), "float32"))


def counted_after_failure(place, *arguments, **options):
    """Steps that the optimizer has counted after a good one, one that fails and a good one."""
    net, own = fragile_net(*arguments, **options)
    train(net, own)
    with pytest.raises(ERROR):
        train(net, own, place)
    between = int(own._iterations.numpy())
    train(net, own)
    assert int(own._iterations.numpy()) == between + 1
    return between


def test_stock_keras_counts_a_step_that_fails():
    assert counted_after_failure("backward") == 2


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("float32", {}),
        ("float32", {"use_ema": True, "ema_overwrite_frequency": 1, "global_clipnorm": 1.0}),
        ("float32", {"gradient_accumulation_steps": 2}),
        ("mixed_float16", {}),
    ],
    ids=["plain", "averaged", "accumulated", "scaled"],
)
def test_the_repaired_optimizer_does_not(place, policy, options):
    repairs.install("failed_steps")
    assert counted_after_failure(place, policy=policy, **options) == 1


@pytest.mark.slow
def test_together_with_the_repair_of_data_that_end():
    repairs.install("failed_steps", "extra_step", "accumulation")
    assert counted_after_failure("backward") == 1


def test_a_failed_step_may_still_have_changed_weights():
    """What the repair does not promise."""
    repairs.install("failed_steps")
    net, own = fragile_net()
    train(net, own)
    before = [weight.numpy() for weight in net.trainable_weights]
    with pytest.raises(ERROR):
        train(net, own, "backward")
    first = [np.array_equal(*pair) for pair in zip(before, [w.numpy() for w in net.trainable_weights], strict=True)][:2]
    assert first == [True, True]  # its gradients were never there


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "jit_compile"),
    [
        (lambda: keras.optimizers.Adam(0.01), False),
        (lambda: keras.optimizers.Adam(0.01), True),
        (lambda: keras.optimizers.AdamW(0.01, clipnorm=0.5, use_ema=True), False),
        (lambda: keras.optimizers.SGD(0.01, momentum=0.9, gradient_accumulation_steps=2), False),
        (lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01)), False),
    ],
    ids=["adam", "xla", "averaged", "accumulated", "scaled"],
)
def test_training_is_the_same_bit_for_bit(optimizer, jit_compile):
    def trained():
        net = small_net(optimizer=optimizer(), jit_compile=jit_compile)
        net.optimizer.build(net.trainable_variables)
        net.fit(*batch(48), batch_size=16, epochs=2, verbose=0)
        return state(net)

    with summed_in_one_order():
        stock = trained()
        repairs.install("failed_steps")
        assert_same_state(trained(), stock)


@pytest.mark.slow
def test_eager_steps_are_counted_as_before():
    repairs.install("failed_steps")
    net = small_net(run_eagerly=True)
    net.fit(*batch(32), batch_size=16, verbose=0)
    assert int(net.optimizer.iterations.numpy()) == 2


REPLICAS = """
import keras, numpy as np, tensorflow as tf
from tfopt import repairs
from test_failed_steps import counted_after_failure
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
repairs.install("failed_steps")
with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
    print([counted_after_failure(place) for place in ("forward", "backward")])
"""

OUT_OF_MEMORY = """
import os, tensorflow as tf
from tfopt import repairs
import test_failed_steps as cases

def require(flag):
    return tf.reduce_sum(tf.random.uniform([tf.cast(flag * 2.0**27, tf.int32)])[:1]) * 0.0  # 512 MiB

cases.require, cases.ERROR = require, tf.errors.ResourceExhaustedError
stock = [cases.counted_after_failure(place) for place in cases.PLACES]
repairs.install("failed_steps")
print(stock, [cases.counted_after_failure(place) for place in cases.PLACES], flush=True)
os._exit(0)  # TensorFlow's allocator may fail as the process ends
"""


def run(script, **environ):
    folders = [os.path.dirname(__file__), *sys.path]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "TF_CPP_MIN_LOG_LEVEL": "3", **environ}
    ran = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=False)
    assert ran.stdout, ran.stderr[-2000:]
    return ran.stdout.splitlines()[-1]


@pytest.mark.slow
def test_on_several_replicas():
    assert run(REPLICAS) == "[1, 1]"


@pytest.mark.slow
def test_after_true_errors_of_the_allocator():
    # oneDNN ends the process where it gets no memory.
    environ = {"TF_CPU_ALLOCATOR_USE_BFC": "1", "TF_CPU_BFC_MEM_LIMIT_IN_MB": "256", "TF_ENABLE_ONEDNN_OPTS": "0"}
    assert run(OUT_OF_MEMORY, **environ) == "[2, 2, 2] [1, 1, 1]"
