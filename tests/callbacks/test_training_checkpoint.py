"""When TrainingCheckpoint saves, and what it refuses; tests/checkpoint shows that a training goes on exactly."""

import csv
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time

import keras
import numpy as np
import pytest
import resumed_fits
import tensorflow as tf
from resumed_fits import BATCH, EPOCHS, Case, Interrupt, X, Y, dense_net

from tfopt import checkpoint
from tfopt.callbacks import LocalSteps, ThroughputLogger, TrainingCheckpoint, UtilizationLogger
from tfopt.callbacks.shared.running_fit import RESUMED
from tfopt.checkpoint.folder.reading import read
from tfopt.checkpoint.folder.store import Store
from tfopt.checkpoint.signals import Signals
from tfopt.errors import CheckpointError, UnsupportedError

pytestmark = pytest.mark.usefixtures("fresh_warnings", "disk_that_syncs_at_once")
STEPS = 7  # of an epoch


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "saved"


def net(**options):
    keras.backend.clear_session()  # so that the layers get the same names as in another process
    keras.utils.set_random_seed(5)
    model = dense_net()
    model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy", jit_compile=False, **options)
    return model


def fit(model, *callbacks, data=(X, Y), epochs=2, **options):
    given = (
        {"x": data[0], "y": data[1], "batch_size": BATCH} if isinstance(data, tuple) else {"x": data, "shuffle": False}
    )
    return model.fit(epochs=epochs, verbose=0, callbacks=list(callbacks), **(given | options))


def steps(folder):
    """The steps of the checkpoints in a folder, the newest first."""
    return [each.step for each in checkpoint.available(folder)]


class Seen(keras.callbacks.Callback):
    """Notes the steps that a training runs, and calls a function in each."""

    def __init__(self, call=lambda step: None):
        super().__init__()
        self.steps, self._call = [], call

    def on_train_batch_end(self, batch, logs=None):
        self.steps.append((self._epoch, batch))
        self._call(len(self.steps))

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch


def interrupt(folder, *place, **options):
    """Ends a training by SIGTERM at an epoch's step."""
    with pytest.raises(SystemExit):
        fit(net(), TrainingCheckpoint(folder), Interrupt("step", *place), **options)


def resume(folder, *callbacks, model=None, **options):
    """The steps that a training from a folder's checkpoint runs, as epoch and step."""
    seen = Seen()
    fit(model or net(), seen, *callbacks, TrainingCheckpoint(folder), **options)
    return seen.steps


# When it saves.


@pytest.mark.slow
def test_the_end_is_saved_by_default(folder):
    fit(net(), TrainingCheckpoint(folder))
    assert steps(folder) == [2 * STEPS]
    assert checkpoint.verify(folder).passed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "saved"),
    [
        ({"every_steps": 5, "keep": 9}, [14, 10, 5]),
        ({"every_epochs": 1, "keep": 9}, [14, 7]),
        ({"every_epochs": 1}, [14, 7]),
        ({"every_epochs": 1, "keep": 1}, [14]),
        ({"every_epochs": 2, "every_steps": 4, "keep": 2}, [14, 12]),
    ],
)
def test_saves_as_often_as_asked(folder, options, saved, monkeypatch):
    from tfopt.checkpoint.saver import Saver

    monkeypatch.setattr(Saver, "is_free", lambda self: self.wait())  # no checkpoint comes late
    fit(net(), TrainingCheckpoint(folder, every_seconds=None, **options))
    assert steps(folder) == saved


@pytest.mark.slow
def test_saves_after_some_time(folder, set_clock):
    # The clock is read at the begin, after each step, and after each checkpoint.
    set_clock(itertools.count(step=11).__next__, TrainingCheckpoint)
    fit(net(), TrainingCheckpoint(folder, every_seconds=100, keep=99), epochs=1)
    assert len(steps(folder)) > 1
    assert max(np.diff(sorted([0, *steps(folder)]))) <= 10


@pytest.mark.slow
def test_the_best_epoch_stays(folder):
    values = iter([0.5, 0.1, 0.7, 0.8])

    class Rated(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["rated"] = next(values)

    fit(net(), Rated(), TrainingCheckpoint(folder, best=("rated", "min"), keep=1), epochs=4)
    found = checkpoint.available(folder)
    assert [(each.step, each.best) for each in found] == [(28, False), (14, True)]
    assert found[1].metadata["metrics"]["rated"] == 0.1


@pytest.mark.slow
def test_a_best_metric_that_is_not_there_is_warned_of(folder, caplog):
    fit(net(), TrainingCheckpoint(folder, best=("los", "min")))
    assert "Expected the metric 'los' of `best` in the epoch's logs. Found: loss." in caplog.text


@pytest.mark.slow
def test_a_slow_disk_does_not_hold_the_training_up(folder, monkeypatch):
    free, write = threading.Event(), Store.write
    monkeypatch.setattr(Store, "write", lambda *arguments: free.wait(60) and write(*arguments))
    seen = Seen(lambda step: free.set() if step == 13 else None)
    fit(net(), seen, TrainingCheckpoint(folder, every_steps=2, every_seconds=None, keep=99))
    assert len(seen.steps) == 2 * STEPS
    assert steps(folder)[0] == 14
    assert steps(folder)[-1] == 2
    assert not {4, 6, 8, 10, 12} & {*steps(folder)}


@pytest.mark.slow
def test_fit_ends_only_when_the_last_checkpoint_is_safe(folder, monkeypatch):
    write = Store.write
    monkeypatch.setattr(Store, "write", lambda *arguments: time.sleep(0.3) or write(*arguments))
    fit(net(), TrainingCheckpoint(folder))
    assert read(folder).step == 2 * STEPS
    Store(folder).close()  # and its folder is free


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "jit_compile"), [("adam", True), ("sgd", False), ("adagrad", True)])
def test_a_copy_is_saved_while_the_training_goes_on(folder, monkeypatch, optimizer, jit_compile):
    """Each checkpoint holds the values of its step, though they are written later, when the training has gone on."""
    go, write, values = threading.Event(), Store.write, {}
    monkeypatch.setattr(Store, "write", lambda *arguments: go.wait(60) and write(*arguments))
    layers = keras.layers
    embedded = [keras.Input((6,)), layers.Embedding(20, 4), layers.Flatten()]  # whose updates are sparse
    model = keras.Sequential([*embedded, layers.BatchNormalization(), layers.Dense(1)])
    model.compile(optimizer, "mse", jit_compile=jit_compile)

    def note(step):
        values[step] = [variable.numpy() for variable in (*model.variables, *model.optimizer.variables)]
        if step == 6:
            go.set()

    numbers = np.random.default_rng(1).integers(20, size=(50, 6))
    fit(model, Seen(note), TrainingCheckpoint(folder, every_steps=3, keep=99), data=(numbers, Y), epochs=1)
    arrays = read(folder, 3).arrays
    saved = [arrays[name] for name in arrays if name.startswith(("model/", "optimizer/"))]
    assert len(saved) == len(values[3]) > 6
    assert all(map(np.array_equal, saved, values[3]))
    assert not any(np.array_equal(*pair) for pair in zip(saved[:3], values[4][:3], strict=True))


# How it goes on.


@pytest.mark.slow
def test_an_ended_training_is_not_repeated(folder, capsys):
    model = net()
    history = fit(model, TrainingCheckpoint(folder)).history
    other, seen = net(), Seen()
    again = other.fit(X, Y, batch_size=BATCH, epochs=2, verbose=2, callbacks=[seen, TrainingCheckpoint(folder)])
    assert seen.steps == []
    assert again.history == history
    assert all(map(np.array_equal, model.get_weights(), other.get_weights()))
    assert f"Training already complete: restored its final state, step 14 in '{folder}'." in capsys.readouterr().out


@pytest.mark.slow
def test_more_epochs_go_on(folder):
    whole = fit(net(), epochs=4).history
    fit(net(), TrainingCheckpoint(folder))
    assert fit(net(), TrainingCheckpoint(folder), epochs=4).history == whole


@pytest.mark.slow
def test_a_training_that_was_stopped_early_has_ended(folder):
    def stopping():
        return keras.callbacks.EarlyStopping(monitor="loss", patience=1, min_delta=99)

    fit(net(), stopping(), TrainingCheckpoint(folder), epochs=9)
    assert resume(folder, stopping(), epochs=9) == []


class Stop(keras.callbacks.Callback):
    """Stops the training at a step."""

    def __init__(self, epoch, batch):
        super().__init__()
        self._at, self._epoch = (epoch, batch), 0

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self._epoch, batch) == self._at:
            self.model.stop_training = True


@pytest.mark.slow
def test_one_that_was_stopped_within_an_epoch_goes_on_there(folder):
    whole_model = net()
    whole = fit(whole_model, epochs=3, validation_data=(X[:9], Y[:9])).history
    fit(net(), Stop(1, 2), TrainingCheckpoint(folder), epochs=3, validation_data=(X[:9], Y[:9]))
    assert steps(folder)[0] == STEPS + 3
    model, seen = net(), Seen()
    again = fit(model, seen, TrainingCheckpoint(folder), epochs=3, validation_data=(X[:9], Y[:9])).history
    assert seen.steps[0] == (1, 3)
    assert again == whole
    assert all(map(np.array_equal, model.get_weights(), whole_model.get_weights()))


@pytest.mark.slow
@pytest.mark.parametrize("step", [2, STEPS - 1])
def test_one_that_was_stopped_for_a_loss_of_nan_goes_on_before_that(folder, step):
    """However often it is started again."""
    y = Y.copy()
    y[step * BATCH] = np.nan
    for _ in range(3):
        stop = keras.callbacks.TerminateOnNaN()
        fit(net(), TrainingCheckpoint(folder, every_steps=2, every_seconds=None), stop, data=(X, y), shuffle=False)
        assert 0 < steps(folder)[0] <= step
    assert np.isfinite(read(folder).arrays["model/sequential/dense/kernel"]).all()


@pytest.mark.slow
def test_one_that_was_stopped_at_an_epochs_last_step_goes_on_with_the_next(folder):
    fit(net(), Stop(1, STEPS - 1), TrainingCheckpoint(folder), epochs=3)
    assert resume(folder, epochs=3)[0] == (2, 0)


@pytest.mark.slow
def test_fewer_epochs_than_were_begun_restore_the_last_state(folder):
    interrupted = net()
    with pytest.raises(SystemExit):
        fit(interrupted, TrainingCheckpoint(folder), Interrupt("step", 2, 2), epochs=4)
    model, seen = net(), Seen()
    history = fit(model, seen, TrainingCheckpoint(folder), epochs=2).history
    assert seen.steps == []
    assert len(history["loss"]) == 2
    assert all(map(np.array_equal, model.get_weights(), interrupted.get_weights()))


@pytest.mark.slow
def test_a_second_fit_begins_at_its_own_epoch(folder):
    model, seen = net(), Seen()
    fit(model, TrainingCheckpoint(folder))
    fit(model, seen, epochs=2)
    assert {epoch for epoch, _ in seen.steps} == {0, 1}


@pytest.mark.slow
def test_the_same_callback_goes_on_although_the_exception_is_kept(folder):
    def interrupt(step):
        if step == 9:
            raise KeyboardInterrupt

    model, saving = net(), TrainingCheckpoint(folder, every_steps=1)
    with pytest.raises(KeyboardInterrupt) as kept:
        fit(model, saving, Seen(interrupt), epochs=2)
    assert kept.tb is not None
    seen = Seen()
    fit(model, saving, seen, epochs=2)
    assert seen.steps[-1] == (1, 6)
    assert steps(folder)[0] == 14


@pytest.mark.parametrize("first", [True, False])
def test_loggers_go_on_counting_steps(folder, tmp_path, first):
    def run(*others):
        logger = ThroughputLogger(tmp_path / "log", window_steps=1, formats=["csv"])
        callbacks = [logger, TrainingCheckpoint(folder)]
        model = net()
        fit(model, *(callbacks if first else callbacks[::-1]), *others, epochs=3)
        return model

    with pytest.raises(SystemExit):
        run(Interrupt("step", 1, 2))
    gc.collect()  # the exception's fit
    model = run()
    with (tmp_path / "log" / "throughput.csv").open() as file:
        rows = [(int(row["epoch"]), int(row["step"])) for row in csv.DictReader(file)]
    assert rows[-1] == (2, 21)
    assert [step for epoch, step in rows if epoch == 1][-1] == 14
    assert RESUMED not in vars(model)


@pytest.mark.slow
def test_says_where_it_goes_on(folder, capsys):
    interrupt(folder, 1, 2)
    assert f"SIGTERM: saved step 10 to '{folder}'. Run the same command again to continue." in capsys.readouterr().out
    seen = Seen()
    net().fit(X, Y, batch_size=BATCH, epochs=2, verbose=2, callbacks=[seen, TrainingCheckpoint(folder)])
    assert f"Resuming from step 10 in '{folder}', in epoch 2 of 2." in capsys.readouterr().out
    assert seen.steps == [(1, 3), (1, 4), (1, 5), (1, 6)]


@pytest.mark.slow
def test_begins_anew_if_asked(folder):
    fit(net(), TrainingCheckpoint(folder))
    seen = Seen()
    fit(net(), seen, TrainingCheckpoint(folder, resume=False))
    assert len(seen.steps) == 2 * STEPS


@pytest.mark.slow
def test_the_best_is_not_that_of_a_training_that_was_replaced(folder):
    best = ("loss", "min")
    fit(net(), TrainingCheckpoint(folder, best=best, keep=1), epochs=5)
    fit(net(), TrainingCheckpoint(folder, best=best, keep=1, resume=False), epochs=2)
    assert steps(folder) == [2 * STEPS]


@pytest.mark.slow
def test_another_model_is_refused_by_its_variables(folder):
    fit(net(), TrainingCheckpoint(folder))
    keras.backend.clear_session()
    other = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    other.compile("adam", "mse")
    with pytest.raises(
        CheckpointError,
        match=r"Found differences: .*dense/kernel is float32 \(6, 3\) here, .*\(6, 8\) in",
    ):
        fit(other, TrainingCheckpoint(folder))
    Store(folder).close()  # the refused training has let go of the folder


@pytest.mark.slow
def test_a_callback_that_is_missing_is_warned_of(folder, caplog):
    fit(net(), keras.callbacks.ReduceLROnPlateau(monitor="loss"), TrainingCheckpoint(folder))
    fit(net(), TrainingCheckpoint(folder), epochs=3)
    assert "ReduceLROnPlateau is missing from fit's list" in caplog.text


# Data whose order is drawn anew on each run: each example comes once an epoch.


class Noting(keras.layers.Layer):
    """Notes the first number of each example that is trained on."""

    seen: list

    def call(self, x, training=False):
        if training:
            tf.py_function(lambda values: self.seen.extend(values.numpy().tolist()), [x[:, 0]], [])
        return x


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["arrays", "dataset", "cached"])
def test_unseeded_data_go_on_without_repeating_an_example(folder, kind):
    numbers = np.arange(50.0)[:, None] * np.ones((1, 6))
    made = tf.data.Dataset.from_tensor_slices((numbers, Y)).shuffle(50)
    data = {"arrays": (numbers, Y), "dataset": made.batch(BATCH), "cached": made.cache().batch(BATCH)}[kind]
    seen = Noting.seen = []

    def train(*callbacks):
        model = keras.Sequential([keras.Input((6,)), Noting(), keras.layers.Dense(1)])
        model.compile("sgd", "mse", run_eagerly=True)
        fit(model, TrainingCheckpoint(folder), *callbacks, data=data, epochs=1)

    tf.random.set_seed(None)
    with pytest.raises(SystemExit):
        train(Interrupt("step", 0, 3))
    assert len(seen) == 32
    train()
    assert sorted(seen) == numbers[:, 0].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["generator", "py_function"])
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_data_without_a_position_begin_the_epoch_again_with_a_warning(folder, caplog, kind):
    def batches():
        yield from ((X[at : at + BATCH], Y[at : at + BATCH]) for at in range(0, 48, BATCH))

    spec = (tf.TensorSpec((BATCH, 6)), tf.TensorSpec((BATCH,)))
    made = tf.data.Dataset.from_tensor_slices((X[:48], Y[:48])).batch(BATCH, drop_remainder=True)

    def called(x, y):
        x, y = tf.py_function(lambda x, y: (x, y), [x, y], [tf.float32, tf.float32])
        return tf.ensure_shape(x, (BATCH, 6)), tf.ensure_shape(y, (BATCH,))

    data = {
        "generator": lambda: tf.data.Dataset.from_generator(batches, output_signature=spec),
        "py_function": lambda: made.map(called),
    }[kind]
    interrupt(folder, 0, 3, data=data())
    assert "Expected data whose position can be found again" in caplog.text
    assert resume(folder, data=data())[0] == (0, 0)


@pytest.mark.slow
def test_other_data_begin_the_epoch_again_with_a_warning(folder, caplog):
    interrupt(folder, 0, 3)
    assert resume(folder, data=(X[:40], Y[:40]))[0] == (0, 0)
    assert "5 batches an epoch, and 7 in the checkpoint" in caplog.text


@pytest.mark.slow
def test_other_data_have_a_position_from_then_on(folder):
    interrupt(folder, 0, 3)
    interrupt(folder, 1, 2, data=(X[:40], Y[:40]))
    assert resume(folder, data=(X[:40], Y[:40]))[0] == (1, 3)


@pytest.mark.slow
def test_a_pipeline_that_was_looked_at_before_fit(folder):
    """A script looks at the first batch, so that its training begins with the next order."""

    def looked_at():
        data = resumed_fits.pipeline()
        next(iter(data))
        list(data.take(1))
        return data

    assert resumed_fits.difference(Case(data=looked_at), folder, ("step", 1, 2)) is None


# Signals.


def test_an_earlier_handler_is_called_when_the_checkpoint_is_safe(folder):
    found = []

    def handler(number, frame):
        found.append((signal.Signals(number).name, steps(folder)))
        raise SystemExit(3)

    before = signal.signal(signal.SIGTERM, handler)
    try:
        with pytest.raises(SystemExit, match="75"):
            fit(net(), TrainingCheckpoint(folder), Interrupt("step", 0, 2))
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)
    assert found == [("SIGTERM", [3])]


@pytest.mark.slow
@pytest.mark.parametrize("first", [True, False])
def test_monitoring_callbacks_flush_and_leave_the_exit_to_it(folder, tmp_path, first):
    callbacks = [UtilizationLogger(tmp_path / "log", interval_seconds=0.05), TrainingCheckpoint(folder)]
    with pytest.raises(SystemExit, match="75"):
        fit(net(), *(callbacks if first else callbacks[::-1]), Interrupt("step", 1, 2))
    assert steps(folder) == [10]
    assert list((tmp_path / "log").iterdir())


@pytest.fixture
def full_disk(monkeypatch):
    """The steps that were tried to save, of which only the one in `fits` can be."""
    write = Store.write

    class Tries(list):
        fits = None

    tries = Tries()

    def fail(store, step, *rest):
        tries.append(step)
        if step != tries.fits:
            raise CheckpointError("Expected to save. Found: no space left. Free some.")
        return write(store, step, *rest)

    monkeypatch.setattr(Store, "write", fail)
    return tries


def test_a_save_that_fails_on_a_signal_is_not_called_saved(folder, full_disk, capsys):
    with pytest.raises(SystemExit, match="75"):
        fit(net(), TrainingCheckpoint(folder), Interrupt("step", 0, 2))
    assert "SIGTERM: could not save step 3 to" in capsys.readouterr().out


def test_a_failed_save_is_warned_of_once_and_the_last_one_again(folder, full_disk, caplog):
    full_disk.fits = 14
    fit(net(), TrainingCheckpoint(folder, every_epochs=1), epochs=3)
    assert full_disk == [7, 14, 21]
    assert steps(folder) == [14]
    assert caplog.text.count("Training continues") == 1
    assert caplog.text.count("The training has ended, and this was its last checkpoint. Save the model") == 1


def test_a_failed_save_ends_the_training_if_asked(folder, full_disk):
    with pytest.raises(CheckpointError, match="no space left"):
        fit(net(), TrainingCheckpoint(folder, every_steps=2, every_seconds=None, on_error="raise"))


_SLOW_SAVE = """
import os, signal, sys, threading, time
import keras, numpy as np
from tfopt.callbacks import TrainingCheckpoint
from tfopt.checkpoint.folder.store import Store

def write(*arguments):
    threading.Timer(float(sys.argv[2]), os.kill, (os.getpid(), signal.SIGTERM)).start()
    time.sleep(6)

class Interrupt(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        os.kill(os.getpid(), signal.SIGTERM)

Store.write = write
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse", jit_compile=False)
callbacks = [TrainingCheckpoint(sys.argv[1]), Interrupt()]
model.fit(np.ones((4, 2)), np.ones(4), verbose=0, callbacks=callbacks)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("after", "code"), [(0.5, 75), (3.0, -signal.SIGTERM)])
def test_a_second_signal_ends_at_once_unless_it_is_the_same_one(folder, after, code):
    """A scheduler and a launcher may both pass the first one on."""
    done = subprocess.run([sys.executable, "-c", _SLOW_SAVE, folder, str(after)], capture_output=True, check=False)
    assert done.returncode == code, done.stderr[-3000:]


_SLOW_END = """
import atexit, os, signal, sys
import keras, numpy as np
from tfopt.callbacks import TrainingCheckpoint, UtilizationLogger

def again():
    os.kill(os.getpid(), signal.SIGTERM)

class Late:
    def __del__(self, kill=os.kill, pid=os.getpid()):
        kill(pid, 15)

class Interrupt(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        again()

when = sys.argv[2]
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse", jit_compile=False)
callbacks = [UtilizationLogger(), TrainingCheckpoint(sys.argv[1]), Interrupt()]
if when == "at exit":
    atexit.register(again)
late = Late() if when == "at the very end" else None
try:
    model.fit(np.ones((4, 2)), np.ones(4), verbose=0, callbacks=callbacks)
finally:
    if when == "after fit":
        again()
"""


@pytest.mark.slow
@pytest.mark.parametrize("when", ["after fit", "at exit", "at the very end"])
def test_a_second_signal_while_the_process_ends_keeps_its_code(folder, when):
    done = subprocess.run([sys.executable, "-c", _SLOW_END, folder, when], capture_output=True, text=True, check=False)
    assert done.returncode == 75, done.stderr[-3000:]
    assert "saved step 1 to" in done.stdout


def end_unnoticed(signals):
    """As a thread does that notices the end of a training: Python changes no handlers there."""
    signals.install()
    thread = threading.Thread(target=signals.remove)
    thread.start(), thread.join()


def test_a_handler_that_an_ended_training_left_in_another_thread_is_passed_over():
    """A notebook keeps the exception that ended it."""
    stock = signal.getsignal(signal.SIGUSR1)
    ended, running = Signals(["SIGUSR1"]), Signals(["SIGUSR1"])
    try:
        end_unnoticed(ended)
        running.install()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert running.received == "SIGUSR1"
        assert running.earlier_handler() is None
        running.remove()
        assert signal.getsignal(signal.SIGUSR1) == stock
    finally:
        signal.signal(signal.SIGUSR1, stock)


def test_handlers_of_two_ended_trainings_that_found_one_another():
    stock = signal.getsignal(signal.SIGUSR1)
    one, other = Signals(["SIGUSR1"]), Signals(["SIGUSR1"])
    try:
        end_unnoticed(one)
        end_unnoticed(other)
        one.install()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert one.received == "SIGUSR1"
        assert one.earlier_handler() is None
        one.remove()
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGUSR1, stock)


def test_other_signals(folder):
    with pytest.raises(SystemExit, match="75"):
        fit(
            net(),
            Seen(lambda step: os.kill(os.getpid(), signal.SIGUSR1) if step == 4 else None),
            TrainingCheckpoint(folder, signals=("SIGUSR1", "SIGTERM")),
        )
    assert steps(folder) == [4]


def test_fit_in_another_thread_warns_that_it_gets_no_signals(folder, caplog):
    thread = threading.Thread(target=lambda: fit(net(), TrainingCheckpoint(folder)))
    thread.start()
    thread.join()
    assert "Expected fit in the main thread" in caplog.text
    assert steps(folder) == [14]


def test_a_learning_rate_that_the_script_has_changed_is_named(folder, caplog):
    class Slower(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.optimizer.learning_rate = 0.5 * float(self.model.optimizer.learning_rate)

    def resumed(rate, epochs):
        model = net()
        model.optimizer.learning_rate = rate
        caplog.clear()
        fit(model, Slower(), TrainingCheckpoint(folder), epochs=epochs)
        return float(model.optimizer.learning_rate)

    assert resumed(0.5, 1) == 0.25
    assert resumed(0.5, 2) == 0.125  # a callback has changed it, and the script has not
    assert "learning rate" not in caplog.text
    assert resumed(0.75, 3) == 0.0625
    assert "began with, 0.5. Found 0.75 in the script. The checkpoint's is used: 0.125" in caplog.text


# Errors.


def test_two_trainings_in_one_folder(folder):
    with Store(folder), pytest.raises(CheckpointError, match="Expected to be the only training that saves"):
        fit(net(), TrainingCheckpoint(folder))


def test_random_operations_whose_state_cannot_be_saved_are_refused(folder):
    class Noise(keras.layers.Layer):
        def call(self, x):
            return x + tf.random.normal(tf.shape(x))

    model = keras.Sequential([keras.Input((6,)), Noise(), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    with pytest.raises(UnsupportedError, match=r"Found RandomStandardNormal .* in the training step of 'sequential"):
        fit(model, TrainingCheckpoint(folder))


class Counting(keras.Model):
    """Counts in a table or a queue how often it has seen the first row of a batch, and adds that to the labels."""

    def __init__(self, kept):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        if kept == "table":
            self.table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)
        else:
            self.queue = tf.queue.FIFOQueue(10, tf.float32, shapes=())
            self.queue.enqueue(0.0)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        key = tf.constant(0, tf.int64)
        seen = tf.reshape(self.table.lookup(key), ()) if hasattr(self, "table") else self.queue.dequeue()
        added = self.table.insert(key, seen + 1) if hasattr(self, "table") else self.queue.enqueue(seen + 1)
        with tf.control_dependencies([added]):
            return super().train_step((x, y + seen))


@pytest.mark.parametrize(
    ("kept", "found", "steps_per_execution"), [("table", "LookupTableInsertV2", 1), ("queue", "QueueDequeueV2", 2)]
)
def test_state_that_no_variable_holds_is_refused(folder, kept, found, steps_per_execution):
    model = Counting(kept)
    model.compile("sgd", "mse", jit_compile=False, steps_per_execution=steps_per_execution)
    with pytest.raises(UnsupportedError, match=rf"Found {found} .* in that of 'counting.*: it changes a lookup table"):
        fit(model, TrainingCheckpoint(folder))


def test_a_table_that_is_only_read_is_no_obstacle(folder):
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([0], [2.0], tf.int64, tf.float32), 0.0)

    class Scaling(keras.layers.Layer):
        def call(self, x):
            return x * table.lookup(tf.constant(0, tf.int64))

    model = keras.Sequential([keras.Input((6,)), Scaling(), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    fit(model, TrainingCheckpoint(folder, every_epochs=1), epochs=2)
    assert len(checkpoint.available(folder)) == 2


@pytest.mark.parametrize("other", [lambda folder: LocalSteps(4), keras.callbacks.BackupAndRestore])
def test_callbacks_with_which_it_could_not_go_on_are_refused(folder, other):
    with pytest.raises(UnsupportedError, match="Expected TrainingCheckpoint alone to resume"):
        fit(net(), other(folder), TrainingCheckpoint(folder))


def test_a_loop_of_ones_own_is_refused(folder):
    callback = TrainingCheckpoint(folder)
    callback.set_model(net())
    with pytest.raises(UnsupportedError, match=r"in the callbacks of model\.fit"):
        callback.on_train_begin()


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"every_steps": 0}, ValueError, "every_steps"),
        ({"every_seconds": 0}, ValueError, "every_seconds"),
        ({"every_epochs": 1.5}, ValueError, "every_epochs"),
        ({"keep": 0}, ValueError, "keep"),
        ({"best": "val_loss"}, TypeError, "best"),
        ({"best": ("val_loss", "low")}, ValueError, "'min' or 'max'"),
        ({"signals": "SIGTERM"}, TypeError, r"Pass \('SIGTERM',\)"),
        ({"signals": ("SIGTREM",)}, ValueError, "Did you mean 'SIGTERM'"),
        ({"signals": ("SIGTERM", "SIGKILL")}, ValueError, "Received: 'SIGKILL'"),
        ({"signals": ("SIGSTOP",)}, ValueError, "Received: 'SIGSTOP'"),
        ({"on_error": "ignore"}, ValueError, "on_error"),
    ],
)
def test_wrong_arguments_are_refused_at_once(folder, options, error, match):
    with pytest.raises(error, match=match):
        TrainingCheckpoint(folder, **options)
    assert not folder.exists()


@pytest.mark.slow
def test_evaluate_and_predict_save_nothing(folder):
    model = net()
    fit(model, TrainingCheckpoint(folder), epochs=EPOCHS)
    before = sorted(folder.rglob("*"))
    model.evaluate(X, Y, verbose=0, callbacks=[TrainingCheckpoint(folder)])
    model.predict(X, verbose=0, callbacks=[TrainingCheckpoint(folder)])
    assert sorted(folder.rglob("*")) == before


@pytest.mark.slow
def test_sigint_ends_with_the_documented_code(folder):
    class Press(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(SystemExit) as ended:
        fit(net(), TrainingCheckpoint(folder, signals=("SIGINT",)), Press())
    assert ended.value.code == 75
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.slow
def test_a_signal_after_the_last_epoch_calls_the_earlier_handler(folder, capsys):
    class Late(keras.callbacks.Callback):
        def on_train_end(self, logs=None):
            os.kill(os.getpid(), signal.SIGTERM)

    called = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: called.append(number))
    try:
        with pytest.raises(SystemExit) as ended:
            fit(net(), Late(), TrainingCheckpoint(folder))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 75
    assert called == [signal.SIGTERM]
    assert f"SIGTERM: the training is complete, and saved in '{folder}'." in capsys.readouterr().out


def test_a_state_that_cannot_be_saved_is_refused_at_once_by_name(folder):
    class Counter(keras.callbacks.Callback):
        def get_state(self):
            return {"seen": {1, 2}}

        def set_state(self, state):
            raise AssertionError

    seen = Seen()
    with pytest.raises(TypeError, match=r"Expected Counter.get_state\(\) to return JSON .* Found: .*type set is not"):
        fit(net(), seen, Counter(), TrainingCheckpoint(folder))
    assert seen.steps == []


@pytest.mark.slow
def test_a_subclass_with_half_of_a_state_is_saved_by_its_attributes(folder):
    class Stopping(keras.callbacks.EarlyStopping):
        def set_state(self, state):
            raise AssertionError

    first, second = (Stopping(monitor="loss", patience=9, min_delta=99) for _ in range(2))
    fit(net(), first, TrainingCheckpoint(folder))
    fit(net(), second, TrainingCheckpoint(folder), epochs=4)
    assert (first.wait, second.wait) == (1, 3)


@pytest.mark.slow
def test_forked_children_end_on_sigterm(folder):
    class Forking(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            child = os.fork()
            if child == 0:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(60)
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
            self.model.stop_training = True

    fit(net(), Forking(), TrainingCheckpoint(folder))


@pytest.mark.slow
def test_a_signal_named_twice_is_given_back(folder):
    before = signal.getsignal(signal.SIGTERM)
    fit(net(), TrainingCheckpoint(folder, signals=("SIGTERM", "SIGTERM")))
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.slow
def test_other_steps_per_execution_begin_the_epoch_again(folder, caplog):
    interrupt(folder, 1, 1)
    assert resume(folder, model=net(steps_per_execution=4))[0] == (1, 3)  # the last of the first four
    assert "Found: steps_per_execution=4 after 2 batches. The epoch starts over." in caplog.text


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize(("later", "first"), [(7, (1, 2)), (8, (1, 0))])
def test_data_under_another_seed_begin_the_epoch_again(folder, caplog, inner, later, first):
    """Those that are shuffled twice are resumed by their iterator's state."""

    def data(seed):
        rows = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(len(X), seed=seed)
        return (rows.shuffle(3, seed=1) if inner else rows).batch(BATCH)

    interrupt(folder, 1, 1, data=data(7))
    assert resume(folder, data=data(later))[0] == first
    warned = "Found: a shuffle with another buffer or seed than in the checkpoint, such as one drawn in each process"
    assert (f"{warned}. The epoch starts over." in caplog.text) is (later == 8)


@pytest.mark.slow
def test_data_that_are_drawn_anew_are_warned_of_between_epochs_too(folder, caplog):
    data = tf.data.Dataset.from_tensor_slices((X, Y)).map(lambda x, y: (x + tf.random.normal((6,)), y)).batch(BATCH)
    fit(net(), TrainingCheckpoint(folder), data=data)
    fit(net(), TrainingCheckpoint(folder), data=data, epochs=3)
    assert "whose state cannot be saved. Its random draws begin anew, as in a new training." in caplog.text


@pytest.mark.slow
def test_a_pipeline_that_an_earlier_fit_has_read_goes_on_where_it_was(tmp_path, caplog):
    def script(folder, *callbacks):
        data, model = resumed_fits.pipeline(), net()
        fit(net(), TrainingCheckpoint(folder / "first"), data=data)
        fit(model, TrainingCheckpoint(folder / "second"), *callbacks, data=data, epochs=3)
        return model.get_weights()

    whole = script(tmp_path / "whole")
    with pytest.raises(SystemExit):
        script(tmp_path / "cut", Interrupt("epoch", 1))
    for found, expected in zip(script(tmp_path / "cut"), whole, strict=True):
        np.testing.assert_array_equal(found, expected)
    assert caplog.text == ""
