"""What a dropped model leaves behind is given back; what is in use, and the settings, stay."""

import gc
import os
import subprocess
import sys
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfopt.internals.graphs import FuncGraph
from tfopt.memory import release

X = np.ones((32, 8), "float32")
Y = np.ones((32, 1), "float32")


def trained():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    model.fit(X, Y, verbose=0)
    return model


def handles(model):
    return [weakref.ref(variable.value.handle) for variable in [*model.variables, *model.optimizer.variables]]


def graphs():
    gc.collect()
    return sum(isinstance(one, FuncGraph) for one in gc.get_objects())


@pytest.mark.slow
def test_weights_and_slots_of_a_dropped_model_are_freed():
    kept = handles(trained())
    gc.collect()
    assert all(handle() is not None for handle in kept)  # what stock Keras leaves; otherwise there is nothing to do
    release()
    assert all(handle() is None for handle in kept)


@pytest.mark.slow
def test_a_model_in_use_stays_and_goes_on_to_train():
    release()  # what other tests have left
    model = trained()
    functions, traced = model.train_function, graphs()
    release()
    assert graphs() == traced
    other = trained()
    for each in (model, other):
        before = each.get_weights()
        each.fit(X, Y, verbose=0)
        assert not np.array_equal(before[0], each.get_weights()[0])
    assert model.train_function is functions


def test_gradients_of_functions_in_use_stay():
    @tf.custom_gradient
    def doubled(x):
        return x * 2, lambda upstream: upstream * 7

    @tf.function
    def through(x):
        return doubled(x)

    through(tf.constant(1.0))  # its gradient is traced later
    release()
    x = tf.constant(1.0)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = through(x)
    assert tape.gradient(y, x).numpy() == 7


def calling_another():
    """A function of which only the graph still knows the function that it calls."""

    @tf.custom_gradient
    def doubled(x):
        return x * 2, lambda upstream: upstream * 7

    spec = tf.TensorSpec((), tf.float32)
    inner = tf.function(lambda x: doubled(x)).get_concrete_function(spec)
    return tf.function(lambda x: inner(x)).get_concrete_function(spec)


def test_gradients_of_functions_that_others_call_stay():
    through = calling_another()
    release()
    x = tf.constant(1.0)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = through(x)
    assert tape.gradient(y, x).numpy() == 7


def test_settings_stay():
    keras.config.set_dtype_policy("mixed_bfloat16")
    keras.utils.set_random_seed(3)
    name = keras.layers.Dense(1).name
    release()
    assert keras.config.dtype_policy().name == "mixed_bfloat16"
    assert keras.layers.Dense(1).name != name


MANY = """
import keras, numpy as np, psutil, tfopt
x = np.ones((64, 64), "float32")

def trial():
    model = keras.Sequential([keras.Input((64,)), *(keras.layers.Dense(512) for _ in range(6)), keras.layers.Dense(64)])
    model.compile("adam", "mse")
    model.fit(x, x, verbose=0)

for count in range(51):
    trial()
    tfopt.memory.release()
    if count == 0:
        first = psutil.Process().memory_info().rss
print(psutil.Process().memory_info().rss / first)
"""


@pytest.mark.slow
@pytest.mark.no_gpu
def test_fifty_models_take_little_more_than_one():
    ran = subprocess.run(
        [sys.executable, "-c", MANY],
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert 0.5 < float(ran.stdout) < 1.2
