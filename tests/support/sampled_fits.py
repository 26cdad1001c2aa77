"""One small model that fits with a UtilizationLogger, which waits for the samplers' readings."""

import json
import threading

import keras
import numpy as np
import pytest
from models import state

INTERVAL = 0.01
STEPS = 3
EXAMPLES = 20  # in batches of 8, 8 and 4
_random = np.random.default_rng(0)
X, Y = _random.normal(size=(EXAMPLES, 4)).astype("float32"), _random.normal(size=(EXAMPLES, 1)).astype("float32")


class Net:
    """One model, which is compiled once and starts each fit from the same state."""

    def __init__(self):
        keras.utils.set_random_seed(1)
        self.model = keras.Sequential([keras.Input((4,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
        self.model.compile("adam", "mse", jit_compile=False)
        self.model.optimizer.build(self.model.trainable_variables)
        self.start = [(variable, variable.numpy()) for variable in self._variables()]

    def _variables(self):
        return [*self.model.variables, *self.model.optimizer.variables]

    def fit(self, *callbacks, epochs=2, **options):
        for variable, value in self.start:
            variable.assign(value)
        options = {"verbose": 0, "shuffle": False, "batch_size": 8} | options
        return self.model.fit(X, Y, epochs=epochs, callbacks=list(callbacks), **options).history

    def state(self):
        return state(self.model)


@pytest.fixture(scope="module")
def net():
    return Net()


class Slow(keras.callbacks.Callback):
    """Holds each epoch until the sampler has had its turn, or for good if it never has."""

    def __init__(self, logger, samples=3):
        super().__init__()
        self.taken = threading.Semaphore(0)
        self.samples = samples
        take = logger._take

        def counted(rows):
            take(rows)
            self.taken.release()

        logger._take = counted

    def wait(self):
        while self.taken.acquire(blocking=False):
            pass  # those that were taken before
        for _ in range(self.samples):
            self.taken.acquire()

    def on_train_batch_end(self, step, logs=None):
        if step == 0:
            self.wait()


def driven(logger, samples=2):
    """What an epoch's logs hold, from the hooks alone."""
    slow, logs = Slow(logger, samples), {}
    logger.set_params({"steps": 1})
    logger.on_train_begin()
    logger.on_epoch_begin(0)
    slow.wait()
    logger.on_train_batch_end(0)
    logger.on_epoch_end(0, logs)
    logger.on_train_end()
    return logs


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def samplers():
    return [thread for thread in threading.enumerate() if thread.name == "tfopt-sampler"]


def warnings_of(caplog):
    return [record.message for record in caplog.records if record.name == "tfopt"]
