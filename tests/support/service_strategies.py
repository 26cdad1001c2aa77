"""Trains on a tf.data service under a strategy: python service_strategies.py ADDRESS FOLDER [OTHER NUMBER]

Writes into FOLDER which examples each epoch of `fit` saw, by batch of a replica: on two logical devices where there is
no cluster, of arrays, and of a part as a process of two replicas has it; in the processes of a cluster, of arrays and
of the files of records in FOLDER. These then train on the service OTHER, whose process NUMBER the first of them kills.
"""

import atexit
import json
import os
import signal
import sys
import warnings
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from unwrapped import unwrapped

from tfopt import distribute
from tfopt.errors import UnsupportedError
from tfopt.pipelines import plan_pipeline, profile_pipeline, records
from tfopt.pipelines.as_source import as_source
from tfopt.pipelines.sources.parts import Part, distributed
from tfopt.repairs.fit_data import mark_order_decided

EXAMPLES, BATCH, EPOCHS = 203, 16, 3
FEATURES = {"number": tf.io.FixedLenFeature((), tf.int64)}


class Recording(keras.Sequential):
    """Keeps the labels that its steps have seen."""

    def __init__(self):
        super().__init__([keras.Input((1,)), keras.layers.Dense(1)])
        self.seen = []

    def train_step(self, data):
        tf.numpy_function(lambda labels: self.seen.append(labels.ravel().tolist()), [data[1]], [])
        return super().train_step(data)


def pair(parsed):
    """An input and its label."""
    return tf.zeros(1), parsed["number"]


def arrays(examples=EXAMPLES):
    """Inputs and labels."""
    return np.zeros((examples, 1), "float32"), np.arange(examples)


def seen(dataset):
    """What each epoch of `fit` saw."""
    model = Recording()
    model.compile("sgd", "mse", jit_compile=False)
    warnings.filterwarnings("error", "`shuffle=True` was passed")
    epochs = []
    take = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: (epochs.append([*model.seen]), model.seen.clear()))
    history = model.fit(dataset, epochs=EPOCHS, verbose=0, callbacks=[take])
    return {"epochs": epochs, "loss": history.history["loss"], "iterations": int(model.optimizer.iterations.numpy())}


def train(source, address, **options):
    """What each epoch of `fit` saw, and what the plan had said."""
    plan = plan_pipeline(source, batch_size=BATCH, service=address, **options)
    return {**seen(plan.build()), "steps": plan.to_dict()["steps_per_epoch"], "plan": unwrapped(plan)}


def killed(address, number):
    """The error of a training that kills a process, if one is given, in its second batch."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)

    def kill(batch, logs):
        if batch == 1 and number is not None:
            os.kill(number, signal.SIGKILL)

    dataset = plan_pipeline(arrays(200_000), batch_size=BATCH, shuffle=False, service=address).build()
    try:
        model.fit(dataset, verbose=0, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=kill)])
    except tf.errors.OpError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refused(address, source=None, *, then=str, **options):
    """The error of a plan, or of what is done with it."""
    try:
        then(plan_pipeline(arrays() if source is None else source, service=address, **{"batch_size": BATCH, **options}))
    except (UnsupportedError, ValueError) as error:
        return str(error)
    return ""


def in_cluster(address, folder):
    """What the processes of a cluster see."""
    files = records(f"{folder}/*.tfrecord", features=FEATURES)
    return {
        "arrays": train(arrays(), address),  # which keeps the last batch: to drop it would be too much
        "full batches": train(arrays(), address, remainder="drop"),
        "records": train(files, address, remainder="keep", transform=pair),
        "uneven": refused(address, batch_size=15),
        "padded": refused(address, remainder="pad"),
        "whole": refused(address, tf.data.Dataset.range(100)),
        "profiled": refused(address, then=profile_pipeline),
    }


def on_two_devices(address):
    """What two replicas see: of all examples, and of a part, of which a step takes 16."""
    counts = {"counts": (EXAMPLES,), "batches": 13, "steps": 13, "last_batch": ("keep", "")}
    whole = as_source(arrays())
    part = Part(source=whole, index=0, parts=1, block=1, size=BATCH, replica_size=BATCH // 2, **counts)
    here = tf.data.Dataset.from_tensor_slices(arrays()).batch(BATCH)
    return {
        "arrays": train(arrays(), address, remainder="keep"),
        "part": seen(mark_order_decided(distributed(here, part))),
    }


def main():
    """Trains."""
    address, folder, *other = sys.argv[1:]
    workers = "TF_CONFIG" in os.environ
    if not workers:
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategy = distribute.strategy("auto")
    with strategy.scope():
        found = in_cluster(address, folder) if workers else on_two_devices(address)
    if workers:
        found["outside"] = refused(address)
    index = distribute.resolve().index
    Path(folder, f"{index}.json").write_text(json.dumps(found))
    if other:
        with strategy.scope():
            error = killed(other[0], int(other[1]) if index == 0 else None)
        Path(folder, f"{index}.txt").write_text(error)


if __name__ == "__main__":
    main()
    atexit._run_exitfuncs()  # a forked process ends without them, and the other would miss its goodbye
