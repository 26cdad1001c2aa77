import asyncio
import threading

import pytest
from watched_fit import fit

from tfopt import callbacks as ours
from tfopt import warn
from tfopt.callbacks.shared.background import Background
from tfopt.internals.runtime import is_profiling


@pytest.fixture(autouse=True)
def _forgotten_warnings():
    warn.forget_warnings()


def test_items_in_order_in_another_thread():
    taken = []
    background = Background("some work", lambda item: taken.append((item, threading.current_thread().name)))
    for item in range(5):
        background.put(item)
    background.close()
    assert taken == [(item, "tfopt-some-work") for item in range(5)]


def test_closed_it_takes_no_more():
    taken = []
    background = Background("work", taken.append)
    background.close()
    background.close()
    for _ in range(20):
        background.put("late")
    assert (taken, background.closed, background.dropped) == ([], True, 0)


def test_what_does_not_fit_is_dropped_and_counted(caplog):
    released, begun, taken = threading.Event(), threading.Event(), []

    def work(item):
        begun.set()
        released.wait(30)
        taken.append(item)

    background = Background("work", work, most=2)
    background.put("first")
    assert begun.wait(30)
    for item in range(5):
        background.put(item)
    released.set()
    background.close()
    assert (taken, background.dropped) == (["first", 0, 1], 3)
    assert caplog.messages == [
        "Expected the work to keep up. Found 2 items waiting for it. What does not fit is dropped; the training goes "
        "on. Check whether it hangs, or ask for less."
    ]


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt, asyncio.CancelledError])
def test_an_error_is_reported_once_and_work_goes_on(caplog, error):
    taken = []

    def work(item):
        if item < 2:
            raise error("no")
        taken.append(item)

    background = Background("work", work)
    for item in range(3):
        background.put(item)
    background.close()
    assert taken == [2]
    assert caplog.messages == [f"Expected the work to work. Found: {error('no')!r}. The training goes on."]


def test_one_that_hangs_is_not_waited_for(caplog):
    released = threading.Event()
    background = Background("work", lambda item: released.wait(30))
    background.put("hangs")
    background.close(0.01)
    assert caplog.messages == [
        "Expected the work to finish within 0.01 s. Found it still running; tfopt stops waiting for it. Check whether "
        "it hangs."
    ]
    released.set()


def test_it_may_be_closed_in_its_own_thread(caplog):
    """As the garbage collection does, wherever it runs."""
    background = Background("work", lambda item: background.close())
    background.put("closes")
    background._thread.join(30)
    assert not background._thread.is_alive()
    assert caplog.messages == []


@pytest.fixture
def no_threads(monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)


def test_a_thread_that_cannot_be_started_is_reported_once(caplog, no_threads):
    taken = []
    for _ in range(2):
        background = Background("work", taken.append)
        for item in range(20):
            background.put(item)
        background.close()
        background.close()
        assert (taken, background.closed, background.dropped) == ([], True, 20)
    assert caplog.messages == [
        "Expected to start a thread for the work. Found: can't start new thread. The training goes on without it. "
        "Check the process limit (ulimit -u; pids.max of the control group)."
    ]


@pytest.mark.filterwarnings("ignore:Exception ignored in. <socket.socket:pytest.PytestUnraisableExceptionWarning")
def test_fit_survives_that_no_thread_can_be_started(caplog, no_threads, tmp_path, set_clock):
    """And an alert, which needs none to be found, still stops it."""
    profiler, alert = ours.StepProfiler(tmp_path, start_step=1, steps=1), Alert()
    set_clock(lambda: alert.now, ours.UtilizationAlert)
    callbacks = [
        ours.UtilizationLogger(tmp_path),
        ours.ThroughputLogger(tmp_path, window_steps=1),
        ours.PrometheusExporter(tmp_path / "a.prom"),
        ours.PrometheusExporter(port=0),
        ours.TrackerLogger(Tracker()),
        ours.ReportWriter(tmp_path / "report.html"),
        alert,
        profiler,
    ]
    assert len(fit(*callbacks, epochs=9).epoch) == 1
    assert alert.alerts
    assert profiler.traces == []
    assert not is_profiling(), "TensorFlow's profiler does not go on without it"
    assert len(caplog.messages) == len(set(caplog.messages))
    assert all("can't start new thread" in text for text in caplog.messages)
    lost = ("throughput log", "textfile", "127.0.0.1:0", "tracker", "report", "alert action", "trace", "reads the GPUs")
    assert [name for name in lost if not any(name in text for text in caplog.messages)] == []


class Tracker:
    def log(self, values, step):
        raise AssertionError("there is no thread to call it in")


class Alert(ours.UtilizationAlert):
    """Is about each step's time, and asks nobody what it is."""

    def __init__(self):
        self.now = 0.0
        super().__init__("step_time_ms", above=1, for_seconds=1, action="stop")

    def on_train_batch_end(self, step, logs=None):
        super().on_train_batch_end(step, logs)
        self.now += 1
        self._take_throughput({"step_time_ms": 5.0})
