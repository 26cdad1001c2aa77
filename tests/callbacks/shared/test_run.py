import copy
import json
import os
import socket
import time

import keras
import pytest
from clock import Clock
from sampled_fits import Slow
from watched_fit import fit, shared_net

from tfopt.callbacks import LossScaleLogger, ThroughputLogger, UtilizationLogger
from tfopt.callbacks.shared.run import COORDINATES, Run, begin_run
from tfopt.callbacks.shared.running_fit import Callback
from tfopt.hardware import GpuSampler
from tfopt.hardware.gpu_reader import GpuReader
from tfopt.hardware.host_activity import HostMeter


class Begins(Callback):
    def on_train_begin(self, logs=None):
        self.run = begin_run(self)


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_the_callbacks_of_a_fit_share_a_run_and_each_fit_has_its_own():
    one, other = Begins(), Begins()
    fit(one, other)
    first = one.run
    assert other.run is first
    fit(one, other)
    assert one.run is other.run
    assert one.run.id != first.id


def test_a_list_that_a_loop_uses_again():
    one, other = Begins(), Begins()
    callbacks = keras.callbacks.CallbackList([one, other], model=shared_net())
    ids = []
    for _ in range(2):
        callbacks.on_train_begin()
        assert one.run is other.run
        ids.append(one.run.id)
        callbacks.on_train_end()
    assert ids[0] != ids[1]


def test_a_fit_within_a_fit_is_another_run():
    class Fits(Begins):
        def on_epoch_end(self, epoch, logs=None):
            fit(self.inner)

    outer = Fits()
    outer.inner = Begins()
    fit(outer)
    assert outer.run.id != outer.inner.run.id


def test_coordinates(monkeypatch, set_clock):
    cluster = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(cluster))
    clock = Clock()
    set_clock(clock, Run)
    run = Run()
    clock.now += 2.5
    found = run.coordinates(epoch=3, step=70)
    assert tuple(found) == COORDINATES
    assert abs(found.pop("time_seconds") - time.time()) < 600
    process = {"run": run.id, "host": socket.gethostname(), "pid": os.getpid(), "rank": 1}
    assert found == process | {"epoch": 3, "step": 70, "elapsed_seconds": 2.5}


@pytest.mark.parametrize(("task", "index", "rank"), [("chief", 0, 0), ("worker", 1, 2), ("evaluator", 0, None)])
def test_rank_among_the_tasks_that_train(monkeypatch, task, index, rank):
    config = {"cluster": {"chief": ["a:1"], "worker": ["b:1", "c:1"]}, "task": {"type": task, "index": index}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    assert Run().rank == rank


class CountsSteps(Clock, keras.callbacks.Callback):
    """A clock that moves on by a hundred seconds when training begins, and by one after each step."""

    def __init__(self):
        Clock.__init__(self, 0.0)
        keras.callbacks.Callback.__init__(self)

    def on_train_begin(self, logs=None):
        self.now += 100

    def on_train_batch_end(self, batch, logs=None):
        self.now += 1


def test_the_files_of_a_fit_join(tmp_path, fake_nvml, set_clock):
    """Each row's step and seconds, in all files, are those that a third callback counts."""
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=2.0)
    model.compile(scaled, "mse", jit_compile=False)
    counts = CountsSteps()
    set_clock(counts, Run, UtilizationLogger, HostMeter, GpuSampler, GpuReader, ThroughputLogger)
    # The clock stands after those that log a step and before the one that samples, which therefore begins later.
    sampling = UtilizationLogger(tmp_path, 0.01)
    loggers = [ThroughputLogger(tmp_path, 2), LossScaleLogger(tmp_path), counts, sampling, Slow(sampling)]
    for _ in range(2):
        fit(*loggers, model=model, epochs=2)
    files = {name: lines(tmp_path / f"{name}.jsonl") for name in ("utilization", "throughput", "loss_scale")}
    runs = {name: list(dict.fromkeys(row["run"] for row in rows)) for name, rows in files.items()}
    assert len(runs["throughput"]) == 2
    assert runs["utilization"] == runs["throughput"] == runs["loss_scale"]
    assert {tuple(row)[: len(COORDINATES)] for rows in files.values() for row in rows} == {COORDINATES}
    found = {
        name: [(row["epoch"], row["step"], row["elapsed_seconds"]) for row in files[name]]
        for name in ("throughput", "loss_scale")
    }
    steps = [(0, 3), (1, 5), (1, 7), (1, 8)]
    # A row's time is the end of its last step, before the clock moves on.
    seconds = [102, 104, 106, 107]
    again = [(epoch, step + 8) for epoch, step in steps]
    assert found["throughput"] == [(*at, s) for at, s in zip(steps + again, seconds * 2, strict=True)]
    assert found["loss_scale"] == [(0, 4, 104), (1, 8, 108), (0, 12, 104), (1, 16, 108)]
    for number, run in enumerate(runs["utilization"]):
        rows = [row for row in files["utilization"] if row["run"] == run and row["epoch"] is not None]
        places = {(row["epoch"], row["step"] - 8 * number, row["elapsed_seconds"]) for row in rows}
        # Slow has the sampler read after the first step of each epoch.
        assert places >= {(0, 1, 101), (1, 5, 105)}
        assert [row["elapsed_seconds"] for row in rows] == sorted(row["elapsed_seconds"] for row in rows)


def test_a_copy_of_a_logger_holds_no_other_callback():
    one = Begins()
    fit(one, ThroughputLogger())
    copied = copy.deepcopy(one.run)
    assert copied.id == one.run.id
