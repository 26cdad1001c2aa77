"""Trains a tiny model for ever in a Slurm job's first run, and from the last checkpoint to an end in its next.

python train.py FOLDER
"""

import os
import sys
import time
from pathlib import Path

import tfopt

EPOCHS_MORE = 3
folder = Path(sys.argv[1])
is_first_run = "SLURM_RESTART_COUNT" not in os.environ
strategy = tfopt.distribute.strategy("multi_worker")

import keras  # noqa: E402
import numpy as np  # noqa: E402


def epoch_of(path):
    return int(path.name.split(".")[0])


class Save(keras.callbacks.Callback):
    """All workers save, since one that saves alone may wait for the others; the chief's files are the checkpoints."""

    def on_epoch_end(self, epoch, logs=None):
        path = folder / f"{epoch + 1}.weights.h5"
        own = Path(tfopt.distribute.own_path(path))
        self.model.save_weights(own.with_name(f"new-{own.name}"))
        own.with_name(f"new-{own.name}").rename(own)  # complete, or not there
        time.sleep(0.2)


with strategy.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
saved = sorted(folder.glob("[0-9]*.weights.h5"), key=epoch_of)
done = epoch_of(saved[-1]) if saved else 0
if saved:
    model.load_weights(saved[-1])
    print(f"going on after epoch {done}", flush=True)
last = 10**6 if is_first_run else done + EPOCHS_MORE
model.fit(
    np.ones((8, 3)), np.ones((8, 2)), batch_size=8, initial_epoch=done, epochs=last, verbose=0, callbacks=[Save()]
)
print(f"trained to epoch {last}", flush=True)
