import keras
import pytest
import tensorflow as tf
from watched_fit import fit, net, shared_net

from tfopt.callbacks.shared.running_fit import replicas_of, steps_trained
from tfopt.causes.between_gpus import Replicas


def test_how_a_model_is_spread_over_devices(monkeypatch):
    assert replicas_of(None) is None
    assert replicas_of(shared_net()) == Replicas(1, 1)
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        assert replicas_of(net()) == Replicas(1, 1, "OneDeviceStrategy")
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        assert replicas_of(net()) == Replicas(1, 1, "MirroredStrategy")
    devices = [tf.config.PhysicalDevice(f"/physical_device:GPU:{index}", "GPU") for index in (2, 5)]
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: devices)
    assert replicas_of(shared_net()).visible == {2, 5}


@pytest.mark.parametrize("scaled", [False, True])
def test_steps_trained(scaled):
    model = net()
    adam = keras.optimizers.Adam(gradient_accumulation_steps=2)
    model.compile(
        keras.optimizers.LossScaleOptimizer(adam, initial_scale=1.0) if scaled else adam, "mse", jit_compile=False
    )
    assert steps_trained(model) == 0
    fit(model=model)
    assert steps_trained(model) == 4


def test_steps_of_a_model_that_is_not_compiled():
    assert steps_trained(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])) == 0
