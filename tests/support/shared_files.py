"""Trains in the workers of a cluster, which save to the same paths: python shared_files.py FOLDER stock|repaired

After worker 0 has saved, worker 1 stops in the middle of writing each file until worker 0 has read what is there.
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

from tfopt.internals.sources import find  # noqa: E402

FILES = ("model.keras", "model.h5")
worker = distribute.resolve().index
found, epochs = [], []


def mark(what):
    (folder / f"{what}-{len(epochs)}").touch()


def wait_for(what):
    path, until = folder / f"{what}-{len(epochs)}", time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < until, path
        time.sleep(0.02)


def half_written(name, write, begin):
    def write_slowly(*args):
        if worker == 1:
            wait_for("saved")
            begin(*args)
            mark(f"half-{name}")
            wait_for(f"read-{name}")
        write(*args)

    return write_slowly


def begin_archive(model, file, *_):
    file.truncate(0)  # it was opened before worker 0 wrote its own
    file.write(b"PK")
    file.flush()
    file.seek(0)


for target, name, begin in (
    ("keras.src.saving.saving_lib:_save_model_to_fileobj", "model.keras", begin_archive),
    ("keras.src.legacy.saving.legacy_h5_format:save_weights_to_hdf5_group", "model.h5", lambda *_: None),
):
    setattr(*find(target), half_written(name, getattr(*find(target)), begin))


class Read(keras.callbacks.Callback):
    """Reads the files, of which worker 1 has written a part."""

    def on_epoch_end(self, epoch, logs=None):
        if worker == 0:
            mark("saved")
            for name in FILES:
                wait_for(f"half-{name}")
                try:
                    loaded = keras.models.load_model(folder / name, compile=False)
                    found.append(all(map(np.array_equal, loaded.get_weights(), self.model.get_weights())))
                except OSError:
                    found.append("OSError")
                except Exception as error:
                    found.append(type(error).__name__)
                mark(f"read-{name}")
        epochs.append(epoch)


with strategy.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
callbacks = [*(keras.callbacks.ModelCheckpoint(folder / name) for name in FILES), Read()]
if which == "repaired":
    callbacks += [
        keras.callbacks.ModelCheckpoint(folder / "new" / "{epoch}.weights.h5", save_weights_only=True),
        keras.callbacks.BackupAndRestore(folder / "backup"),
    ]
model.fit(np.ones((32, 3), "float32"), np.ones((32, 1), "float32"), 8, epochs=3, verbose=0, callbacks=callbacks)
if which == "repaired":
    for name in FILES:
        keras.models.load_model(folder / name, compile=False)
    for epoch in (1, 2, 3):
        model.load_weights(folder / "new" / f"{epoch}.weights.h5")
left = sorted(path.name for path in folder.iterdir() if path.name.startswith("."))
(folder / f"found{worker}.json").write_text(json.dumps({"read": found, "left": left}))
