"""The state of a model, kept and given back; where the GPU is a pretended one, the variables lie on a CPU."""

import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from models import assert_same_state, batch, small_net, state
from quick import campaign, first_quick

from tfopt.hardware import gpu_memory
from tfopt.measure import FitTimer, StepTimer, preserved
from tfopt.model import state as kept
from tfopt.model.state import StatePreserver

MIB = 2**20


class Gpu:
    """Memory of a GPU, in MiB; `reads` counts the variables that stay on it."""

    def __init__(self, monkeypatch):
        self.limit, self.in_use, self.peak = 1000, 100, 500
        monkeypatch.setattr(kept, "_gpus", lambda parts: {parts[0].device: 100 * MIB})
        monkeypatch.setattr(gpu_memory, "limit_bytes", lambda device: self.limit and self.limit * MIB)
        monkeypatch.setattr(gpu_memory, "in_use_bytes", lambda device: self.in_use * MIB)
        monkeypatch.setattr(gpu_memory, "peak_bytes", lambda device: self.peak * MIB)


@pytest.fixture
def gpu(monkeypatch):
    return Gpu(monkeypatch)


def stayed(preserver):
    """Whether the state of the next block stays on the device."""
    return bool(preserver._devices_with_room(kept._parts(preserver._model, ())))


def train(model, jit=None):
    model.fit(*batch(16), batch_size=8, verbose=0, shuffle=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "jit"),
    first_quick([("float32", False), ("mixed_float16", False), ("mixed_bfloat16", False), ("mixed_float16", True)], 3)
    + campaign([("float32", True), ("mixed_bfloat16", True)]),
)
def test_it_comes_back_bit_for_bit_from_host_and_device(gpu, policy, jit):
    model = small_net(policy, jit_compile=jit)
    train(model)
    before = state(model)
    preserver, places = StatePreserver(model), []
    for _ in range(4):
        places.append(stayed(preserver))
        with preserver.preserved():
            train(model)
            assert any((one != other).any() for (_, one), (_, other) in zip(before, state(model), strict=True))
        assert_same_state(before, state(model))
    assert places == [False, False, True, True]
    # What was given back can be trained on as if nothing had been.
    train(model)
    once = state(model)
    with preserver.preserved():
        train(model)
    assert_same_state(once, state(model))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "in_use", "peak", "fits"),
    [
        (1000, 100, 500, True),
        (700, 100, 500, True),  # 100 in use, 400 for the step, 100 for the copy, 70 spare
        (650, 100, 500, False),
        (1000, 900, 950, False),
        (None, 100, 500, False),  # unknown
    ],
)
def test_it_stays_on_the_device_only_with_room_for_a_step(gpu, limit, in_use, peak, fits):
    gpu.limit, gpu.in_use, gpu.peak = limit, in_use, peak
    model = small_net()
    train(model)
    preserver = StatePreserver(model)
    for _ in range(2):
        with preserver.preserved():
            pass
    assert stayed(preserver) == fits
    if fits:
        gpu.in_use = 950  # others came
        assert not stayed(preserver)
        before = state(model)
        with preserver.preserved():
            train(model)
        assert_same_state(before, state(model))


@pytest.mark.slow
def test_a_block_that_fails_gives_it_back(gpu):
    model = small_net()
    train(model)
    preserver = StatePreserver(model)

    def fail():
        with preserver.preserved():
            train(model)
            raise ArithmeticError

    before = state(model)
    for _ in range(3):
        with pytest.raises(ArithmeticError):
            fail()
        assert_same_state(before, state(model))


MIRRORED = """
import keras
import tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
from models import assert_same_state, state
from tfopt.hardware import gpu_memory
from tfopt.model import state as kept

kept._gpus = lambda parts: {parts[0].device: 100}
gpu_memory.limit_bytes = lambda device: 1000
gpu_memory.in_use_bytes = lambda device: 100
gpu_memory.peak_bytes = lambda device: 500
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, use_bias=False)])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
model.fit(tf.ones((8, 4)), tf.ones((8, 3)), batch_size=4, verbose=0)
before = state(model)
preserver = kept.StatePreserver(model)
for _ in range(3):
    with preserver.preserved():
        model.fit(tf.ones((8, 4)), tf.ones((8, 3)), batch_size=4, verbose=0)
    assert_same_state(before, state(model))
    assert {part.device[-5:] for part in kept._parts(model, ())} == {"CPU:0", "CPU:1"}
print("came back")
"""


@pytest.mark.slow
def test_mirrored_variables():
    """In a process of its own: with one logical CPU, two replicas would wait for each other forever."""
    folders = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1] / "support")]
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "PYTHONPATH": os.pathsep.join(folders)}
    run = subprocess.run([sys.executable, "-c", MIRRORED], env=environ, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    assert "came back" in run.stdout


@pytest.mark.slow
@pytest.mark.parametrize("timer", [StepTimer, FitTimer])
def test_timers_keep_it_on_the_device_from_the_third_call_on(gpu, timer):
    model = small_net()
    train(model)
    data = batch(8)
    measured = timer(model, data)
    places, before = [], state(model)
    for _ in range(3):
        places.append(stayed(measured._state))
        measured(2, warmup=1)
        assert_same_state(before, state(model))
    assert places == [False, False, True]


def test_on_a_cpu_it_waits_in_host_memory():
    model = small_net()
    preserver = StatePreserver(model)
    for _ in range(3):
        assert not stayed(preserver)
        with preserver.preserved():
            pass


@pytest.mark.slow
def test_once():
    model = small_net()
    train(model)
    before = state(model)
    with preserved(model):
        train(model)
    assert_same_state(before, state(model))


def test_an_optimizer_that_is_not_built_yet():
    model = small_net()
    with preserved(model):
        train(model)
    other = small_net()
    for one in (model, other):
        train(one)
    assert_same_state(state(other), state(model))


class TwoOptimizers(keras.Model):
    def __init__(self):
        super().__init__(name="two")
        self.one, self.other = keras.layers.Dense(2), keras.layers.Dense(2)
        self.build((None, 3))

    def build(self, shape):
        self.one.build(shape)
        self.other.build(shape)
        self.built = True

    def compile(self):
        super().compile()
        self.optimizers = [keras.optimizers.Adam(0.1), keras.optimizers.Adam(0.1)]

    def train_step(self, x):
        for layer, optimizer in zip((self.one, self.other), self.optimizers, strict=True):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(layer(x) ** 2)
            weights = layer.trainable_weights
            optimizer.apply(tape.gradient(loss, [weight.value for weight in weights]), weights)
        return {"loss": loss}


def test_a_model_compiled_inside_needs_no_optimizer_that_is_built():
    """A GAN's discriminator has one that trains it alone."""
    inner = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    inner.compile("adam", "mse")
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3), inner])
    model.compile("sgd", "mse")
    with preserved(model):
        model.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0)
    assert not inner.optimizer.built


def test_all_optimizers_of_a_model():
    model, data = TwoOptimizers(), tf.data.Dataset.from_tensors(tf.ones([4, 3]))
    model.compile()
    with pytest.raises(ValueError, match="Found 'optimizers' of 'two', which is not built"):
        preserved(model)
    model.fit(data, verbose=0, shuffle=False)
    slots = [variable for optimizer in model.optimizers for variable in optimizer.variables]
    before = [slot.numpy() for slot in slots]
    with preserved(model):
        model.fit(data, verbose=0, shuffle=False)
    for slot, value in zip(slots, before, strict=True):
        np.testing.assert_array_equal(slot, value)


def test_a_model_that_is_not_built_is_refused():
    with pytest.raises(ValueError, match="Expected a built model"):
        preserved(keras.Sequential([keras.layers.Dense(1)]))


@pytest.mark.gpu
def test_on_a_gpu_it_stays_there():
    model = small_net("mixed_bfloat16", jit_compile=True)
    train(model)
    before = state(model)
    preserver = StatePreserver(model)
    for turn in range(4):
        assert stayed(preserver) == (turn >= 2)
        with preserver.preserved():
            train(model)
        assert_same_state(before, state(model))
