import gc
import weakref

import pytest
import tensorflow as tf
from watched_fit import net, shared_net

from tfopt.callbacks.shared.running_fit import replicas_of, variable_of_a_caller
from tfopt.causes.between_gpus import Replicas


class Thing:
    pass


@pytest.fixture
def _no_collection():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def found_below():
    return variable_of_a_caller("thing", Thing)


def test_the_nearest_callers_variable_of_that_kind():
    thing = Thing()

    def between():
        thing = "of another kind"
        return found_below(), thing

    assert between()[0] is thing
    assert variable_of_a_caller("no_such_variable", Thing) is None


@pytest.mark.usefixtures("_no_collection")
def test_what_was_found_goes_with_its_owner():
    """An iterator of tf.data that waited for the garbage collection would hold up the step in which that comes."""

    def fit():
        thing = Thing()
        assert found_below() is thing
        return weakref.ref(thing)

    assert fit()() is None


def test_what_a_caller_deletes_is_gone():
    """A frame keeps the variables that it was asked for, up to its end."""
    large = Thing()
    gone = weakref.ref(large)
    assert variable_of_a_caller("no_such_variable", Thing) is None
    del large
    assert gone() is None


def test_a_variable_that_an_inner_function_uses_is_found():
    thing = Thing()

    def inner():
        return thing

    assert found_below() is inner()


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
