"""Kills trainings with `fit` and TrainingCheckpoint, and checks that they go on bit for bit.

    python killed_fits.py FOLDER calls|moments N

`calls` kills after calls that change the disk, middles of writes included: after every Nth of CALLS. `moments` kills at
N seeded moments or a few more. Both do so with arrays and with a dataset, and start each training again, to be killed
again, until it ends. Prints a JSON line. Every start is a fork of this process, which has imported TensorFlow and never
runs it.
"""

import collections
import contextlib
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import sys
import time
from functools import partial
from pathlib import Path
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from saved_trainings import expect_no_leftovers, plain, small_blobs
from shimmed_disk import AMID, BEFORE, shimmed

from tfopt import checkpoint
from tfopt.callbacks import TrainingCheckpoint
from tfopt.checkpoint.folder.manifest import find_manifests
from tfopt.checkpoint.folder.reading import read
from tfopt.checkpoint.folder.store import Store

KEEP = 2
EPOCHS = 8
BATCHES = 5  # in an epoch
KINDS = ("arrays", "dataset")
AT_START = tuple(f"{call} lock" for call in ("open", "ftruncate", "half a write", "write"))
IN_SAVES = (
    *(f"{call} {file}" for file in ("#", "step") for call in ("open", "half a write", "write", "fsync", "replace")),
    *("fsync blobs", "fsync saved", "unlink #", "unlink step"),
)
CALLS = [("mkdir saved", 1), ("mkdir blobs", 1), *((call, 1) for call in AT_START)]
CALLS += random.Random(0).sample([*itertools.product(IN_SAVES, range(1, 6))], 5 * len(IN_SAVES))
"""Calls to kill after, one in each start: the kind, "#" for a file of arrays, and its number in that start."""

_random = np.random.default_rng(0)
X = _random.normal(size=(8 * BATCHES, 8)).astype("float32")
Y = _random.integers(2, size=len(X))  # nothing to learn: EarlyStopping stops it


def net(width=16):
    """A compiled net with all kinds of state, and a layer that does not train."""
    keras.utils.set_random_seed(5)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(width, activation="relu", trainable=False),
            layers.Dense(width, activation="relu"),
            layers.BatchNormalization(),
            layers.Dropout(0.3),
            layers.Dense(2),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"], jit_compile=False)
    return model


def fit(model, kind, callbacks, initial_epoch=0):
    """Trains; returns the digests of all variables, and the history."""
    data, options = (X, Y), {"batch_size": 8, "shuffle": True}
    if kind == "dataset":
        data = (tf.data.Dataset.from_tensor_slices(data).shuffle(len(X), seed=2).batch(8),)
        options = {"shuffle": False}  # it has been
    stops = keras.callbacks.EarlyStopping(patience=2, restore_best_weights=True)
    slows = keras.callbacks.ReduceLROnPlateau(patience=1, factor=0.5)
    history = model.fit(
        *data,
        epochs=EPOCHS,
        initial_epoch=initial_epoch,
        verbose=0,
        validation_data=(X[::-1], Y),
        callbacks=[stops, slows, *callbacks],
        **options,
    )
    return {**state_of(model), "history": history.history}


def state_of(model):
    """Digests of the weights and of the optimizer's variables, by name as in a checkpoint."""
    groups = {"model": model.variables, "optimizer": model.optimizer.variables}
    return {
        group: {f"{group}/{each.path}": digest(each.numpy()) for each in variables}
        for group, variables in groups.items()
    }


def digest(array):
    return hashlib.sha256(array.tobytes()).hexdigest()


class States(keras.callbacks.Callback):
    """Notes the state after each step and each epoch."""

    def __init__(self, note):
        super().__init__()
        self._note = note

    def on_train_batch_end(self, batch, logs=None):
        self._note_state(in_epoch=True)

    def on_epoch_end(self, epoch, logs=None):
        self._note_state(in_epoch=False, val_loss=logs["val_loss"])

    def _note_state(self, in_epoch, val_loss=None):
        step = int(self.model.optimizer.iterations.numpy())
        self._note(state=[step, in_epoch], digests=state_of(self.model), val_loss=val_loss)


class Steps(keras.callbacks.Callback):
    """Notes that a training begins, and each step, before it is saved."""

    def __init__(self, note, newest):
        super().__init__()
        self._note, self._newest = note, newest

    def on_train_begin(self, logs=None):
        self._note(step=self._newest)

    def on_train_batch_end(self, batch, logs=None):
        self._note(step=int(self.model.optimizer.iterations.numpy()))


def forked(body, stop=lambda note: None):
    """Runs `body(note)` in a fork; returns what it has noted, and how it ended: 0, 1 for an error, or SIGKILL.

    `stop` says of each note after how many seconds to kill the process, or None.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        _run(body, partial(_note, writer))
    os.close(writer)
    notes, is_killed = [], False
    with os.fdopen(reader) as lines:
        for line in lines:
            if not line.endswith("\n"):
                break
            notes.append(json.loads(line))
            seconds = None if is_killed else stop(notes[-1])
            if seconds is not None:
                time.sleep(seconds)
                os.kill(child, signal.SIGKILL)
                is_killed = True
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return notes, abs(status)


def _note(writer, **values):
    os.write(writer, json.dumps(values).encode() + b"\n")


def _run(body, note):
    code = 1
    try:
        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)
        body(note)
        code = 0
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
    os._exit(code)


def train(folder, kind, newest, kill_at, note):
    """Trains as far as it gets, and notes the result."""
    saving = TrainingCheckpoint(folder, every_steps=1, every_seconds=None, keep=KEEP, best=("val_loss", "min"))
    with small_blobs(), noting_saves(note), shimmed(folder, killing_at(kill_at, note)):
        note(result=fit(net(), kind, [Steps(note, newest), saving]))


@contextlib.contextmanager
def noting_saves(note):
    """Notes when a checkpoint is begun and when it is done: its step, whether it is within an epoch, and val_loss."""
    write = Store.write

    def noted(store, step, arrays, metadata):
        saved = [step, metadata["batch"] > 0, metadata["metrics"].get("val_loss")]
        note(begun=saved)
        size = write(store, step, arrays, metadata)
        note(done=saved)
        return size

    with mock.patch.object(Store, "write", noted):
        yield


def killing_at(call, note):
    """A shim that kills after a call, given as its kind and number; None for none."""
    count = collections.Counter()

    def on(name, moment, path, arguments):
        kind = f"{'half a ' * (name == 'write' and moment == AMID)}{name} {plain(path)}"
        count[kind] += moment != BEFORE
        if (kind, count[kind]) == call and moment != BEFORE:
            note(at=kind)
            os.kill(os.getpid(), signal.SIGKILL)

    return on


class Trained:
    """An uninterrupted training, without checkpoints: its result, and its state after each step."""

    def __init__(self, kind):
        notes, code = forked(lambda note: note(result=fit(net(), kind, [States(note)])))
        assert code == 0
        *states, last = notes
        self.result = last["result"]
        self.states = {tuple(each["state"]): each["digests"] for each in states}
        self.steps = max(step for step, _ in self.states)
        assert self.steps < EPOCHS * BATCHES, "EarlyStopping is to stop it"
        assert len({*self.result["history"]["learning_rate"]}) > 1, "ReduceLROnPlateau is to reduce it"


class Folder:
    """What must be in a training's folder, by what was noted."""

    def __init__(self, folder, trained):
        self.path, self._trained = folder, trained
        self._done = []

    @property
    def newest(self):
        """The last step saved; 0 for none."""
        return self._done[-1][0] if self._done else 0

    def check(self, notes):
        """Fails unless all that was saved is there, and all that is there is whole and right."""
        self._done += [each["done"] for each in notes if "done" in each]
        begun = next((each["begun"] for each in reversed(notes) if "begun" in each), None)
        found = read(self.path)
        if found is not None:
            assert not found.passed_over
            newest = [found.step, found.metadata["batch"] > 0, found.metadata["metrics"].get("val_loss")]
            if not self._done or newest != self._done[-1]:
                assert newest == begun, (newest, begun, self._done)
                self._done.append(newest)
            report = checkpoint.verify(self.path)
            assert report.passed, str(report)
        manifests = find_manifests(self.path)
        steps = [each.step for each in manifests]
        assert self._required() <= {*steps}, (self._done, steps)
        for step in steps:
            self._expect_right(read(self.path, step))

    def _required(self):
        """The steps that must be there: the newest ones, and the one with the best metric."""
        newest = list(dict.fromkeys(step for step, _, _ in reversed(self._done)))[:KEEP]
        best = min(((loss, step) for step, _, loss in self._done if loss is not None), default=(0, None))[1]
        return {*newest, best} - {None}

    def _expect_right(self, found):
        """Fails unless a checkpoint holds what the uninterrupted training had at its step."""
        expected = self._trained.states[found.step, found.metadata["batch"] > 0]
        for group, digests in expected.items():
            assert {
                name: digest(array) for name, array in found.arrays.items() if name.startswith(f"{group}/")
            } == digests, (found.step, group)


def train_to_the_end(path, kind, trained, killed):
    """Trains, and starts again after each kill, until the training ends; returns where it was killed.

    `killed(newest)` returns, for each start, the call to kill at and the function `stop` of `forked`.
    """
    folder, kills = Folder(path, trained), []
    for start in range(100):
        call, stop = killed(folder.newest)
        where = f"start {start + 1} from step {folder.newest}, to be killed at call {call}, after {kills}"
        notes, code = forked(partial(train, path, kind, folder.newest, call), stop)
        try:
            assert code in (0, signal.SIGKILL), code
            folder.check(notes)
            if code == 0:
                assert notes[-1]["result"] == trained.result
                expect_no_leftovers(path)
                shutil.rmtree(path)
                return kills
        except BaseException as error:
            raise AssertionError(where) from error
        kills.append(next((each["at"] for each in notes if "at" in each), f"after step {notes[-1].get('step')}"))
    raise AssertionError("It does not end")


def kill_at_calls(path, kind, every):
    trained, kills, trainings = Trained(kind), [], 0
    left = collections.deque(CALLS[::every])
    while left:
        kills += train_to_the_end(path, kind, trained, lambda newest: (left.popleft() if left else None, _never))
        trainings += 1
    return {"kills": len(kills), "trainings": trainings, "after": dict(sorted(collections.Counter(kills).items()))}


def _never(note):
    return None


def kill_at_moments(path, kind, least):
    trained, kills, seed = Trained(kind), 0, 0
    begin = time.monotonic()
    train_to_the_end(path, kind, trained, lambda newest: (None, _never))
    step_seconds = (time.monotonic() - begin) / trained.steps  # the start included
    while kills < least:
        draw = random.Random(seed)

        def killed(newest, draw=draw):
            # Past the last step nothing is killed, or a training whose last step is saved might never end.
            step, seconds = draw.randint(newest, trained.steps + 3), draw.uniform(0, step_seconds)
            return None, lambda note: seconds if note.get("step", -1) >= step else None

        kills += len(train_to_the_end(path, kind, trained, killed))
        seed += 1
    return {"kills": kills, "trainings": seed}


def kill(folder, which, number):
    """Kills at "calls" or "moments", with each kind of data; returns what was done."""
    how = {"calls": kill_at_calls, "moments": kill_at_moments}[which]
    return {kind: how(Path(folder).resolve() / "saved", kind, number) for kind in KINDS}


if __name__ == "__main__":
    print(json.dumps(kill(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
