"""Callbacks whose figures depend on the replicas, on two logical devices, which are made before TensorFlow starts."""

import os
import subprocess
import sys

import pytest

TRAININGS = """
from types import SimpleNamespace

import keras
import numpy as np
import tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
from models import assert_same_state, batch, small_net, state
from throughput import Clock, tiny_net
from tfopt import callbacks as ours
from tfopt.callbacks import precision_monitor, throughput_logger
from tfopt.callbacks.shared.running_fit import replicas_of
from tfopt.causes.between_gpus import Replicas

strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

# The pace, by a clock on which each step takes a second.
with strategy.scope():
    model = tiny_net()
throughput_logger.time = SimpleNamespace(perf_counter=Clock())
logger = ours.ThroughputLogger(peak_tflops=3)
history = model.fit(*batch(40), batch_size=8, epochs=2, verbose=0, callbacks=[logger]).history
assert history["examples_per_second"] == [8.0, 8.0], history
assert logger.peak_tflops == 6
assert replicas_of(model) == Replicas(2, 2, "MirroredStrategy")
assert logger.flops_per_example == 4 * 64, logger.flops_per_example

# Comparisons with float32 change nothing.
precision_monitor.time = SimpleNamespace(perf_counter=lambda: 0.0)
found = []
for monitors in ([], [ours.PrecisionMonitor(batch(8, seed=1), every_steps=1)]):
    with strategy.scope():
        model = small_net("mixed_bfloat16", dropout=0.0)
    model.fit(*batch(32), batch_size=16, epochs=3, verbose=0, shuffle=False, callbacks=monitors)
    found.append(state(model))
assert_same_state(*found)
assert len(monitors[0].readings) == 6

# The second batch overflows in both replicas.
weights = np.ones(40, "float32")
weights[8:16] = np.inf
dataset = tf.data.Dataset.from_tensor_slices((np.ones((40, 6), "float32"), np.ones((40, 1)), weights)).batch(8)
with strategy.scope():
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(), initial_scale=1.0, dynamic_growth_steps=2)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1, dtype="mixed_float16")])
    model.compile(optimizer, "mse", jit_compile=False)
history = model.fit(dataset, epochs=2, verbose=0, callbacks=[ours.LossScaleLogger()]).history
found = [history[key] for key in ("loss_scale", "skipped_steps", "loss_scale_growths")]
assert found == [[1.0, 2.0], [1, 1], [1, 2]], found
print("done", model.distribute_strategy.num_replicas_in_sync)
"""


@pytest.mark.slow
def test_two_replicas():
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": "-1", "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", TRAININGS], env=environ, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    assert "done 2" in run.stdout
