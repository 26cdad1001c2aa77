import threading
from types import SimpleNamespace

import keras
import numpy as np
import pytest
from clock import Clock
from watched_fit import fit, gpus, net, shared_net, told

from tfopt import warn
from tfopt.callbacks import ThroughputLogger
from tfopt.callbacks.tracker_logger import TrackerLogger
from tfopt.hardware import GpuSample


@pytest.fixture(autouse=True)
def _forgotten_warnings():
    warn.forget_warnings()


class Tracker:
    """Keeps what it is told, as W&B's run does: a step that goes back is an error here."""

    def __init__(self):
        self.logged = []

    def log(self, data, step=None, commit=None):
        assert not self.logged or step >= self.logged[-1][0], "the step goes back"
        self.logged.append((step, data))

    def epochs(self):
        return [(step, data) for step, data in self.logged if "loss" in data]


class WandbRun:
    """Keeps what W&B 0.31 was seen to keep: not what comes with a step below the last; without one, all."""

    def __init__(self):
        self.rows, self.axes, self._step = [], {}, 0

    def define_metric(self, name, step_metric=None):
        self.axes[name] = step_metric

    def log(self, data, step=None, commit=None):
        if step is None or step >= self._step:
            self._step = self._step + 1 if step is None else step
            self.rows.append(data)


class LogsBatches(keras.callbacks.Callback):
    """As `WandbMetricsLogger(log_freq="batch")` does."""

    def __init__(self, run):
        super().__init__()
        self.run = run

    def on_train_batch_end(self, batch, logs=None):
        self.run.log({"batch/loss": logs["loss"], "batch/batch_step": batch})

    def on_epoch_end(self, epoch, logs=None):
        self.run.log({"epoch/loss": logs["loss"]})


@pytest.fixture
def driven(set_clock):
    """Makes one that runs without fit: the test hands it its readings."""

    def drive(tracker, clock):
        set_clock(clock, TrackerLogger)
        logger = TrackerLogger(tracker, interval_seconds=10)
        logger.set_model(shared_net())
        logger.on_train_begin()
        return logger

    return drive


def test_epochs_at_their_last_step():
    tracker = Tracker()
    history = fit(TrackerLogger(tracker), model=net(), epochs=3).history
    assert tracker.epochs() == [(4 * epoch + 4, {"loss": loss}) for epoch, loss in enumerate(history["loss"])]


def test_keys_of_callbacks_before_it(fake_nvml):
    tracker = Tracker()
    fit(ThroughputLogger(), TrackerLogger(tracker))
    ((_, logged),) = tracker.epochs()
    assert {"loss", "step_time_ms", "examples_per_second"} <= set(logged)


def test_readings_count_for_the_time_they_stand_for(driven):
    clock, tracker = Clock(), Tracker()
    logger = driven(tracker, clock)
    # Ten steps of 100 ms in one second, then one of 9 s that waited for its input; the sampler came late, too.
    for elapsed, steps, seconds, wait in ((1.0, 10, 1.0, 0.0), (10.0, 1, 9.0, 100.0)):
        logger._take_samples((GpuSample(0.0, elapsed, index=0, gpu_utilization_percent=100.0 - wait),))
        clock.now += seconds
        pace = {"step_time_ms": 1000 * seconds / steps, "examples_per_second": 32 * steps / seconds}
        logger._take_throughput({**pace, "input_wait_percent": wait, "window_steps": steps, "window_seconds": seconds})
    logger.on_train_end()
    ((_, means),) = tracker.logged
    assert means == pytest.approx(
        {
            "live/gpu_utilization_percent": 10.0,
            "live/step_time_ms": 10_000 / 11,
            "live/examples_per_second": 32 * 11 / 10,
            "live/input_wait_percent": 90.0,
        }
    )


def test_readings_are_means_over_the_interval_and_the_gpus(driven):
    clock, tracker = Clock(), Tracker()
    logger = driven(tracker, clock)
    for percent in (10, 20, 30):
        logger._take_samples(gpus(percent, percent + 40, gpu_energy_joules=1e6, host_cpu_percent=percent))
        logger._take_throughput({"epoch": 1, "step": 2, "step_time_ms": float(percent), "mfu_percent": None})
        clock.now += 4
    logger._take_samples(gpus(100, None, host_cpu_percent=60.0))
    clock.now += 1
    logger._take_throughput({"step_time_ms": 99.0})
    logger.on_train_end()
    # 0, 4 and 8 seconds, and the one at 12 with which ten had passed; what is left comes at the end.
    first = {"live/gpu_utilization_percent": 340 / 7, "live/host_cpu_percent": 30.0, "live/step_time_ms": 20.0}
    assert tracker.logged == [(0, pytest.approx(first)), (0, {"live/step_time_ms": 99.0})]


def test_finite_numbers_only(driven):
    tracker = Tracker()
    logger = driven(tracker, Clock())
    logger.on_epoch_end(0, {"loss": float("nan"), "name": "x", "none": None, "array": np.ones(2)})
    logger.on_epoch_end(1, {"loss": float("inf"), "mean": np.float32(0.5), "count": 3})
    logger.on_train_end()
    assert tracker.logged == [(0, {"mean": 0.5, "count": 3.0})]
    assert [type(value) for value in tracker.logged[0][1].values()] == [float, float]


def test_a_loop_that_tells_of_no_epochs(driven):
    tracker = Tracker()
    logger = driven(tracker, Clock())
    logger.on_train_batch_end(0)
    logger.on_epoch_end(0, {"loss": 1.0, "huge": 10**400})
    logger.on_train_end()
    assert tracker.logged == [(1, {"loss": 1.0})]


def test_steps_go_on_from_one_fit_to_the_next():
    tracker, model = Tracker(), net()
    fit(TrackerLogger(tracker), model=model)
    fit(logger := TrackerLogger(tracker), model=model)  # another one, and the same training
    fit(logger, model=net())  # another training, and the same logger
    assert [step for step, _ in tracker.epochs()] == [4, 8, 12]


@pytest.mark.parametrize("first", [True, False])
def test_nothing_is_dropped_beside_a_callback_that_logs_every_batch(first):
    run, model = WandbRun(), net()
    callbacks = [TrackerLogger(run, interval_seconds=1e-6), LogsBatches(run)]
    history = [fit(*callbacks[:: 1 if first else -1], model=model, epochs=3).history["loss"] for _ in range(2)]
    assert [row["loss"] for row in run.rows if "loss" in row] == [loss for losses in history for loss in losses]
    assert [row["tfopt/step"] for row in run.rows if "loss" in row] == [4, 8, 12, 16, 20, 24]
    assert [len([row for row in run.rows if key in row]) for key in ("batch/loss", "epoch/loss")] == [24, 6]
    sent = {key for row in run.rows if "tfopt/step" in row for key in row} - {"tfopt/step"}
    assert any(key.startswith("live/") for key in sent)
    assert run.axes == dict.fromkeys(sent, "tfopt/step")  # and what others log keeps its own axis


def test_a_metric_that_cannot_be_defined_is_logged_all_the_same(caplog, driven):
    run = WandbRun()
    run.define_metric = lambda name, step_metric: 1 / 0
    logger = driven(run, Clock())
    for epoch in range(2):
        logger.on_epoch_end(epoch, {"loss": 1.0})
    logger.on_train_end()
    assert run.rows == [{"loss": 1.0, "tfopt/step": 0}] * 2
    assert "ZeroDivisionError" in caplog.text


def test_steps_after_a_restart(tmp_path):
    tracker = Tracker()

    class Crashes(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 1:
                raise RuntimeError

    with pytest.raises(RuntimeError):
        fit(TrackerLogger(Tracker()), keras.callbacks.BackupAndRestore(tmp_path), Crashes(), model=net(), epochs=3)
    fit(TrackerLogger(tracker), keras.callbacks.BackupAndRestore(tmp_path), model=net(), epochs=3)
    assert tracker.epochs()[-1][0] == 12


def test_a_step_that_another_thread_has_overtaken(driven):
    tracker = Tracker()
    logger = driven(tracker, Clock())
    background, logger._step = logger._background, 8
    logger.on_epoch_end(0, {"loss": 1.0})
    background.put(({"live/late": 1.0}, 7))
    logger.on_train_end()
    assert tracker.logged == [(8, {"loss": 1.0}), (8, {"live/late": 1.0})]


def test_a_tracker_that_hangs_holds_nothing_up_and_is_waited_for_a_little(caplog, monkeypatch, driven):
    monkeypatch.setattr("tfopt.callbacks.shared.background.Background.close.__defaults__", (0.2,))
    released = threading.Event()
    logger = driven(SimpleNamespace(log=lambda data, step: released.wait(60)), Clock())
    for epoch in range(80):
        logger.on_epoch_end(epoch, {"loss": 1.0})
    logger.on_train_end()
    full, late = told(caplog)
    assert full.startswith(
        "Expected the tracker to keep up. Found 64 items waiting for it. What does not fit is dropped"
    )
    assert late.startswith("Expected the tracker to finish within 0.2 s. Found it still running; tfopt stops waiting")
    assert logger.dropped in (15, 16)  # one may be with the tracker, 64 wait
    released.set()


def test_bad_arguments():
    expected = r"Expected a tracker with a method log\(dict, step\). Received: <object .*Pass a W&B run"
    with pytest.raises(TypeError, match=expected):
        TrackerLogger(object())
    with pytest.raises(TypeError, match="Expected a tracker with a method"):
        TrackerLogger(SimpleNamespace(log=3))
