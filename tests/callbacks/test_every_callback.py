"""What every callback does alike: in training loops that are not `fit`, copied, behind one of Keras' loggers."""

import copy
import json
import pickle

import keras
import numpy as np
import pytest
from clock import Clock

from tfopt import callbacks as ours
from tfopt.callbacks.report.recorder import Recorder
from tfopt.warn import forget_warnings

X = np.ones((8, 4), "float32")
MAKE = {
    "UtilizationLogger": lambda folder: ours.UtilizationLogger(folder, 0.05),
    "ThroughputLogger": lambda folder: ours.ThroughputLogger(folder, 2),
    "UtilizationAlert": lambda folder: ours.UtilizationAlert("step_time_ms", above=1e9, for_seconds=0.1),
    "StepProfiler": lambda folder: ours.StepProfiler(folder, start_step=10**6),
    "ReportWriter": lambda folder: ours.ReportWriter(folder / "report.html"),
    "PrometheusExporter": lambda folder: ours.PrometheusExporter(folder / "training.prom"),
    "TrackerLogger": lambda folder: ours.TrackerLogger(Tracker()),
    "LossScaleLogger": lambda folder: ours.LossScaleLogger(folder),
    "CompilationLogger": lambda folder: ours.CompilationLogger(),
    "PrecisionMonitor": lambda folder: ours.PrecisionMonitor((X, X[:, :1]), every_steps=10**6),
}


class Tracker:
    def log(self, values, step):
        """Does nothing."""


def only_steps(callbacks):
    for step in range(6):
        callbacks.on_train_batch_end(step)


def without_epochs(callbacks):
    callbacks.on_train_begin()
    for step in range(6):
        callbacks.on_train_batch_begin(step)
        callbacks.on_train_batch_end(step, {"loss": 1.0})
    callbacks.on_train_end()


def epochs_that_only_end(callbacks):
    callbacks.on_train_begin()
    for epoch in range(2):
        for step in range(3):
            callbacks.on_train_batch_end(step)
        callbacks.on_epoch_end(epoch, {"loss": 1.0})
    callbacks.on_train_end()


def epochs_without_logs(callbacks):
    callbacks.on_train_begin()
    for epoch in range(2):
        callbacks.on_epoch_begin(epoch)
        for step in range(3):
            callbacks.on_train_batch_end(step)
        callbacks.on_test_begin()
        callbacks.on_test_end()
        callbacks.on_epoch_end(epoch)
    callbacks.on_train_end()


LOOPS = [only_steps, without_epochs, epochs_that_only_end, epochs_without_logs]


@pytest.fixture(scope="module")
def net():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=2.0)
    model.compile(scaled, "mse", jit_compile=False)
    return model


@pytest.mark.filterwarnings("ignore:Expected (layers|an optimizer)")
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("name", MAKE)
def test_no_loop_is_ended_by_a_callback(name, loop, net, tmp_path, fake_nvml, caplog):
    forget_warnings()
    for model in (net, None):
        if name != "PrecisionMonitor" or model is not None:
            loop(keras.callbacks.CallbackList([MAKE[name](tmp_path)], model=model))
    assert "AttributeError" not in caplog.text, "in a thread, or taking a reading"


def test_a_monitor_without_a_model_says_so(tmp_path):
    callbacks = keras.callbacks.CallbackList([MAKE["PrecisionMonitor"](tmp_path)])
    with pytest.raises(ValueError, match=r"Pass model=… to keras\.callbacks\.CallbackList"):
        callbacks.on_train_begin()


@pytest.mark.parametrize("announced", [True, False])
def test_the_pace_of_a_loop(net, tmp_path, announced, set_clock):
    """Steps of 2 s; the first one takes a minute, and the optimizer counts them."""
    clock = Clock(0.0)
    set_clock(clock, ours.ThroughputLogger)
    logger = ours.ThroughputLogger(
        tmp_path, 3, examples_per_step=48, tokens_per_example=512, flops_per_example=1e12, peak_tflops=96
    )
    callbacks = keras.callbacks.CallbackList([logger], model=net, add_history=True)
    if announced:
        callbacks.on_train_begin()
        callbacks.on_epoch_begin(0)
    for step in range(8):
        clock.now += 2.0 if step else 60.0
        net.optimizer.inner_optimizer._iterations.assign(step + 1)
        callbacks.on_train_batch_end(step)
    if announced:
        callbacks.on_epoch_end(0, {})
        assert net.history.history["first_step_seconds"] == [60.0]
        assert net.history.history["tokens_per_second"] == [24 * 512]
    logger.on_train_end()
    rows = [json.loads(line) for line in (tmp_path / "throughput.jsonl").read_text().splitlines()]
    assert [(row["epoch"], row["step"]) for row in rows] == [(0 if announced else None, step) for step in (4, 7, 8)]
    assert {row["step_time_ms"] for row in rows} == {2000.0}
    assert {row["examples_per_second"] for row in rows} == {24.0}
    assert {row["tokens_per_second"] for row in rows} == {24.0 * 512}
    assert {row["mfu_percent"] for row in rows} == {25.0}
    assert logger.first_step_seconds == (60.0 if announced else None)


def test_the_page_of_a_loop_without_epochs_judges_it(net, tmp_path, set_clock):
    clock = Clock(0.0)
    set_clock(clock, ours.ThroughputLogger, ours.ReportWriter, Recorder)
    throughput = ours.ThroughputLogger(examples_per_step=8)
    page = ours.ReportWriter(tmp_path / "report.html")
    callbacks = keras.callbacks.CallbackList([throughput, page], model=net)
    callbacks.on_train_begin()
    for step in range(5):
        clock.now += 2.0
        callbacks.on_train_batch_end(step)
    callbacks.on_train_end()
    html = (tmp_path / "report.html").read_text()
    assert "nothing to judge" not in html
    assert "4.00" in html, "examples/s"


def fit(net, *callbacks):
    return net.fit(X, X[:, :1], batch_size=2, verbose=0, callbacks=list(callbacks)).history


@pytest.mark.parametrize("name", [name for name in MAKE if name not in ("LossScaleLogger", "PrecisionMonitor")])
def test_a_copy_from_before_or_after_a_fit_is_one_of_its_own(name, net, tmp_path, fake_nvml):
    callback = MAKE[name](tmp_path)
    copies = [copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))]
    fit(net, callback)
    copies.append(copy.deepcopy(callback))
    keys = {frozenset(fit(net, each)) for each in (*copies, callback)}
    assert len(keys) == 1


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("UtilizationLogger", "process_memory_mib"),
        ("ThroughputLogger", "step_time_ms"),
        ("LossScaleLogger", "skipped_steps"),
        ("CompilationLogger", "xla_compilations"),
    ],
)
def test_a_keras_logger_before_it_is_warned_of(name, key, net, tmp_path, fake_nvml):
    keras_logger = keras.callbacks.CSVLogger(tmp_path / "log.csv")
    with pytest.warns(UserWarning, match=f"Expected {name} before CSVLogger"):
        fit(net, keras_logger, MAKE[name](tmp_path))
    assert key not in (tmp_path / "log.csv").read_text()
    fit(net, MAKE[name](tmp_path), keras_logger)
    assert key in (tmp_path / "log.csv").read_text()


@pytest.mark.parametrize("logger", [ours.UtilizationLogger, ours.ThroughputLogger, ours.LossScaleLogger])
def test_bad_folders_and_formats(logger):
    with pytest.raises(ValueError, match=r"Expected a log format: .*Received: 'cvs'\. Did you mean 'csv'\?"):
        logger(formats=("cvs",))
    with pytest.raises(ValueError, match="local path"):
        logger("gs://bucket/logs")
    with pytest.raises(ValueError, match="which is a file"):
        logger(__file__)
    with pytest.raises(TypeError, match=r"Expected log_dir to be a path\. Received: 3\. Name a folder"):
        logger(3)
