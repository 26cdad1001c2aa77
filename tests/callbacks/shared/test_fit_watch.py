"""A callback ends with its fit: also if somebody keeps the exception, and never before."""

import gc
import threading
import time
from types import SimpleNamespace

import keras
import pytest
from watched_fit import Interrupts, fit, net

from tfopt.callbacks import (
    CompilationLogger,
    LossScaleLogger,
    PrometheusExporter,
    ReportWriter,
    StepProfiler,
    ThroughputLogger,
    TrackerLogger,
    UtilizationAlert,
    UtilizationLogger,
)
from tfopt.callbacks.shared.running_fit import end_with_fit
from tfopt.internals.fit_door import open_door


class Ends(keras.callbacks.Callback):
    """Counts how often `end` was called, and looks at each hook that it was not."""

    def __init__(self):
        super().__init__()
        self.ended = []

    def on_train_begin(self, logs=None):
        end_with_fit(self, lambda ended=self.ended: ended.append(1))
        self.look()

    def on_epoch_begin(self, epoch, logs=None):
        self.look()

    def on_train_batch_end(self, step, logs=None):
        self.look()

    def on_test_batch_end(self, step, logs=None):
        self.look()

    def look(self):
        assert not self.ended


@pytest.fixture(autouse=True)
def _door():
    open_door()  # as the first of tfopt's callbacks does


def test_an_interrupted_fit_ends_though_its_exception_is_held():
    ends = Ends()
    with pytest.raises(KeyboardInterrupt) as held:
        fit(ends, Interrupts())
    assert ends.ended == [1]
    assert held.tb is not None


@pytest.mark.slow
def test_three_interrupted_fits_of_all_callbacks_leave_no_thread(tmp_path, fake_nvml):
    model = net()
    model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), "mse", jit_compile=False)
    before, held = set(threading.enumerate()), []  # other tests' threads may run on
    for number in range(3):
        callbacks = [
            UtilizationLogger(tmp_path / str(number)),
            ThroughputLogger(tmp_path / str(number)),
            UtilizationAlert(below=1),
            ReportWriter(tmp_path / f"{number}.html"),
            PrometheusExporter(port=0),
            TrackerLogger(SimpleNamespace(log=lambda values, step: None)),
            CompilationLogger(),
            LossScaleLogger(tmp_path / str(number)),
            StepProfiler(tmp_path / str(number), start_step=0),
        ]
        with pytest.raises(KeyboardInterrupt) as caught:
            fit(*callbacks, Interrupts(), model=model)
        held.append((caught, callbacks))
    until = time.monotonic() + 60
    while time.monotonic() < until:
        begun = {thread.name for thread in set(threading.enumerate()) - before}
        left = {name for name in begun if name.startswith("tfopt")} - {"tfopt-nvml"}
        if not left:
            break
        time.sleep(0.05)
    assert left == set()
    assert [(tmp_path / f"{number}.html").exists() for number in range(3)] == [True] * 3
    assert len(fit(*callbacks, model=model, epochs=2).epoch) == 2, "they can run again"


def test_a_fit_within_a_fit_ends_alone():
    class Fits(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            inner = Ends()
            with pytest.raises(KeyboardInterrupt) as self.held:
                fit(inner, Interrupts(), model=model)
            assert inner.ended == [1]
            outer.look()

    outer, model = Ends(), net()
    fit(outer, Fits(), epochs=2)
    assert outer.ended == [1]


def begin(ends):
    """Begins a loop of the user's own in a function that returns."""
    callbacks = keras.callbacks.CallbackList([ends])
    callbacks.on_train_begin()
    return callbacks


def steps(callbacks):
    for step in range(2):
        callbacks.on_train_batch_end(step)
        yield step


def in_a_helper(ends):
    callbacks = begin(ends)
    for _ in steps(callbacks):
        ends.look()
    callbacks.on_train_end()


def in_a_generator(ends):
    def train():
        callbacks = keras.callbacks.CallbackList([ends])
        callbacks.on_train_begin()
        yield from steps(callbacks)
        callbacks.on_train_end()

    for _ in train():
        ends.look()


def in_a_list_of_a_subclass(ends):
    class List(keras.callbacks.CallbackList):
        def on_train_begin(self, logs=None):
            super().on_train_begin(logs)

    callbacks = List([ends])
    callbacks.on_train_begin()
    for _ in steps(callbacks):
        pass


@pytest.mark.parametrize("loop", [in_a_helper, in_a_generator, in_a_list_of_a_subclass])
def test_loops_of_ones_own_are_left_alone(loop):
    ends = Ends()
    loop(ends)
    assert ends.ended == [1]  # with its list


def test_an_interrupted_loop_of_ones_own_ends_when_its_exception_is_let_go():
    ends = Ends()

    def train():
        callbacks = keras.callbacks.CallbackList([ends])
        callbacks.on_train_begin()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as held:
        train()
    assert not ends.ended  # somebody may still handle it
    del held
    gc.collect()
    assert ends.ended == [1]


def test_the_callback_alone_ends_with_its_collection():
    ends = Ends()
    ended = ends.ended
    ends.on_train_begin()
    del ends
    assert ended == [1]


def test_an_end_that_fails_leaves_the_others(caplog):
    class Fails(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            end_with_fit(self, fails)

    def fails():
        raise OSError("no disk")

    ends = Ends()
    with pytest.raises(KeyboardInterrupt) as held:
        fit(Fails(), ends, Interrupts())
    assert ends.ended == [1]
    assert "no disk" in caplog.text
    assert held.tb is not None
