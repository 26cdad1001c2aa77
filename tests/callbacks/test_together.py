"""All callbacks in one list, in any order, with Keras' own and with an overlapped fit."""

import csv
import json
import random
import re
import threading
import time
from types import SimpleNamespace

import keras
import pytest
import tensorflow as tf
from models import assert_same_state, batch, small_net, state

from tfopt import callbacks as ours
from tfopt import fit as tfopt_fit
from tfopt.callbacks import prometheus_exporter
from tfopt.callbacks.report.recorder import Recorder
from tfopt.callbacks.utilization_logger import EpochReadings
from tfopt.causes.readings import RunningMeans, Throttling
from tfopt.hardware import GpuSample

KEYS = {"step_time_ms", "host_memory_used_mib", "examples_per_second"}
EPOCHS = []  # the keys that the tracker got of each
NAMES = {
    "utilization": lambda folder: ours.UtilizationLogger(folder, 0.05, formats=("csv", "jsonl", "tensorboard")),
    "throughput": lambda folder: ours.ThroughputLogger(folder, 2, formats=("csv", "jsonl", "tensorboard")),
    "compilations": lambda folder: ours.CompilationLogger(),
    "alert": lambda folder: ours.UtilizationAlert(
        "process_memory_mib", above=1, for_seconds=0.1, action=lambda alert: 0
    ),
    "profiler": lambda folder: ours.StepProfiler(folder, start_step=3, steps=2),
    "prometheus": lambda folder: ours.PrometheusExporter(folder / "training.prom", interval_seconds=0.1),
    "tracker": lambda folder: ours.TrackerLogger(Tracker(EPOCHS)),
    "report": lambda folder: ours.ReportWriter(folder / "report.html"),
    "stopping": lambda folder: keras.callbacks.EarlyStopping("loss", patience=3),
    "checkpoint": lambda folder: keras.callbacks.ModelCheckpoint(folder / "net.weights.h5", save_weights_only=True),
}


class Tracker:
    """Keeps the epochs' logs."""

    def __init__(self, epochs=None):
        self.epochs = [] if epochs is None else epochs

    def log(self, values, step):
        if "loss" in values:
            self.epochs.append(set(values))


def trained(callbacks, *, overlapped=False, **options):
    model = small_net()
    if overlapped:
        tfopt_fit.overlap(model)
    dataset = tf.data.Dataset.from_tensor_slices(batch(40)).batch(8)
    history = model.fit(
        dataset, epochs=3, verbose=0, shuffle=False, validation_data=dataset, callbacks=callbacks, **options
    ).history
    tfopt_fit.undo(model)
    return history, state(model)


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    monkeypatch.setattr(prometheus_exporter, "_WAIT_SECONDS", 20.0)  # tests read the file right after fit


@pytest.fixture(scope="module")
def alone():
    return trained([])


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "overlapped"), [(0, False), (1, True)])
def test_in_any_order_the_training_is_the_same(tmp_path, fake_nvml, alone, seed, overlapped):
    EPOCHS.clear()
    names = list(NAMES)
    random.Random(seed).shuffle(names)
    # Where Keras' logger stands does not matter to the others; last, it sees all keys.
    last = keras.callbacks.CSVLogger(tmp_path / "epochs.csv")
    history, weights = trained([*(NAMES[name](tmp_path) for name in names), last], overlapped=overlapped)
    assert_same_state(alone[1], weights)
    assert {key: history[key] for key in alone[0]} == alone[0]
    with open(tmp_path / "epochs.csv", newline="") as file:
        assert set(next(csv.DictReader(file))) >= KEYS
    assert len(EPOCHS) == 3
    exported = (tmp_path / "training.prom").read_text()
    assert all(f'tfopt_log{{key="{key}",rank="0",run="' in exported for key in KEYS)
    made = {path.name for path in tmp_path.iterdir()}
    assert made >= {"utilization.csv", "throughput.jsonl", "report.html", "training.prom", "plugins", "utilization"}
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("tfopt-sampler")] == []


@pytest.mark.parametrize(("mhz", "throttled"), [(1700, False), (1200, True)])
def test_logs_alert_and_report_agree_on_throttling(mhz, throttled):
    clocks = [(1980, ()), *[(mhz, ("power_cap",))] * 9]
    logs = EpochReadings()
    report = Recorder("net", None, None)
    alert = ours.UtilizationAlert("gpu_power_watts", below=1)
    alert._throttling, alert._means, alert._rules, alert._replicas = Throttling(), RunningMeans(), {}, None
    alert._known = True
    for clock, reasons in clocks:
        row = GpuSample(0.0, 0.0, index=0, uuid="GPU-0", sm_clock_mhz=clock, throttle_reasons=reasons)
        logs.add([row])
        report.take_samples((row,))
        alert._take_samples((row,))
    assert logs.values()["throttled_percent"] == (90.0 if throttled else 0.0)
    assert report._timeline.series["throttled_percent"][0].mean() == (90.0 if throttled else 0.0)
    assert alert._means.since({}).gpus[0].throttle_reasons == (("power_cap",) if throttled else ())


def last(path):
    return json.loads(path.read_text().splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("examples", [46, 48])  # in batches of 8; a last execution of two out of four steps
def test_all_count_the_steps_of_an_execution_that_the_data_ends_in(tmp_path, fake_nvml, examples):
    model, tracker = small_net(steps_per_execution=4), SimpleNamespace(steps=[])
    tracker.log = lambda values, step: tracker.steps.append(step)
    prometheus = ours.PrometheusExporter(tmp_path / "training.prom")
    utilization = ours.UtilizationLogger(tmp_path, 0.05)
    loggers = [utilization, ours.ThroughputLogger(tmp_path, 1), prometheus, ours.TrackerLogger(tracker)]
    sampled = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: time.sleep(0.2))
    x, y = batch(examples)
    logs = model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=[*loggers, sampled]).history
    assert int(model.optimizer.iterations) == 12
    rows = [json.loads(line) for line in (tmp_path / "throughput.jsonl").read_text().splitlines()]
    assert [(row["step"], row["window_steps"]) for row in rows] == [(6, 2), (10, 4), (12, 2)]
    assert last(tmp_path / "utilization.jsonl")["step"] == tracker.steps[-1] == 12
    assert re.search(r"^tfopt_steps_total\S* 12\.0$", (tmp_path / "training.prom").read_text(), re.MULTILINE)
    # An epoch's examples, by its time: the rows of the second one have all of it.
    seconds = sum(row["window_seconds"] for row in rows[1:])
    assert logs["examples_per_second"][1] * seconds == pytest.approx(examples)
