"""Kills trainings that save checkpoints, and records what is lost: with tfopt nothing, with others what they lose.

    python -m venv ORBAX && ORBAX/bin/pip install -r benchmarks/peers/requirements-orbax.txt
    PYTHONPATH=tests/support python benchmarks/checkpoint_kills.py [RESULTS.json] --orbax ORBAX/bin/python

All kills are SIGKILL. First come the folder alone (tests/support/killed_trainings.py) and trainings with `fit` and
TrainingCheckpoint (tests/support/killed_fits.py), killed after calls that change the disk, in the middle of writes and
at seeded moments. After each kill all that was saved must be there, whole and bit for bit, and a training that goes on
must end as one that was never killed; otherwise this ends with an error.

Then come the same training, with larger layers, and the ways to save it that Keras and TensorFlow have, with
TrainingCheckpoint beside them: saved at each epoch's end, killed at a seeded moment of its second or third save, and
started again, as each way's documentation says. Orbax saves arrays in a script of its own. Of each way are recorded:

- kills: inside a save
- lost: the restart fails, or begins before the last save that was done
- partly_read: the restart goes on with a state that the training never had at that epoch
- not_equal: of the others, those whose weights, optimizer or history are not those of an uninterrupted training
- weights_not_equal: the same for the weights alone
"""

import hashlib
import os
import random
import shutil
import tempfile
import time
from functools import partial
from pathlib import Path
from unittest import mock

import harness
import keras
import killed_fits
import tensorflow as tf
from killed_fits import BATCHES, EPOCHS, forked
from killed_trainings import kill_at_calls, kill_at_moments

from tfopt.callbacks import TrainingCheckpoint
from tfopt.checkpoint.folder.store import Store

MOMENTS = 200  # of the folder alone
FIT_MOMENTS = 40  # with each of two kinds of data
PEER_KILLS = 12
WIDTH = 1500  # so that a save takes long enough to be killed
ORBAX = Path(__file__).with_name("peers") / "orbax_saving.py"


class Resumed(keras.callbacks.Callback):
    """Notes with which weights the first epoch begins, and those after each epoch."""

    def __init__(self, note):
        super().__init__()
        self._note, self._begun = note, False

    def on_epoch_begin(self, epoch, logs=None):
        if not self._begun:
            self._note(resumed=[epoch, _digest(self.model)])
        self._begun = True

    def on_epoch_end(self, epoch, logs=None):
        self._note(state=[epoch + 1, _digest(self.model)])


def _digest(model):
    return hashlib.sha256(b"".join(weight.numpy().tobytes() for weight in model.weights)).hexdigest()


def _epoch(model):
    """Epochs that a model has trained."""
    return int(model.optimizer.iterations.numpy()) // BATCHES


def noted(save, note, model):
    """A function that notes when a save is begun and when it is done."""

    def saved(*arguments, **options):
        begin = time.monotonic()
        note(begun=_epoch(model))
        save(*arguments, **options)
        note(done=_epoch(model), seconds=time.monotonic() - begin)

    return saved


def train(way, folder, note):
    """Starts a training, or goes on with it."""
    callback, model = WAYS[way](folder, killed_fits.net(WIDTH))
    if isinstance(callback, TrainingCheckpoint):
        with mock.patch.object(Store, "write", noted_write(note)):
            result = killed_fits.fit(model, "dataset", [Resumed(note), callback])
    else:
        callback._save_model = noted(callback._save_model, note, model)
        result = killed_fits.fit(model, "dataset", [Resumed(note), callback], _epoch(model))
    note(result=result)


def noted_write(note):
    """`Store.write` that notes when it begins and when it is done: it runs in a thread while the training goes on."""
    write = Store.write

    def saved(store, step, arrays, metadata):
        begin = time.monotonic()
        note(begun=step // BATCHES)
        size = write(store, step, arrays, metadata)
        note(done=step // BATCHES, seconds=time.monotonic() - begin)
        return size

    return saved


def training_checkpoint(folder, model):
    return TrainingCheckpoint(folder, every_seconds=None, every_epochs=1, keep=2), model


def weights(folder, model):
    path = folder / "net.weights.h5"
    if path.exists():
        model.optimizer.build(model.trainable_variables)  # or its state is not loaded
        model.load_weights(path)
    return keras.callbacks.ModelCheckpoint(path, save_weights_only=True), model


def whole_model(folder, model):
    path = folder / "net.keras"
    return keras.callbacks.ModelCheckpoint(path), keras.saving.load_model(path) if path.exists() else model


def backup(folder, model, **options):
    return keras.callbacks.BackupAndRestore(folder / "backup", **options), model


def checkpoint_manager(folder, model):
    model.optimizer.build(model.trainable_variables)
    saved = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    manager = tf.train.CheckpointManager(saved, folder / "checkpoints", max_to_keep=2)
    if manager.latest_checkpoint:
        saved.restore(manager.latest_checkpoint).assert_existing_objects_matched()

    class Manages(keras.callbacks.Callback):
        def _save_model(self):
            manager.save()

        def on_epoch_end(self, epoch, logs=None):
            self._save_model()

    return Manages(), model


WAYS = {
    "TrainingCheckpoint": training_checkpoint,
    "ModelCheckpoint, .weights.h5": weights,
    "ModelCheckpoint, .keras": whole_model,
    "BackupAndRestore": backup,
    "BackupAndRestore, double_checkpoint": partial(backup, double_checkpoint=True),
    "tf.train.CheckpointManager": checkpoint_manager,
}


def save_with_orbax(python, folder, note):
    """Becomes the script that saves with Orbax, which notes on its standard output."""
    os.dup2(note.args[0], 1)
    os.execv(python, [python, str(ORBAX), str(folder), str(WIDTH), str(EPOCHS)])


def kill_in_saves(train, folder):
    """Kills `train(folder, note)` in saves, starts it again, and returns what was found."""
    (folder / "whole").mkdir()
    notes, code = forked(partial(train, folder / "whole"))
    if code:
        raise AssertionError(f"Expected the training to end. Found code {code}.")
    whole = notes[-1]["result"]
    states = [each.get("state") or each["resumed"] for each in notes if "state" in each or "resumed" in each]
    seconds = sorted(each["seconds"] for each in notes if "done" in each)
    median_seconds = seconds[len(seconds) // 2]
    found = dict.fromkeys(("kills", "lost", "partly_read", "not_equal", "weights_not_equal"), 0)
    draw = random.Random(0)
    for turn in range(3 * PEER_KILLS):
        place = folder / str(turn)
        place.mkdir()
        epoch, after_seconds = 2 + turn % 2, draw.uniform(0, median_seconds)
        stop = partial(_when, epoch, after_seconds)
        notes, _ = forked(partial(train, place), stop)
        last = [each for each in notes if "begun" in each or "done" in each][-1]
        if "begun" in last:  # else the save was done before
            again, _ = forked(partial(train, place))
            count(found, last["begun"], again, states, whole)
        shutil.rmtree(place)
        if found["kills"] == PEER_KILLS:
            break
    return found | {"save_seconds": seconds}


def _when(epoch, seconds, note):
    return seconds if note.get("begun") == epoch else None


def count(found, begun, notes, states, whole):
    """Counts what a restart has found after a kill in the save `begun`."""
    resumed = next((each["resumed"] for each in notes if "resumed" in each), None)
    result = notes[-1].get("result") if notes else None
    found["kills"] += 1
    if resumed is None or resumed[0] < begun - 1:
        found["lost"] += 1
    elif resumed not in states:
        found["partly_read"] += 1
    else:
        found["not_equal"] += result != whole
        found["weights_not_equal"] += result is None or result["model"] != whole["model"]


def main():
    """Kills, prints and writes."""
    parser = harness.parser(__doc__)
    parser.add_argument("--orbax", required=True, metavar="PYTHON", help="of an environment with Orbax")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        calls = kill_at_calls(folder / "calls", 1)
        moments = kill_at_moments(folder / "moments", MOMENTS)
        fits = {
            "calls": killed_fits.kill(folder, "calls", 1),
            "moments": killed_fits.kill(folder, "moments", FIT_MOMENTS),
        }
        kills = sum(each["kills"] for kinds in fits.values() for each in kinds.values())
        print(
            f"killed after {calls['kills']} calls, at {moments['kills']} moments, and {kills} trainings: nothing lost"
        )
        ways = {way: partial(train, way) for way in WAYS} | {"Orbax, arrays": partial(save_with_orbax, options.orbax)}
        in_saves = {}
        for way, started in ways.items():
            place = folder / "peer"
            place.mkdir()
            in_saves[way] = kill_in_saves(started, place)
            print(way, {key: value for key, value in in_saves[way].items() if key != "save_seconds"}, flush=True)
            shutil.rmtree(place)
    document = {"calls": calls, "moments": moments, "fits": fits | {"kills": kills, "not_equal": 0}}
    document |= {"lost": 0, "partly_read": 0, "in_saves": in_saves}
    harness.write(options.results, harness.document(**document))


if __name__ == "__main__":
    main()
