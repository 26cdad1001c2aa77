"""Trains in the workers of a cluster, which save to the same paths: python shared_files.py FOLDER stock|repaired

Worker 1 stops in the middle of writing each file until worker 0 has read what is there.
"""

import json
import sys
import time
from pathlib import Path

from tfopt import distribute, repairs

folder, which = Path(sys.argv[1]), sys.argv[2]
strategy = distribute.strategy("multi_worker")
if which == "stock":
    repairs.remove("shared_files")

import keras  # noqa: E402  after the strategy
import numpy as np  # noqa: E402
from keras.src.saving import saving_lib  # noqa: E402

worker = distribute.resolve().index
write, found = saving_lib._save_model_to_fileobj, []


def wait_for(path):
    until = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < until, path
        time.sleep(0.02)


def half_written(model, file, *args):
    """Writes a part, lets worker 0 read, and writes the file."""
    count = len(list(folder.glob("half*")))
    if worker == 1:
        file.write(b"PK")
        file.flush()
        (folder / f"half{count}").touch()
        wait_for(folder / f"read{count}")
        file.seek(0)
        file.truncate()
    write(model, file, *args)


saving_lib._save_model_to_fileobj = half_written


class Read(keras.callbacks.Callback):
    """Reads the file, of which worker 1 has written a part."""

    def on_epoch_end(self, epoch, logs=None):
        if worker == 0:
            wait_for(folder / f"half{epoch}")
            try:
                loaded = keras.models.load_model(folder / "model.keras", compile=False)
                found.append(all(map(np.array_equal, loaded.get_weights(), self.model.get_weights())))
            except Exception as error:
                found.append(type(error).__name__)
            (folder / f"read{epoch}").touch()


with strategy.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
callbacks = [
    keras.callbacks.ModelCheckpoint(folder / "model.keras"),
    Read(),
    keras.callbacks.ModelCheckpoint(folder / "new" / "{epoch}.weights.h5", save_weights_only=True),
    keras.callbacks.BackupAndRestore(folder / "backup"),
]
model.fit(np.ones((32, 3), "float32"), np.ones((32, 1), "float32"), 8, epochs=3, verbose=0, callbacks=callbacks)
keras.models.load_model(folder / "model.keras")
for epoch in (1, 2, 3):
    model.load_weights(folder / "new" / f"{epoch}.weights.h5")
left = sorted(path.name for path in folder.iterdir() if path.name.startswith("."))
(folder / f"found{worker}.json").write_text(json.dumps({"read": found, "left": left}))
