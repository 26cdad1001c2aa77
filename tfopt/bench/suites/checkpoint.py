"""Saving a training after each epoch and restoring it: TrainingCheckpoint against what TensorFlow and Keras offer.

The state is three dense layers and Adam, 384 MiB. Files go to the temporary folder (`TMPDIR`).
"""

import os
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfopt.bench.cases import Case, Scale, Timer, Variant
from tfopt.bench.results import Check
from tfopt.callbacks import TrainingCheckpoint
from tfopt.checkpoint import restore
from tfopt.files import sync
from tfopt.measure import StepTimes
from tfopt.measure.timers import wait

WIDTH, OUTPUTS = 3886, 863
"""Of the layers: with Adam's two slots, 384 MiB; the first two layers hold 90 % of the weights."""
STEPS = 16
"""Training steps between two saves: long enough for a save's background work to finish."""
EXAMPLES = 16
"""In a batch."""
_FROZEN = 2  # layers


class _TensorFlowCheckpoint(keras.callbacks.Callback):
    """Saves the model and its optimizer with `tf.train.Checkpoint` after each epoch."""

    def __init__(self, folder: Path):
        super().__init__()
        self._folder = folder

    def on_train_begin(self, logs: Any = None) -> None:
        """Makes the manager of the folder."""
        state = tf.train.Checkpoint(model=self.model, optimizer=self.model.optimizer)
        self._manager = tf.train.CheckpointManager(state, self._folder, max_to_keep=3)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
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


def _last(folder: Path) -> Path:
    return max(folder.iterdir(), key=os.path.getmtime)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to save a training."""

    note: str
    """What it is, in a few words."""
    callbacks: Callable[[Path], list[keras.callbacks.Callback]]
    """Makes what saves to a folder after each epoch."""
    restore: Callable[[keras.Model, Path], keras.Model]
    """Restores the last save into a built model and its optimizer, and returns it; `.keras` returns a new model."""


TFOPT = "TrainingCheckpoint"
WAYS: dict[str, Way] = {
    "tf.train.Checkpoint": Way(
        note="model and optimizer, CheckpointManager",
        callbacks=lambda folder: [_TensorFlowCheckpoint(folder)],
        restore=_restore_tensorflow,
    ),
    ".keras": Way(
        note="ModelCheckpoint, load_model",
        callbacks=lambda folder: [keras.callbacks.ModelCheckpoint(folder / "{epoch}.keras")],
        restore=_restore_keras,
    ),
    ".weights.h5": Way(
        note="ModelCheckpoint, load_weights",
        callbacks=lambda folder: [
            keras.callbacks.ModelCheckpoint(folder / "{epoch}.weights.h5", save_weights_only=True)
        ],
        restore=_restore_weights,
    ),
    TFOPT: Way(
        note="tfopt.callbacks.TrainingCheckpoint",
        callbacks=lambda folder: [TrainingCheckpoint(folder, every_epochs=1, every_seconds=None)],
        restore=_restore_tfopt,
    ),
}
NO_SAVE = Way(note="the training alone", callbacks=lambda folder: [], restore=lambda net, folder: net)


def cases(scale: Scale) -> list[Case]:
    """Lists the cases, which are of one size."""
    return [
        Case(
            suite="checkpoint",
            workload="training with saves",
            question="How much longer does a training take with a save, and what does a save write?",
            unit=f"{STEPS} steps with a save",
            variants=_variants({"no save": NO_SAVE} | WAYS, partial(_save_timer, STEPS, "with_save_ms"), _saved),
            judge=_same_state,
        ),
        Case(
            suite="checkpoint",
            workload="save",
            question="How long does training stop for a save?",
            unit="save",
            variants=_variants(WAYS, partial(_save_timer, 2, "call_ms")),
        ),
        Case(
            suite="checkpoint",
            workload="restore",
            question="How long does restoring a built model and its optimizer take?",
            unit="restore",
            variants=_variants(WAYS, _restore_timer),
        ),
    ]


def _variants(
    ways: Mapping[str, Way],
    timer: Callable[[Way, ExitStack], Timer],
    values: Callable[[Way], Sequence[float]] | None = None,
) -> list[Variant]:
    return [
        Variant(name=name, note=way.note, timer=partial(timer, way), values=values and partial(values, way))
        for name, way in ways.items()
    ]


def built_net() -> keras.Model:
    """Returns the model with its optimizer's slots, always from the same weights."""
    keras.utils.set_random_seed(0)
    layers = keras.layers
    hidden = [layers.Dense(WIDTH, activation="relu") for _ in range(2)]
    net = keras.Sequential([keras.Input((WIDTH,)), *hidden, layers.Dense(OUTPUTS)])
    net.compile("adam", "mse")
    net.optimizer.build(net.trainable_variables)
    return net


_net = cache(built_net)  # shared by all timers of a process: one state per timer may not fit in memory


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

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.begun.append(self._clock())

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
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


def _fit(net: keras.Model, callbacks: Sequence[keras.callbacks.Callback], steps: int, first: int, end: int) -> None:
    """Trains the epochs from `first` to `end`, of `steps` steps each."""
    epochs = {"initial_epoch": first, "epochs": end, "steps_per_epoch": steps}
    net.fit(_dataset(), **epochs, callbacks=callbacks, shuffle=False, verbose=0)


def flush(folder: Path) -> None:
    """Waits until what is in a folder is on the disk."""
    for path in (*folder.rglob("*"), folder):
        sync(path)


def _save_timer(steps: int, field: str, way: Way, stack: ExitStack) -> Timer:
    net = _net()
    started = time.perf_counter()
    _fit(net, [], 1, 0, 1)
    first = time.perf_counter() - started

    def timed() -> StepTimes:
        with tempfile.TemporaryDirectory() as folder:
            return one_sample(getattr(save_times(net, way, steps, Path(folder)), field), first)

    return timed


def _restore_timer(way: Way, stack: ExitStack) -> Timer:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    net = _net()
    _fit(net, way.callbacks(folder), 1, 0, 1)
    first = restore_ms(way, net, folder) / 1000
    return lambda: one_sample(restore_ms(way, net, folder), first)


def restore_ms(way: Way, net: keras.Model, folder: Path, clock: Callable[[], float] = time.perf_counter) -> float:
    """Times a restore; the files may still be in the page cache."""
    wait()
    started = clock()
    way.restore(net, folder)
    wait()
    return 1000 * (clock() - started)


def one_sample(ms: float, first_seconds: float) -> StepTimes:
    """Returns one sample as `StepTimes`."""
    return StepTimes(repeats_ms=((ms,),), steps_per_sample=1, first_step_seconds=first_seconds)


def _saved(way: Way) -> Sequence[float]:
    """MiB of a whole save and of one with 90 % of the weights frozen, and checksums of what is restored."""
    with tempfile.TemporaryDirectory() as folder:
        written = written_mib(built_net(), way, Path(folder))
    net = built_net()
    with tempfile.TemporaryDirectory() as folder:
        _fit(net, way.callbacks(Path(folder)), 1, 0, 1)
        restored = way.restore(net if way is NO_SAVE else built_net(), Path(folder))
    state = (*restored.variables, *restored.optimizer.variables)
    return [*written, *(float(zlib.crc32(keras.ops.convert_to_numpy(variable).tobytes())) for variable in state)]


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


def _mib(files: Mapping[Path, tuple[int, int, int]]) -> float:
    return sum(size for size, *_ in files.values()) / 2**20


def _same_state(baseline: Sequence[float], values: Sequence[float]) -> Check:
    """Judges what was restored, which must be what the training without saves ended with."""
    full, frozen, *checksums = values
    return Check(
        what=(
            "MiB of a full save, and with 90 % of the weights frozen; checksums of the restored state equal those "
            "without saves"
        ),
        values=tuple(values),
        passed=checksums == list(baseline[2:]),
        text=f"{full:,.0f} MiB, then {frozen:,.0f}",
    )
