"""Trains, evaluates and predicts on `build_pipeline` in each process of a cluster.

    python pipeline_parts.py FOLDER few|rest

Each process writes into FOLDER which examples it saw and transformed, by epoch, and what `evaluate` and `predict`
returned. Two processes also train on each kind of source in FOLDER/sources: on a few rows of the table, or, with rest
and nothing else, on the others.
"""

import itertools
import json
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from part_sources import NAMES, source
from unwrapped import unwrapped

from tfopt import distribute
from tfopt.errors import TfoptError
from tfopt.pipelines import hdf5, mix, plan_pipeline, records

EXAMPLES, SOME, BATCH = 203, 70, 12
FEATURES = {"number": tf.io.FixedLenFeature((), tf.int64)}
ROWS = [*itertools.product(("keep", "drop"), (None, 7), NAMES)]
FEW = ROWS[::4]  # each name, and each way to read one


class Recording(keras.Sequential):
    """Keeps the labels that its steps have seen."""

    def __init__(self):
        super().__init__([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
        self.seen = []

    def _keep(self, data):
        tf.numpy_function(lambda labels: self.seen.extend(labels.ravel().tolist()), [data[1]], [])

    def train_step(self, data):
        self._keep(data)
        return super().train_step(data)

    def test_step(self, data):
        self._keep(data)
        return super().test_step(data)


def pair(number):
    """An input and its label."""
    return tf.cast(number, tf.float32)[tf.newaxis] / EXAMPLES, number


def sources(folder):
    """Each source, with the options of its pipeline."""
    files = records(f"{folder}/*.tfrecord", features=FEATURES)
    numbers = np.arange(EXAMPLES)
    return {
        "arrays": (numbers, {"transform": pair}),
        "records": (files, {"transform": lambda parsed: pair(parsed["number"]), "remainder": "keep"}),
        "full batches": (numbers, {"transform": pair, "remainder": "drop", "seed": 3}),
    }


def fitted(plan):
    """A model that was trained for two epochs, its history, and what it saw in each."""
    model, epochs = Recording(), []
    model.compile("sgd", "mse", jit_compile=False)
    take = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: (epochs.append([*model.seen]), model.seen.clear()))
    return model, model.fit(plan.build(), epochs=2, verbose=0, callbacks=[take]).history, epochs


def mixed(folder):
    """What `fit` saw of a mixture that reads both of its parts whole, and the weights it came to."""
    files, options = sources(folder)["records"]
    some = plan_pipeline(np.arange(EXAMPLES, EXAMPLES + SOME), batch_size=BATCH, transform=pair, cache="memory")
    shares = [(plan_pipeline(files, batch_size=BATCH, **options), EXAMPLES), (some, SOME)]
    model, _, epochs = fitted(mix(shares, stop="all", batch_size=BATCH, remainder="keep", seed=3))
    return {"epochs": epochs, "weights": [weight.tolist() for weight in model.get_weights()]}


def used(data, options):
    """What `fit`, `evaluate` and `predict` saw and returned."""
    plan = plan_pipeline(data, batch_size=BATCH, **options)
    model, history, epochs = fitted(plan)
    weights = [weight.tolist() for weight in model.get_weights()]
    ordered = plan_pipeline(data, batch_size=BATCH, training=False, transform=options["transform"]).build()
    loss = model.evaluate(ordered, verbose=0)
    return {
        "epochs": epochs,
        "loss": history["loss"],
        "steps": int(model.optimizer.iterations.numpy()),
        "weights": weights,
        "evaluated": [*model.seen],
        "evaluation loss": loss,
        "predictions": model.predict(ordered, verbose=0).ravel().tolist(),
        "plan": unwrapped(plan),
    }


def counted(folder):
    """Sources whose `transform` is counted: read by position, with all workers reading all, and by Python."""
    numbers = tf.data.Dataset.from_generator(
        lambda: iter(range(EXAMPLES)), output_signature=tf.TensorSpec((), tf.int64)
    )
    return {
        "arrays": np.arange(EXAMPLES),
        "hdf5": hdf5(f"{folder}/rows.h5", "rows"),
        "generator": numbers.apply(tf.data.experimental.assert_cardinality(EXAMPLES)),
    }


def transformed(data, **options):
    """The examples that the `transform` of this process got in the second epoch."""
    calls = []

    def transform(number):
        tf.numpy_function(lambda number: calls.append(int(number)), [number], [])
        return pair(number)

    model = Recording()
    model.compile("sgd", "mse", jit_compile=False)
    dataset = plan_pipeline(data, batch_size=BATCH, transform=transform, **options).build()
    begin = keras.callbacks.LambdaCallback(on_epoch_begin=lambda *_: calls.clear())
    model.fit(dataset, epochs=2, verbose=0, callbacks=[begin])
    return calls


def rows(folder, share):
    """What each epoch of `fit` saw in each row of a share."""
    model = Recording()
    model.compile("sgd", "mse", jit_compile=False)
    found = {}
    for remainder, seed, name in FEW if share == "few" else [row for row in ROWS if row not in FEW]:
        data, to_number = source(folder, name)
        epochs = []

        def transform(*element, to_number=to_number):
            return pair(to_number(*element) if to_number else element[0])

        def take(epoch, logs, epochs=epochs):
            epochs.append([*model.seen])
            model.seen.clear()

        plan = plan_pipeline(data, batch_size=BATCH, transform=transform, remainder=remainder, seed=seed)
        callback = keras.callbacks.LambdaCallback(on_epoch_end=take)
        model.fit(plan.build(), epochs=2, verbose=0, callbacks=[callback])
        found[f"{remainder}, {seed}, {name}"] = epochs
    return found


def refused(data, **options):
    """The error of a plan."""
    try:
        plan_pipeline(data, batch_size=BATCH, **options)
    except TfoptError as error:
        return str(error)
    return ""


def trained(folder):
    """Does all but the table, in the strategy's scope."""
    found = {name: used(*each) for name, each in sources(folder).items()}
    found["transformed"] = {name: transformed(each) for name, each in counted(folder).items()}
    found["transformed in order"] = {name: transformed(each, shuffle=False) for name, each in counted(folder).items()}
    found["mixed"] = mixed(folder)
    found["shuffled"] = refused(tf.data.Dataset.range(EXAMPLES).shuffle(EXAMPLES))
    return found


def main():
    """Does what a share asks for."""
    folder, share = sys.argv[1:]
    strategy, found = distribute.strategy("auto"), {}
    with strategy.scope():
        if share == "few":
            found = trained(folder)
        if len(distribute.resolve().workers) == 2:
            found["rows"] = rows(f"{folder}/sources", share)
    found["outside"] = refused(np.arange(EXAMPLES))
    Path(folder, f"{distribute.resolve().index}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
