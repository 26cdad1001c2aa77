import functools
import gc
import re
import subprocess
import sys
import threading
import time
import warnings
from types import SimpleNamespace

import keras
import pytest
import tensorflow as tf
from clock import Clock
from fake_nvml import FakeGpu
from models import batch, small_net

import tfopt
from tfopt.callbacks import CompilationLogger, ThroughputLogger, UtilizationLogger, report_writer
from tfopt.callbacks.report.recorder import Recorder
from tfopt.callbacks.report_writer import ReportWriter
from tfopt.callbacks.utilization_alert import UtilizationAlert
from tfopt.errors import UnsupportedError
from tfopt.warn import forget_warnings

ENVIRONMENT = {"tfopt": "0", "packages": {"tensorflow": "2", "keras": "3"}, "gpus": [], "host": {"cpu_model": "C"}}


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    forget_warnings()
    monkeypatch.setattr("tfopt.measure.environment", lambda: ENVIRONMENT)


def dataset(steps=4):
    return tf.data.Dataset.from_tensor_slices(batch(8 * steps)).batch(8)


@functools.cache
def traced():
    """One model for all whose weights do not matter: tracing takes longer than a test."""
    return small_net()


def fit(*callbacks, model=None, epochs=2, steps=4, **arguments):
    model = model or traced()
    model.fit(dataset(steps), epochs=epochs, verbose=0, shuffle=False, callbacks=[*callbacks], **arguments)
    return model


def text(path):
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", path.read_text().replace("<wbr>", "")).replace("\u00a0", " "))


class After(keras.callbacks.Callback):
    """Waits in the first step for `samples` readings, and does something in a later one."""

    def __init__(self, logger, action=None, *, samples=2):
        super().__init__()
        self.taken, self.samples, self.action = threading.Semaphore(0), samples, action
        logger.listeners.add(self.count)

    def count(self, rows):
        self.taken.release()

    def on_train_batch_end(self, step, logs=None):
        if step == 1:
            for _ in range(self.samples):
                assert self.taken.acquire(timeout=20)
        if step == 2 and self.action:
            self.action()


def test_a_page_at_the_end_with_sources_of_its_own(tmp_path):
    path = tmp_path / "new folder" / "report.html"
    fit(ReportWriter(path))
    page = text(path)
    assert "Training of sequential" in page
    assert "2 epochs in" in page
    assert "No GPU was read" in page or "had passed when the first step" in page
    assert "Throughput examples/s" in page
    assert "host.cpu_model C" in page
    assert re.search(r"Epochs Epoch Took loss accuracy .*step_time_ms", page), "keys of a source behind it too"
    assert "had not ended" not in page


@pytest.mark.slow
def test_readings_events_and_epochs_come_from_the_callbacks_in_the_list(tmp_path, fake_nvml):
    fake_nvml.gpus += [FakeGpu(uuid="GPU-a", utilization=90), FakeGpu(uuid="GPU-b", bus=2, utilization=70)]
    path, logger = tmp_path / "report.html", UtilizationLogger(interval_seconds=0.01)
    # In any order: those that stand behind are used too, and none is added.
    others = [
        logger,
        ThroughputLogger(),
        CompilationLogger(),
        UtilizationAlert("step_time_ms", above=0, for_seconds=1e-9),
    ]
    alert = others[-1]
    model = small_net(jit_compile=True)
    lists = []
    spy = keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: lists.append(report_writer.running_list(spy).callbacks)
    )
    others[1] = ThroughputLogger(flops_per_example=1e6, peak_tflops=1.0)
    fit(ReportWriter(path), *others, After(logger), spy, model=model, epochs=3)
    assert [type(one) for one in lists[0]].count(UtilizationLogger) == 1
    page = text(path)
    assert "GPU utilisation" in page
    assert "mean 80.0 %" in page
    assert "GPU 0 GPU 1" in page
    assert re.search(r"compilation training step", page)
    assert alert.alerts
    assert str(alert.alerts[0])[:50] in page
    assert re.search(r"3 epochs in .* 1 compilation", page)
    assert re.search(r"Keras 3, Adam, batch size \d+, float32, XLA on\. .*Model FLOPs utilisation [\d.]+ %", page)


@pytest.mark.parametrize("overlapped", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_curve_of_a_long_epoch_is_what_keras_logs(tmp_path, monkeypatch, overlapped, set_clock):
    clock, logged, records = Clock(), [], []

    def advance(step, logs):
        clock.now += 2
        logged.append(logs["loss"] if not overlapped else None)

    monkeypatch.setattr(report_writer, "report", lambda record: records.append(record) or "")
    model = tfopt.fit.overlap(small_net()) if overlapped else traced()
    step = keras.callbacks.LambdaCallback(on_train_batch_end=advance)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of callbacks that make an overlapped step wait
        set_clock(clock, ThroughputLogger, ReportWriter, Recorder)
        callbacks = [step, ThroughputLogger(), ReportWriter(tmp_path / "r.html")]
        fit(*callbacks, model=model, epochs=1, steps=12)
    drawn = [point.mean for point in records[-1].learning.series["loss"][None].points]
    assert len(drawn) >= 10
    assert overlapped or drawn == [loss for loss in logged if loss in drawn]
    assert records[-1].epochs.items[0].logs["loss"] == drawn[-1]


def test_times_come_from_the_clock(tmp_path, set_clock):
    clock, path = Clock(), tmp_path / "report.html"
    advance = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: setattr(clock, "now", clock.now + 90))
    set_clock(clock, ReportWriter, Recorder)
    fit(advance, ReportWriter(path), epochs=2)
    assert "2 epochs in 3 min." in text(path)
    assert path.read_text().count('<svg class="division"') > 0
    assert re.search(r"1 1 min 30 s .* 2 1 min 30 s", text(path))


def test_a_page_before_the_end_so_that_a_kill_leaves_one(tmp_path, set_clock):
    clock, path, seen = Clock(), tmp_path / "report.html", []

    def look(epoch, logs):
        if epoch == 1:
            deadline = time.monotonic() + 20
            while not path.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            seen.append(text(path))
        clock.now += 400

    set_clock(clock, ReportWriter, Recorder)
    fit(keras.callbacks.LambdaCallback(on_epoch_begin=look), ReportWriter(path), epochs=4)
    assert "1 epoch in" in seen[0] or "0 epochs in" in seen[0]
    assert "had not ended" in seen[0]
    assert "4 epochs in" in text(path)


def stop(error):
    def action():
        raise error

    return action


@pytest.mark.slow
def test_an_interrupted_fit_leaves_a_page(tmp_path):
    path, logger = tmp_path / "report.html", UtilizationLogger(interval_seconds=0.01)
    writer = ReportWriter(path)
    with pytest.raises(KeyboardInterrupt):
        fit(writer, logger, After(logger, stop(KeyboardInterrupt)), epochs=2)
    gc.collect()
    page = text(path)
    assert "0 epochs in" in page
    assert "had not ended" in page
    # And the next one begins anew.
    fit(writer, epochs=1)
    assert "1 epoch in" in text(path)
    assert "had not ended" not in text(path)


SCRIPT = """
import os, signal, sys
import keras
import numpy as np
from tfopt.callbacks.report_writer import ReportWriter

model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
interrupt = lambda batch, logs: os.kill(os.getpid(), signal.SIGINT) if batch == 5 else None
callbacks = [ReportWriter(sys.argv[1]), keras.callbacks.LambdaCallback(on_train_batch_end=interrupt)]
model.fit(np.ones((80, 4)), np.ones((80, 1)), batch_size=8, verbose=0, callbacks=callbacks)
"""


@pytest.mark.slow
def test_ctrl_c_in_a_script_leaves_a_page(tmp_path):
    path = tmp_path / "report.html"
    ended = subprocess.run([sys.executable, "-c", SCRIPT, path], capture_output=True, text=True, timeout=300)
    assert "KeyboardInterrupt" in ended.stderr
    assert "The training had not ended" in text(path)
    assert "packages.tensorflow" in text(path)


def test_a_page_that_cannot_be_written_is_told_once(tmp_path, caplog):
    folder = tmp_path / "folder"
    writer = ReportWriter(folder / "report.html")
    folder.write_text("a file where the folder should be")
    fit(writer)
    fit(writer)
    found = [record.getMessage() for record in caplog.records if "report" in record.getMessage()]
    assert len(found) == 1
    assert found[0].startswith(f"Expected to write the report to {folder / 'report.html'}. Found: ")
    assert "The training goes on; free the disk or choose another path." in found[0]


def test_a_disk_that_hangs_holds_fit_up_for_a_stated_time(tmp_path, caplog, monkeypatch):
    answers = threading.Event()
    monkeypatch.setattr(report_writer, "write_atomic", lambda *arguments: answers.wait(20))
    monkeypatch.setattr(report_writer, "_WAIT_SECONDS", 0.1)
    fit(ReportWriter(tmp_path / "report.html"))
    assert "Found it unfinished, and fit ends without it." in caplog.text
    answers.set()


def test_a_driver_that_hangs_in_the_middle_of_fit_is_asked_for_nothing_more(tmp_path, monkeypatch):
    asked, hanging = threading.Event(), threading.Event()

    def environment():
        asked.set()
        assert not hanging.is_set()
        return ENVIRONMENT | {"driver": "570"}

    monkeypatch.setattr("tfopt.measure.environment", environment)
    begun = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: [asked.wait(10), hanging.set()])
    fit(ReportWriter(tmp_path / "report.html"), begun, epochs=1)
    assert "driver 570" in text(tmp_path / "report.html")


def test_a_defect_in_the_page_ends_no_training(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(report_writer, "report", lambda record: 1 / 0)
    fit(ReportWriter(tmp_path / "report.html"))
    assert "ZeroDivisionError" in caplog.text
    assert "unfinished" not in caplog.text


def test_each_worker_writes_its_own(tmp_path, monkeypatch):
    cluster = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}'
    monkeypatch.setenv("TF_CONFIG", cluster)
    fit(ReportWriter(tmp_path / "report.html"))
    assert [path.name for path in tmp_path.iterdir()] == ["report-worker1.html"]


def test_logs_that_are_odd_are_shown_as_they_are(tmp_path):
    path = tmp_path / "report.html"
    odd = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: logs.update(
            {"note": "<i>", "nan": float("nan"), "list": [1], f"only{epoch}": 1}
        )
    )
    fit(odd, ReportWriter(path))
    page = text(path)
    assert "&lt;i&gt;" in page
    assert "only1" in page
    assert "–" in page, "an epoch without a key"


def test_jinja_missing_is_said_when_it_is_made(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(UnsupportedError, match="pip install jinja2"):
        ReportWriter(tmp_path / "report.html")


def test_how_a_model_is_trained_in_words(monkeypatch):
    assert report_writer._setup(small_net(jit_compile=False)) == ("Adam", "float32", "XLA off")
    layers = [keras.layers.Dense(2, dtype=dtype) for dtype in ("mixed_bfloat16", "mixed_bfloat16", "float32")]
    model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Activation("relu")])
    assert report_writer._setup(model)[:1] == ("mixed_bfloat16 and float32 in 1 layer",), "not compiled"
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    model.compile(scaled, "mse", jit_compile=True, steps_per_execution=8)
    monkeypatch.setattr(type(model), "distribute_strategy", SimpleNamespace(num_replicas_in_sync=8))
    assert report_writer._setup(model) == (
        "SGD",
        "mixed_bfloat16 and float32 in 1 layer",
        "XLA on",
        "8 steps per execution",
        "8 replicas",
    )
    model.compile("sgd", "mse", run_eagerly=True)
    assert "XLA off, eager" in ", ".join(report_writer._setup(model))
    assert report_writer._setup(keras.Model()) == ("float32",), "no layers"
