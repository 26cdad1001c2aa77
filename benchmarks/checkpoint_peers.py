"""Saving and restoring a training of 384 MiB: TrainingCheckpoint beside TensorFlow, Keras and Orbax.

    python -m venv ORBAX && ORBAX/bin/pip install -r benchmarks/peers/requirements-orbax.txt
    python benchmarks/checkpoint_peers.py [RESULTS.json] [--orbax ORBAX/bin/python] [--smoke]

First, each way must restore what it saved. Then each turn trains for the same number of steps twice, saves after each
time, and restores the last save; the ways alternate. Orbax saves a JAX training of the same size in its own process,
which is idle otherwise; without `--orbax` it is left out. Times in milliseconds:

- blocked: how much longer the steps after a save took, the save included, than those before it
- call: how long training stopped for it
- safe: from the last step until the last save is on disk, with no training alongside
- restore: into a built model and its optimizer, with the files in the page cache; cold: from disk

Files go to the temporary folder (`TMPDIR`). The goals: blocked and call at most 0.15 of tf.train.Checkpoint's and 1.0
of Orbax's; a save with 90 % of the weights frozen writes at most 0.15 of a full one; restoring takes at most as long as
the fastest of the others. On two CPU cores two goals are not met: blocked against tf.train.Checkpoint, and restore from
the page cache; docs/checkpoints.md has the figures.
"""

import json
import os
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path

import harness
import keras
import numpy as np
import tensorflow as tf

from tfopt.callbacks import TrainingCheckpoint
from tfopt.checkpoint import restore
from tfopt.files import sync
from tfopt.measure import compare, interleave
from tfopt.measure.timers import wait

WIDTH, OUTPUTS = 3886, 863
"""Of the layers: with Adam's two slots, 384 MiB; the first two layers hold 90 % of the weights."""
STEPS = 16
"""Training steps between two saves: long enough for a save's background work to finish."""
EXAMPLES = 16
"""In a batch."""
_FROZEN = 2  # layers
ORBAX = "Orbax, asynchronous"
FIELDS = ("blocked", "call", "safe", "restore", "restore_cold")
REPEATS = 7
LEAST_MS = 1.0  # floor for a difference, which noise can make negative


class _TensorFlowCheckpoint(keras.callbacks.Callback):
    """Saves the model and its optimizer with `tf.train.Checkpoint` after each epoch."""

    def __init__(self, folder):
        super().__init__()
        self._folder = folder

    def on_train_begin(self, logs=None) -> None:
        """Makes the manager of the folder."""
        state = tf.train.Checkpoint(model=self.model, optimizer=self.model.optimizer)
        self._manager = tf.train.CheckpointManager(state, self._folder, max_to_keep=3)

    def on_epoch_end(self, epoch: int, logs=None) -> None:
        """Saves."""
        self._manager.save()


def _restore_tensorflow(net: keras.Model, folder: Path) -> keras.Model:
    state = tf.train.Checkpoint(model=net, optimizer=net.optimizer)
    state.restore(tf.train.latest_checkpoint(folder)).assert_existing_objects_matched()
    return net


def _restore_tfopt(net: keras.Model, folder: Path) -> keras.Model:
    restore(net, folder)
    return net


def _restore_weights(net: keras.Model, folder: Path) -> keras.Model:
    net.load_weights(_last(folder))
    return net


def _restore_keras(net: keras.Model, folder: Path) -> keras.Model:
    return keras.saving.load_model(_last(folder))  # load_weights takes longer for this format


def _restore_backup(net: keras.Model, folder: Path) -> keras.Model:
    callback = keras.callbacks.BackupAndRestore(folder, delete_checkpoint=False)
    callback.set_model(net)
    callback.on_train_begin()
    net._initial_epoch = None  # or the next fit begins there
    return net


def _last(folder: Path) -> Path:
    return max(folder.iterdir(), key=os.path.getmtime)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to save a training."""

    callbacks: Callable[[Path], list[keras.callbacks.Callback]]
    """Makes what saves to a folder after each epoch."""
    restore: Callable[[keras.Model, Path], keras.Model]
    """Restores the last save into a built model and its optimizer, and returns it; `.keras` returns a new model."""


TFOPT = "TrainingCheckpoint"
WAYS: dict[str, Way] = {
    "tf.train.Checkpoint": Way(
        callbacks=lambda folder: [_TensorFlowCheckpoint(folder)],
        restore=_restore_tensorflow,
    ),
    ".keras": Way(
        callbacks=lambda folder: [keras.callbacks.ModelCheckpoint(folder / "{epoch}.keras")],
        restore=_restore_keras,
    ),
    ".weights.h5": Way(
        callbacks=lambda folder: [
            keras.callbacks.ModelCheckpoint(folder / "{epoch}.weights.h5", save_weights_only=True)
        ],
        restore=_restore_weights,
    ),
    TFOPT: Way(
        callbacks=lambda folder: [TrainingCheckpoint(folder, every_epochs=1, every_seconds=None)],
        restore=_restore_tfopt,
    ),
    "BackupAndRestore": Way(
        callbacks=lambda folder: [keras.callbacks.BackupAndRestore(folder, delete_checkpoint=False)],
        restore=_restore_backup,
    ),
}
NO_SAVE = Way(callbacks=lambda folder: [], restore=lambda net, folder: net)


def built_net() -> keras.Model:
    """Returns the model with its optimizer's slots, always from the same weights."""
    keras.utils.set_random_seed(0)
    layers = keras.layers
    hidden = [layers.Dense(WIDTH, activation="relu") for _ in range(2)]
    net = keras.Sequential([keras.Input((WIDTH,)), *hidden, layers.Dense(OUTPUTS)])
    net.compile("adam", "mse")
    net.optimizer.build(net.trainable_variables)
    return net


def _dataset() -> tf.data.Dataset:
    random = np.random.default_rng(0)
    batch = random.random((EXAMPLES, WIDTH), "float32"), random.random((EXAMPLES, OUTPUTS), "float32")
    return tf.data.Dataset.from_tensors(batch).repeat()


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveTimes:
    """What one training with saves took, in milliseconds."""

    without_save_ms: float
    """All steps of an epoch."""
    with_save_ms: float
    """The same number of steps, and the save before them."""
    call_ms: float
    """How long training stopped for that save."""
    safe_ms: float
    """From the last step until `fit` has returned and the save is on disk, with no training alongside."""


class _Marks(keras.callbacks.Callback):
    """Reads the clock when each step begins and ends."""

    def __init__(self, clock: Callable[[], float]):
        super().__init__()
        self._clock = clock
        self.begun: list[float] = []
        self.ended: list[float] = []

    def on_train_batch_begin(self, batch: int, logs=None) -> None:
        self.begun.append(self._clock())

    def on_train_batch_end(self, batch: int, logs=None) -> None:
        wait()
        self.ended.append(self._clock())


def save_times(
    net: keras.Model, way: Way, steps: int, folder: Path, clock: Callable[[], float] = time.perf_counter
) -> SaveTimes:
    """Trains two epochs of `steps` steps each, with a save to an empty folder after each."""
    marks = _Marks(clock)
    _fit(net, [marks, *way.callbacks(folder)], steps, 0, 2)
    flush(folder)
    end = clock()
    before, after = marks.ended[:steps], marks.ended[steps:]
    step = (before[-1] - marks.begun[1]) / (steps - 1) if steps > 1 else before[0] - marks.begun[0]
    return SaveTimes(
        without_save_ms=1000 * steps * step,
        with_save_ms=1000 * (after[-1] - before[-1]),
        call_ms=1000 * (marks.begun[steps] - before[-1]),
        safe_ms=1000 * (end - after[-1]),
    )


def _fit(net: keras.Model, callbacks: list[keras.callbacks.Callback], steps: int, first: int, end: int) -> None:
    """Trains the epochs from `first` to `end`, of `steps` steps each."""
    epochs = {"initial_epoch": first, "epochs": end, "steps_per_epoch": steps}
    net.fit(_dataset(), **epochs, callbacks=callbacks, shuffle=False, verbose=0)


def flush(folder: Path) -> None:
    """Waits until what is in a folder is on the disk."""
    for path in (*folder.rglob("*"), folder):
        sync(path)


def restore_ms(way: Way, net: keras.Model, folder: Path, clock: Callable[[], float] = time.perf_counter) -> float:
    """Times a restore; the files may still be in the page cache."""
    wait()
    started = clock()
    way.restore(net, folder)
    wait()
    return 1000 * (clock() - started)


def written_mib(net: keras.Model, way: Way, folder: Path) -> tuple[float, float]:
    """Returns what two saves write to an empty folder: of the whole net, and after only its last layer has trained."""
    _fit(net, way.callbacks(folder), 1, 0, 1)
    before = _files(folder)
    for layer in net.layers[:_FROZEN]:
        layer.trainable = False
    net.compile(net.optimizer, net.loss)  # the optimizer keeps the slots of the frozen layers
    _fit(net, way.callbacks(folder), 1, 1, 2)
    after = _files(folder)
    return _mib(before), _mib({path: found for path, found in after.items() if before.get(path) != found})


def _files(folder: Path) -> dict[Path, tuple[int, int, int]]:
    found = {path: path.stat() for path in folder.rglob("*") if path.is_file()}
    return {path: (each.st_size, each.st_mtime_ns, each.st_ino) for path, each in found.items()}


def _mib(files: dict[Path, tuple[int, int, int]]) -> float:
    return sum(size for size, *_ in files.values()) / 2**20


def require_restored(name: str, way: Way) -> None:
    """Raises RuntimeError unless a way restores a trained model and its optimizer, bit for bit."""
    net = built_net()
    with tempfile.TemporaryDirectory() as folder:
        _fit(net, way.callbacks(Path(folder)), 1, 0, 1)
        restored = way.restore(built_net(), Path(folder))
    saved, found = ((*each.variables, *each.optimizer.variables) for each in (net, restored))
    if len(saved) != len(found) or not all(map(np.array_equal, saved, found)):
        raise RuntimeError(f"Expected {name} to restore what it saved. It differs.")


class Orbax:
    """A process that trains in JAX and saves with Orbax."""

    def __init__(self, python, steps):
        script = Path(__file__).parent / "peers" / "orbax_checkpoint.py"
        sizes = (WIDTH, OUTPUTS, EXAMPLES, steps)
        self._process = subprocess.Popen(
            [python, script, *map(str, sizes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )
        self.about = self._answer()

    def ask(self, what):
        """Makes it train, restore or write, and returns what it measured."""
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self):
        """Ends it."""
        self._process.stdin.close()
        self._process.wait()

    def _answer(self):
        line = self._process.stdout.readline()
        if not line:
            python, script, *_ = self._process.args
            raise RuntimeError(
                f"Expected an answer from {script}. It exited with {self._process.wait()}. Check the packages in the "
                f"environment of {python}."
            )
        return json.loads(line)


def of_orbax(orbax):
    """Returns the times of one Orbax turn, in ms."""
    found = orbax.ask("train")
    found["restore_ms"] = orbax.ask("restore")
    forget(Path(orbax.about["folder"]))
    return found | {"restore_cold_ms": orbax.ask("restore")}


def of_way(way, net, steps):
    """Returns the times of one turn, in ms."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = asdict(save_times(net, way, steps, folder))
        found["restore_ms"] = restore_ms(way, net, folder)
        forget(folder)
        return found | {"restore_cold_ms": restore_ms(way, net, folder)}


def forget(folder):
    """Drops a folder's files from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def figures(turns):
    """The times of each field, and the ratios of tfopt's to the others', each with its interval."""
    times = {name: {field: _times(of, field) for field in FIELDS} for name, of in turns.items()}
    ratios = {field: {} for field in FIELDS}
    for name, of in times.items():
        for field in FIELDS if name != TFOPT else ():
            found = compare(times[TFOPT][field], of[field])
            ratios[field][name] = {"ratio": found.ratio, "interval": found.interval}
    return {
        "times": {name: {field: each.to_dict() for field, each in of.items()} for name, of in times.items()},
        "ratios": ratios,
    }


def _times(turns, field):
    if field == "blocked":
        values = [max(LEAST_MS, turn["with_save_ms"] - turn["without_save_ms"]) for turn in turns]
    else:
        values = [turn[f"{field}_ms"] for turn in turns]
    return harness.one_sample(*values)


def written(orbax):
    """MiB that each way writes: whole, and with 90 % of the weights frozen."""
    found = {ORBAX: orbax.ask("written")} if orbax else {}
    for name, way in WAYS.items():
        with tempfile.TemporaryDirectory() as folder:
            found[name] = written_mib(built_net(), way, Path(folder))
    return found


def show(found, sizes):
    """Prints a table."""
    print(f"{'':22}" + "".join(f"{field:>22}" for field in FIELDS) + f"{'MiB':>8}{'frozen':>8}")
    for name, of in found["times"].items():
        cells = []
        for field in FIELDS:
            ratio = "" if name == TFOPT else f" ({found['ratios'][field][name]['ratio']:.2f})"
            cells.append(f"{of[field]['median_ms']:,.0f}{ratio}")
        print(f"{name:22}" + "".join(f"{cell:>22}" for cell in cells) + "".join(f"{mib:8.1f}" for mib in sizes[name]))
    print(f"In brackets: {TFOPT}'s time over this one.")


def measure(orbax, steps, repeats, keep):
    """Measures all ways, alternating; after each turn `keep` receives everything measured so far."""
    net = built_net()
    ways = {name: lambda way=way: of_way(way, net, steps) for name, way in WAYS.items()}
    if orbax:
        ways[ORBAX] = lambda: of_orbax(orbax)
    turns = defaultdict(list)

    def turn(name):
        turns[name].append(ways[name]())
        return harness.one_sample(turns[name][-1]["with_save_ms"])

    def done(name, number):
        print(f"turn {number + 1}, {name}: {turns[name][-1]}", flush=True)
        if name == [*ways][-1]:  # the last of a turn
            keep(turns)

    of_way(NO_SAVE, net, 1)  # compiles
    interleave({name: lambda name=name: turn(name) for name in ways}, repeats, on_progress=done)


def main():
    """Measures, prints and writes."""
    global WIDTH, OUTPUTS
    parser = harness.parser(__doc__)
    parser.add_argument("--orbax", metavar="PYTHON", help="of an environment with Orbax")
    parser.add_argument("--smoke", action="store_true", help="only show that it works: a tiny state, one turn")
    options = parser.parse_args()
    steps, repeats = STEPS, REPEATS
    if options.smoke:
        WIDTH, OUTPUTS, steps, repeats = 40, 9, 2, 1
    for name, way in WAYS.items():
        require_restored(name, way)
    with ExitStack() as stack:
        orbax = stack.enter_context(closing(Orbax(options.orbax, steps))) if options.orbax else None
        document = harness.document(orbax=orbax and orbax.about["versions"], steps=steps, written_mib=written(orbax))

        def keep(turns):
            document.update(figures(turns), turns=dict(turns))
            harness.write(options.results, document)

        measure(orbax, steps, repeats, keep)
    show(document, document["written_mib"])


if __name__ == "__main__":
    main()
