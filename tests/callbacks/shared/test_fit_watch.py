"""A callback ends with its fit: also if a notebook keeps the exception, and never before."""

import asyncio
import gc
import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import keras
import pytest
from watched_fit import Interrupts, fit, net, threads

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
from tfopt.callbacks.shared import fit_watch
from tfopt.callbacks.shared.running_fit import end_with_fit


class Looks:
    """How often the watch has looked. `twice` waits until it has looked twice more."""

    def __init__(self, monkeypatch):
        self._looked = threading.Semaphore(0)
        over = fit_watch._over

        def counted(fits):
            found = over(fits)
            self._looked.release()
            return found

        monkeypatch.setattr(fit_watch, "_over", counted)
        monkeypatch.setattr(fit_watch, "_EVERY_SECONDS", 0.001)

    def twice(self):
        while self._looked.acquire(blocking=False):
            pass
        for _ in range(2):
            assert self._looked.acquire(timeout=60)


@pytest.fixture
def looks(monkeypatch):
    end = time.monotonic() + 60
    while threads("fit-watch") and time.monotonic() < end:  # that of an earlier test
        time.sleep(0.01)
    return Looks(monkeypatch)


class Ends(keras.callbacks.Callback):
    """Counts how often `end` was called, and has the watch look at each hook."""

    def __init__(self, looks):
        super().__init__()
        self.looks, self.ended = looks, []

    def on_train_begin(self, logs=None):
        end_with_fit(self, lambda ended=self.ended: ended.append(1))
        self._look()

    def on_epoch_begin(self, epoch, logs=None):
        self._look()

    def on_train_batch_end(self, step, logs=None):
        self._look()

    def on_test_batch_end(self, step, logs=None):
        self._look()

    def _look(self):
        self.looks.twice()
        assert not self.ended

    def within_a_minute(self):
        until = time.monotonic() + 60
        while not self.ended and time.monotonic() < until:
            time.sleep(0.01)
        return self.ended == [1]


def test_an_interrupted_fit_ends_though_its_exception_is_held(looks):
    ends = Ends(looks)
    with pytest.raises(KeyboardInterrupt) as held:
        fit(ends, Interrupts())
    assert ends.within_a_minute()
    assert held.tb is not None


@pytest.mark.slow
def test_three_interrupted_fits_of_all_callbacks_leave_no_thread(tmp_path, looks, fake_nvml):
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


@pytest.mark.slow
def test_a_fit_with_validation_in_any_thread_is_left_alone(looks):
    for run in (lambda body: body(), lambda body: [t := threading.Thread(target=body), t.start(), t.join()]):
        ends, histories = Ends(looks), []
        run(lambda ends=ends, histories=histories: histories.append(fit(ends, validation_split=0.5, epochs=2)))
        assert len(histories[0].epoch) == 2
        assert ends.ended == [1]


def test_a_fit_within_a_fit_ends_alone(looks):
    class Fits(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            inner = Ends(looks)
            with pytest.raises(KeyboardInterrupt) as self.held:
                fit(inner, Interrupts(), model=model)
            assert inner.within_a_minute()
            outer._look()

    outer, model = Ends(looks), net()
    fit(outer, Fits(), epochs=2)
    assert outer.within_a_minute()  # the held exceptions of the inner ones hold its frame, too


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
        ends._look()
    callbacks.on_train_end()


def in_a_generator(ends):
    def train():
        callbacks = keras.callbacks.CallbackList([ends])
        callbacks.on_train_begin()
        yield from steps(callbacks)
        callbacks.on_train_end()

    for _ in train():
        ends._look()


def in_a_coroutine(ends):
    async def train():
        callbacks = keras.callbacks.CallbackList([ends])
        callbacks.on_train_begin()
        for _ in steps(callbacks):
            await asyncio.sleep(0.01)
        callbacks.on_train_end()

    async def together():
        await asyncio.gather(train(), asyncio.to_thread(looks_meanwhile))

    def looks_meanwhile():
        ends.looks.twice()

    asyncio.run(together())


def in_a_list_of_a_subclass(ends):
    class List(keras.callbacks.CallbackList):
        def on_train_begin(self, logs=None):
            super().on_train_begin(logs)

    callbacks = List([ends])
    callbacks.on_train_begin()
    for _ in steps(callbacks):
        pass


@pytest.mark.parametrize("loop", [in_a_helper, in_a_generator, in_a_coroutine, in_a_list_of_a_subclass])
def test_loops_of_ones_own_are_left_alone(looks, loop):
    ends = Ends(looks)
    loop(ends)
    assert ends.ended == [1]  # with its list


def test_an_interrupted_loop_of_ones_own_ends_though_the_notebook_holds_its_exception(looks, monkeypatch):
    ends = Ends(looks)

    def train():
        callbacks = keras.callbacks.CallbackList([ends])
        callbacks.on_train_begin()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as held:
        train()
    looks.twice()
    assert not ends.ended  # until it is sys.last_value, somebody may still handle it
    monkeypatch.setattr(sys, "last_value", held.value, raising=False)
    assert ends.within_a_minute()


def test_the_callback_alone_ends_with_its_collection(looks):
    ends = Ends(looks)
    ended = ends.ended
    ends.on_train_begin()
    del ends
    assert ended == [1]


def test_an_end_that_fails_leaves_the_others(looks, caplog):
    class Fails(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            end_with_fit(self, fails)

    def fails():
        raise OSError("no disk")

    ends = Ends(looks)
    with pytest.raises(KeyboardInterrupt) as held:
        fit(Fails(), ends, Interrupts())
    assert ends.within_a_minute()
    assert "no disk" in caplog.text
    assert held.tb is not None


def test_greenlets_hide_the_stack(looks, monkeypatch):
    class Greenlet:
        parent = object()

    class Module:
        getcurrent = staticmethod(Greenlet)

    monkeypatch.setitem(sys.modules, "greenlet", Module)
    assert not fit_watch.Loop(sys._getframe()).is_over({})
    Greenlet.parent = None
    loop = fit_watch.Loop(sys._getframe())
    monkeypatch.setattr(loop, "_of_keras", True)
    assert loop.is_over({})


def test_a_stack_that_its_thread_has_left_meanwhile_tells_nothing(monkeypatch):
    """Walking a running thread's stack may end in a generator that it has left: it breaks off there."""

    def generator():
        yield

    left = generator()
    next(left)
    loop = fit_watch.Loop(sys._getframe())
    monkeypatch.setattr(loop, "_of_keras", True)
    assert not loop.is_over({threading.get_ident(): left.gi_frame})
    assert loop.is_over({threading.get_ident(): sys._getframe(1)})


FRAMES_AND_GARBAGE = """
import gc, threading
from tfopt.callbacks.shared.fit_watch import thread_frames

class Ring:
    def __init__(self):
        self.itself, self.local = self, threading.local()
        self.local.value = 1

def deep(depth):  # thread_frames makes the frame of each thread's innermost call, and each may set off a collection
    Ring()
    return deep(depth - 1) if depth else thread_frames()

gc.set_threshold(1)
for _ in range(300):
    assert deep(3)[threading.get_ident()]
assert gc.isenabled()
gc.disable()
thread_frames()
assert not gc.isenabled()
"""


def test_garbage_with_thread_locals_does_not_stop_all_threads():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    # In a process of its own, since the test would hold the interpreter's lock for ever.
    subprocess.run([sys.executable, "-c", FRAMES_AND_GARBAGE], env=environment, check=True, timeout=120)


def test_two_threads_that_ask_for_frames_leave_the_garbage_collector_on():
    done = threading.Event()

    def ask():
        while not done.is_set():
            fit_watch.thread_frames()

    others = [threading.Thread(target=ask) for _ in range(3)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for other in others:
            other.start()
        for _ in range(2000):
            fit_watch.thread_frames()
    finally:
        done.set()
        for other in others:
            other.join()
        sys.setswitchinterval(interval)
    assert gc.isenabled()
