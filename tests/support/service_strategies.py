"""Reads a tf.data service under a strategy: python service_strategies.py ADDRESS [FILE]

Without a cluster trains on two logical devices and writes which examples each epoch of `fit` saw, by batch, into FILE.
In the processes of a cluster prints the error of the plan.
"""

import json
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from tfopt import distribute
from tfopt.errors import UnsupportedError
from tfopt.pipelines import build_pipeline, plan_pipeline

EXAMPLES = 203


class Recording(keras.Sequential):
    """Keeps the labels that its steps have seen."""

    def __init__(self):
        super().__init__([keras.Input((1,)), keras.layers.Dense(1)])
        self.seen = []

    def train_step(self, data):
        tf.numpy_function(lambda labels: self.seen.append(labels.ravel().tolist()), [data[1]], [])
        return super().train_step(data)


def main():
    """Trains, or prints the error."""
    address, *file = sys.argv[1:]
    if not file:
        tf.distribute.MultiWorkerMirroredStrategy()
        try:
            plan_pipeline(np.arange(10), service=address)
        except UnsupportedError as error:
            print(error)
        return
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    with distribute.strategy("auto").scope():
        data = np.zeros((EXAMPLES, 1), "float32"), np.arange(EXAMPLES)
        dataset = build_pipeline(data, batch_size=16, remainder="keep", service=address)
        model = Recording()
        model.compile("sgd", "mse", jit_compile=False)
    epochs = []
    take = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: (epochs.append([*model.seen]), model.seen.clear()))
    model.fit(dataset, epochs=2, shuffle=False, verbose=0, callbacks=[take])
    Path(file[0]).write_text(json.dumps(epochs))


if __name__ == "__main__":
    main()
