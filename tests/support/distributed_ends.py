"""A worker of a training whose workers do not do the same, or whose input fails: python distributed_ends.py CASE FOLDER

The folder has the files of records that cases of input read, or a checkpoint is saved there.
"""

import shutil
import sys
import time
from pathlib import Path

import tfopt

strategy = tfopt.distribute.strategy("auto")

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

case, rank = sys.argv[1], tfopt.distribute.resolve().index
x, y = np.ones((32, 3), "float32"), np.ones((32, 2), "float32")
with strategy.scope():
    units = 5 if case == "another-model" and rank == 1 else 2
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(units), keras.layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)


def fit(epochs=2, **hooks):
    callbacks = [keras.callbacks.LambdaCallback(**hooks)]
    model.fit(x, y, batch_size=8, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks)


def fit_shards(dataset, policy="FILE"):
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy[policy]
    model.fit(dataset.batch(8).with_options(options), epochs=2, verbose=0)


def records():
    files = sorted(map(str, Path(sys.argv[2]).glob("*.tfrecord")))
    rows = tf.data.TFRecordDataset(files).map(lambda record: tf.io.decode_raw(record, tf.float32, fixed_length=12))
    return rows.map(lambda row: (tf.reshape(row, (3,)), tf.zeros(2)))


def fit_plan(fails):
    """Trains on a plan; one worker's cannot be built, or its transform fails as the first batch is made."""
    missing = rank == 1 and fails == "plan"

    def transform(row):
        if rank == 1 and fails == "batch":
            tf.debugging.assert_greater(row["x"][0], 1.0, "planted")
        return row["x"], row["y"]

    data = {"x": x, "y": y[:5] if missing else y}
    with strategy.scope():
        pipeline = tfopt.pipelines.build_pipeline(data, transform=transform, batch_size=8)
    model.fit(pipeline, epochs=2, verbose=0)


def fit_unsaved(folder):
    """Trains while a file takes the place of the folder of the checkpoints."""

    def spoil(epoch, logs):
        if rank == 0 and epoch == 0:
            shutil.rmtree(folder)
            folder.write_text("")

    callbacks = [keras.callbacks.LambdaCallback(on_epoch_begin=spoil)]
    callbacks.append(tfopt.callbacks.TrainingCheckpoint(folder, signals=(), every_epochs=1, on_error="raise"))
    model.fit(x, y, batch_size=8, epochs=3, shuffle=False, verbose=0, callbacks=callbacks)


def wait_in_python(epoch, logs):
    if epoch == (case == "one-waits-at-the-end"):
        time.sleep(3600)


if case == "one-epoch-fewer":
    fit(epochs=3 - rank)
elif case == "files-for-one":
    fit_shards(records())
elif case == "no-files":
    fit_shards(tf.data.Dataset.from_tensor_slices((x, y)))
elif case.startswith("no-first-"):
    fit_plan(case.rpartition("-")[2])
elif case == "not-saved":
    fit_unsaved(Path(sys.argv[2]) / "saved")
elif case == "a-damaged-record":
    fit_shards(records(), "AUTO")
elif case.startswith("one-waits"):
    fit(on_epoch_end=wait_in_python if rank == 1 else None)
else:
    fit()
    if case.startswith("chief-evaluates") and rank == 0:
        model.evaluate(x, y, batch_size=8, verbose=0)
    if case == "chief-evaluates-between":
        fit()
    elif case == "each-waits-elsewhere":
        {0: lambda: model.evaluate(x, y, batch_size=8, verbose=0), 1: lambda: time.sleep(3600)}[rank]()
print("ended", flush=True)
