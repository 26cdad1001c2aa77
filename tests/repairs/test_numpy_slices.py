"""A fit on two logical CPU devices leaves the NumPy arrays alone of which its data are slices."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Logical devices are made before TensorFlow starts: a process of its own.
SCRIPT = """
import json
import keras
import numpy as np
import tensorflow as tf
from tfopt import repairs

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
random = np.random.default_rng(0)
X, Y = random.random((256, 16), "float32"), random.random((256, 1), "float32")

def aligned(values):
    # to 64 bytes: such memory tf.data uses as it is
    raw = np.zeros(values.nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    array = raw[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    array[:] = values
    return array

def batch(x, y, at):
    return x[32 * at : 32 * at + 32], y[32 * at : 32 * at + 32]

class Slices(keras.utils.PyDataset):
    def __init__(self, x, y):
        super().__init__()
        self.x, self.y = x, y

    def __len__(self):
        return 8

    def __getitem__(self, at):
        return batch(self.x, self.y, at)

def changed(source):
    x, y = aligned(X), aligned(Y)
    with strategy.scope():
        model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", jit_compile=False)
    model.fit(source(x, y), verbose=0)
    return int(np.sum(x != X) + np.sum(y != Y))

sources = {"PyDataset": Slices, "generator": lambda x, y: (batch(x, y, at) for at in range(8))}
stock = {name: changed(source) for name, source in sources.items()}
repairs.install("numpy_slices")
print(json.dumps([stock, {name: changed(source) for name, source in sources.items()}]))
"""


@pytest.mark.slow
def test_stock_keras_overwrites_labels_and_the_repair_keeps_them():
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "PYTHONPATH": str(Path(__file__).parents[2])}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environ, capture_output=True, text=True, check=False, timeout=300
    )
    assert run.returncode == 0, run.stderr[-3000:]
    stock, repaired = json.loads(run.stdout.splitlines()[-1])
    assert min(stock.values()) > 0
    assert repaired == {"PyDataset": 0, "generator": 0}
