"""Trains with TrainingCheckpoint in a Slurm job, waits for the preemptions of its runs, and writes what came of it.

python train_preempted.py FOLDER [WAITS]

WAITS is how many runs wait for a signal, each in the middle of an epoch. The file `waits RUN RANK` says that one does.
"""

import os
import signal
import sys
import time
from pathlib import Path

import keras
import numpy as np

from tfopt import distribute

SUPPORT = Path(__file__).parents[2] / "support"
EPOCHS_APART, BATCH = 2, 1


class WaitForSignal(keras.callbacks.Callback):
    """Trains slowly, and stands still at a step until a signal has arrived."""

    def __init__(self, folder, run):
        super().__init__()
        self._file = folder / f"waits {run} {distribute.resolve().index}"
        self._awaited = run * EPOCHS_APART
        self._arrived, notes = os.pipe()
        os.set_blocking(notes, False)
        signal.set_wakeup_fd(notes)

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.5)  # so that a step or two after the signal all processes know of it
        if (self._epoch, batch) == (self._awaited, BATCH):
            self._file.touch()
            os.read(self._arrived, 1)


def main(folder, waits=0):
    """Trains."""
    strategy = distribute.strategy("multi_worker")
    sys.path.append(str(SUPPORT))
    from resumed_fits import EPOCHS, dense_net, pipeline

    from tfopt.callbacks import TrainingCheckpoint

    run = int(os.environ.get("SLURM_RESTART_COUNT", 0))
    keras.utils.set_random_seed(5)
    with strategy.scope():
        model = dense_net()
        model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=["accuracy"], jit_compile=False)
        data = pipeline()
    callbacks = [TrainingCheckpoint(folder / "saved")]
    if run < waits:
        callbacks.append(WaitForSignal(folder, run))
    history = model.fit(data, epochs=EPOCHS, verbose=0, callbacks=callbacks).history
    variables = [*model.variables, *model.optimizer.variables]
    arrays = {str(number): variable.numpy() for number, variable in enumerate(variables)}
    losses = {name: np.array(values) for name, values in history.items()}
    np.savez(folder / f"ended{distribute.resolve().index}.npz", **arrays, **losses)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
