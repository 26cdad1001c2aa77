"""What `fit` and its callbacks do when data or the process end, and what they count."""

import contextlib
import os
import signal
import threading
import time
import warnings
from functools import partial
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import tfopt
from defect_cases import Case, forked, repaired
from tfopt.repairs.probes import one_device

KILLS = 5
SIDE = 1_500  # of a square kernel: a save takes long enough to be killed


def large_net():
    """A model whose weights are all 1."""
    model = keras.Sequential([keras.Input((SIDE,)), keras.layers.Dense(SIDE, kernel_initializer="ones")])
    model.compile("sgd", "mse", jit_compile=False)
    return model


def save_as(model, kind, folder):
    """Returns a function that saves a model as a callback does at the end of an epoch."""
    if kind == "BackupAndRestore":
        callback = keras.callbacks.BackupAndRestore(folder, delete_checkpoint=False)
    else:
        callback = keras.callbacks.ModelCheckpoint(folder / f"best{kind}", save_weights_only=kind == ".weights.h5")
    callback.set_model(model)
    return lambda: callback.on_epoch_end(0, {})


def save_once(kind, folder):
    """Saves without being killed."""
    save_as(large_net(), kind, folder)()


def killed_save(kind, folder, fraction):
    """Saves twice, and is killed when that fraction of the third save has passed."""
    save = save_as(large_net(), kind, folder)
    save()
    started = time.monotonic()
    save()
    seconds = time.monotonic() - started
    while True:
        threading.Timer(seconds * fraction, os.kill, (os.getpid(), signal.SIGKILL)).start()
        save()


def restore(kind, folder):
    """Raises if what is on disk does not bring the weights back."""
    model = large_net()
    for weight in model.weights:
        weight.assign(tf.zeros_like(weight))
    if kind == "BackupAndRestore":
        callback = keras.callbacks.BackupAndRestore(folder)
        callback.set_model(model)
        callback.on_train_begin()
    elif kind == ".keras":
        model = keras.saving.load_model(folder / "best.keras")
    else:
        model.load_weights(folder / "best.weights.h5")
    assert np.all(model.get_weights()[0] == 1)


def lost(with_tfopt, folder, kind):
    """How many of five kills during a save lost what had been saved before it."""
    assert forked(save_once, kind, folder) == forked(restore, kind, folder) == 0
    found = 0
    for kill in range(KILLS):
        place = folder / str(kill)
        place.mkdir()
        assert forked(killed_save, kind, place, (kill + 0.5) / KILLS) == -signal.SIGKILL
        found += forked(restore, kind, place) != 0
    return found


def back_up(folder, epoch, die):
    """Backs up after an epoch; if asked to, is killed when the file of the metadata is open and still empty."""
    callback = keras.callbacks.BackupAndRestore(folder, double_checkpoint=True)
    callback.set_model(large_net())
    kill = mock.patch("json.dumps", side_effect=lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    with kill if die else contextlib.nullcontext():
        callback.on_epoch_end(epoch)


def restart(folder):
    """Raises if training does not start again from the backups."""
    callback = keras.callbacks.BackupAndRestore(folder, double_checkpoint=True)
    callback.set_model(large_net())
    callback.on_train_begin()


def failed_restart(with_tfopt, folder):
    """Whether a restart fails after a kill between a backup's weights and its metadata."""
    assert forked(back_up, folder, 0, False) == forked(restart, folder) == 0
    assert forked(back_up, folder, 1, True) == -signal.SIGKILL
    return int(forked(restart, folder) != 0)


def lost_as(kind):
    """Returns `lost` for one kind of save."""
    return partial(lost, kind=kind)


def one_weight():
    """A model whose weight is the number of its steps."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    model.compile(keras.optimizers.SGD(1.0), lambda y, y_pred: -y_pred, jit_compile=False)
    return model


def goes_on_at(with_tfopt, folder):
    """The batch at which an epoch that ended in its sixth goes on, with a backup after each third."""

    class Interrupt(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 5:
                raise KeyboardInterrupt

    def fit(*callbacks):
        model = one_weight()
        backup = keras.callbacks.BackupAndRestore(folder / "backup", save_freq=3)
        model.fit(np.ones((8, 1)), np.ones((8, 1)), batch_size=1, verbose=0, callbacks=[backup, *callbacks])
        return model

    with contextlib.suppress(KeyboardInterrupt):
        fit(Interrupt())
    steps = float(fit().get_weights()[0][0, 0])  # those before the backup, and those after it
    return 3 + 8 - steps


def shuffle_warnings(with_tfopt, folder):
    """Warnings of a shuffle that fit ignores, for a dataset that is shuffled."""
    ones = np.ones((8, 1), "float32")
    if with_tfopt:
        examples = tfopt.pipelines.build_pipeline((ones, ones), batch_size=4)
    else:
        examples = tf.data.Dataset.from_tensor_slices((ones, ones)).shuffle(8).batch(4)
    model = one_weight()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(examples, verbose=0)
    return sum("`shuffle=True` was passed" in str(warning.message) for warning in caught)


CASES = (
    Case("D14", "`.keras` files lost in 5 kills during a save", 0, lost_as(".keras"), handled=False),
    Case("D14", "`.weights.h5` files lost", 0, lost_as(".weights.h5"), handled=False),
    Case("D14", "states of `BackupAndRestore` lost", 0, lost_as("BackupAndRestore"), handled=False),
    Case(
        "D14",
        "with `double_checkpoint=True`: restarts of 1 that fail, killed while it writes the metadata",
        0,
        failed_restart,
        handled=False,
    ),
    Case("D15", "batch at which an epoch backed up after batch 3 goes on", 3, goes_on_at, handled=False),
    Case(
        "D16",
        "steps counted after one, and one that ran out of memory",
        1,
        partial(repaired, name="failed_steps", measure=one_device.failed_steps),
    ),
    Case(
        "D19",
        "steps counted after 6 epochs of 3 batches",
        18,
        partial(repaired, name="extra_step", measure=one_device.unknown_length),
    ),
    Case("D20", "warnings about a shuffled dataset", 0, shuffle_warnings),
    Case(
        "D23",
        "a weight of 1 after a first step of 0.001",
        1.001,
        partial(repaired, name="schedule_free", measure=one_device.first_step),
        tolerance=1e-5,
    ),
)
