"""What every callback does alike: its copies, Keras' loggers before and after it, bad folders and formats."""

import copy
import pickle
from types import SimpleNamespace

import keras
import numpy as np
import pytest

from tfopt import callbacks as ours

X = np.ones((8, 4), "float32")


def log(values, step):
    """A tracker, which keeps nothing."""


MAKE = {
    "UtilizationLogger": lambda folder: ours.UtilizationLogger(folder, 0.05),
    "ThroughputLogger": lambda folder: ours.ThroughputLogger(folder, 2, flops_per_example=3),
    "UtilizationAlert": lambda folder: ours.UtilizationAlert("gpu_memory_used_mib", above=1000),
    "StepProfiler": lambda folder: ours.StepProfiler(folder, start_step=1, steps=1),
    "ReportWriter": lambda folder: ours.ReportWriter(folder / "report.html"),
    "PrometheusExporter": lambda folder: ours.PrometheusExporter(folder / "training.prom"),
    "TrackerLogger": lambda folder: ours.TrackerLogger(SimpleNamespace(log=log)),
    "LossScaleLogger": lambda folder: ours.LossScaleLogger(folder),
    "CompilationLogger": lambda folder: ours.CompilationLogger(),
}


@pytest.fixture(scope="module")
def net():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=2.0)
    model.compile(scaled, "mse", jit_compile=False)
    return model


def fit(net, *callbacks):
    return net.fit(X, X[:, :1], batch_size=2, verbose=0, callbacks=list(callbacks)).history


@pytest.mark.parametrize(
    "name", [name for name in MAKE if name != "LossScaleLogger"]
)
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
