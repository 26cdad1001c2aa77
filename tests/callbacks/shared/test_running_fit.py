import tensorflow as tf
from watched_fit import net, shared_net

from tfopt.callbacks.shared.running_fit import replicas_of
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
