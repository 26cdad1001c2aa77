"""Small fits for callbacks that use readings, and the readings that a test hands them."""

import functools
import os
import threading
import time

import keras
import numpy as np

from tfopt.hardware import GpuSample


class Interrupts(keras.callbacks.Callback):
    """Ends fit as Ctrl-C does."""

    def on_train_batch_end(self, step, logs=None):
        raise KeyboardInterrupt


class Forks(keras.callbacks.Callback):
    """Forks in the middle of fit, lets the child do something, and fails if it does or hangs."""

    def __init__(self, act):
        super().__init__()
        self.act = act

    def on_train_batch_end(self, step, logs=None):
        if step == 1:
            child = os.fork()
            if child == 0:
                failed = True
                try:
                    self.act()
                    failed = False
                finally:
                    os._exit(failed)
            for _ in range(1000):
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended:
                    assert status == 0, "the child failed"
                    return
                time.sleep(0.01)
            raise AssertionError("the child hangs")


def gpus(*utilization, **others):
    """A sample's rows: one GPU for each utilisation."""
    return tuple(
        GpuSample(0.0, 0.0, index=index, uuid=f"GPU-{index}", gpu_utilization_percent=percent, **others)
        for index, percent in enumerate(utilization)
    )


def net(policy="float32"):
    keras.utils.set_random_seed(7)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, dtype=policy), keras.layers.Dropout(0.5)])
    model.compile("adam", "mse", jit_compile=False)
    return model


@functools.cache
def shared_net():
    """One for all tests to which its weights do not matter: it is traced once."""
    return net()


def fit(*callbacks, model=None, **options):
    """Four steps an epoch."""
    x = np.linspace(-1, 1, 48, dtype="float32").reshape(16, 3)
    options = {"verbose": 0, "shuffle": False, "batch_size": 4, "callbacks": list(callbacks)} | options
    return (model or shared_net()).fit(x, x[:, :2], **options)


def told(caplog):
    """What was said through tfopt's logger."""
    return [record.getMessage() for record in caplog.records if record.name == "tfopt"]


def threads(*names):
    """The threads that run, of those named: "alert-action", "sampler"."""
    return [thread.name for thread in threading.enumerate() if thread.name.removeprefix("tfopt-") in names]
