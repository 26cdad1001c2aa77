"""Trains in the processes of a cluster, from the last checkpoint on, and writes what came of it.

    python -m tfopt.distribute.launch -n 2 resumed_workers.py FOLDER DATA [RANK MOMENT EPOCH [BATCH]]

DATA is "pipeline", "mixture" (whose parts are cached), "dataset" or "arrays". The process of that rank gets SIGTERM at
that moment (see resumed_fits.py) unless it goes on from a checkpoint. Without a moment, nothing is saved.

Until then each step takes long, so that the processes, which ask each other once a second, leave in the same epoch.
"""

import sys
import time
import warnings
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from tfopt import distribute


def main():
    """Trains."""
    folder, data, *moment = sys.argv[1:]
    strategy = distribute.strategy("auto")
    from resumed_fits import BATCH, EPOCHS, Interrupt, X, Y, dataset, dense_net, pipeline

    from tfopt.callbacks import TrainingCheckpoint
    from tfopt.pipelines import mix

    def mixture():
        parts = [((X, Y), 5), ((X[:20] + 1, Y[:20]), 2)]
        return mix(parts, batch_size=BATCH, seed=4, remainder="keep", cache="memory").build()

    keras.utils.set_random_seed(5)
    with strategy.scope():
        model = dense_net()
        model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=["accuracy"], jit_compile=False)
        given = {"pipeline": pipeline, "mixture": mixture, "dataset": dataset, "arrays": lambda: X}[data]()
        validation = tf.data.Dataset.from_tensor_slices((X[:32], Y[:32])).batch(BATCH)
    callbacks = [keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=1, min_delta=0.3)]
    if moment:
        callbacks.append(TrainingCheckpoint(Path(folder) / "saved", every_seconds=0.5))
        rank, kind, *numbers = moment
        resumes = any((Path(folder) / "saved").glob("*.json"))
        if int(rank) == distribute.resolve().index and not resumes:
            callbacks.append(Interrupt(kind, *map(int, numbers)))
        if not resumes:
            callbacks.append(keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: time.sleep(0.4)))
    options = {"y": Y, "batch_size": BATCH} if data == "arrays" else {}
    with strategy.scope():
        history = model.fit(given, validation_data=validation, epochs=EPOCHS, verbose=0, callbacks=callbacks, **options)
    variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    arrays = {str(number): variable.numpy() for number, variable in enumerate(variables)}
    losses = {name: np.array(values) for name, values in history.history.items()}
    np.savez(Path(folder) / f"ended{distribute.resolve().index}.npz", **arrays, **losses)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
