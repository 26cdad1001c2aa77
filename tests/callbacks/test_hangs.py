"""A training that hangs, with all callbacks that watch one, on eight GPUs."""

import threading
import urllib.request

import keras
import numpy as np
import pytest
import tensorflow as tf
from fake_nvml import FakeGpu

from tfopt import callbacks as ours
from tfopt.warn import forget_warnings

STEP = (np.ones((4, 3), "float32"), np.ones((4, 2), "float32"))
SPEC = tuple(tf.TensorSpec(part.shape) for part in STEP)


class Hang:
    """Holds whoever calls it for the third time until both alerts have come, or for good if they never do."""

    def __init__(self):
        self.calls, self.armed = 0, False
        self.told, self.over = [], threading.Event()

    def __call__(self, *_):
        self.calls += self.armed
        if self.calls == 3 and not self.over.is_set():
            assert self.over.wait(60)

    def alert(self, alert):
        self.told.append(alert)
        if len(self.told) == 2:
            with urllib.request.urlopen(self.url(), timeout=10) as answer:
                self.page = answer.read().decode()
            self.over.set()


def batches(hold, count=8):
    def generate():
        for _ in range(count):
            hold()
            yield STEP

    data = tf.data.Dataset.from_generator(generate, output_signature=SPEC)
    return data.apply(tf.data.experimental.assert_cardinality(count))


def net(hold=lambda: None, **options):
    class Net(keras.Sequential):
        def train_step(self, data):
            tf.py_function(hold, [], [])
            return super().train_step(data)

    model = Net([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse", jit_compile=False, **options)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "named"),
    [
        ("input", "fit waits for a batch"),
        ("step", "the step has its batch and is running"),
        ("callback", "fit is in a callback (Saves.on_epoch_end)"),
        ("validation", "fit waits for a batch"),
        ("execution", "fit waits for a batch"),
    ],
)
def test_a_hang_is_told_by_all_and_the_next_fit_starts_over(tmp_path, fake_nvml, where, named):
    forget_warnings()
    fake_nvml.gpus += [FakeGpu(utilization=0, uuid=f"GPU-{at}", bus=at + 1) for at in range(8)]
    hang = Hang()

    class Saves(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            hang.armed = True

        def on_epoch_end(self, epoch, logs=None):
            if where == "callback":
                hang()

    model = net(*[hang] * (where == "step"), steps_per_execution=2 if where == "execution" else 1)
    free = batches(lambda: None)
    if where in ("input", "execution"):
        data, checked = batches(hang), free
    else:
        data, checked = free, batches(hang) if where == "validation" else free
    idle = ours.UtilizationAlert(for_seconds=0.5, action=lambda alert: None)
    stuck = ours.UtilizationAlert("seconds_since_step", above=3, for_seconds=0.2, action=hang.alert)
    pace = ours.UtilizationAlert("step_time_ms", above=60_000, for_seconds=0.2, action=hang.alert)
    exporter = ours.PrometheusExporter(port=0)
    hang.url = lambda: exporter.url
    second = ours.UtilizationAlert("seconds_since_step", above=3.2, for_seconds=0.2, action=hang.alert)
    watching = [
        ours.ReportWriter(tmp_path / "page.html"),
        idle,
        stuck,
        second,
        pace,
        ours.UtilizationLogger(tmp_path, 0.05),
        ours.ThroughputLogger(tmp_path, flops_per_example=1.0),  # counting them takes a while
        exporter,
    ]
    model.fit(data, epochs=3, shuffle=False, verbose=0, validation_data=checked, callbacks=[*watching, Saves()])
    # TensorFlow sometimes takes seconds to delete an epoch's iterator, and later alerts say so.
    assert [alert.cause for alert in hang.told[:2] if named not in alert.cause] == []
    assert pace.alerts == ()
    since = next(line for line in hang.page.splitlines() if line.startswith("tfopt_seconds_since_step"))
    assert float(since.split()[-1]) > 3
    assert named in (tmp_path / "page.html").read_text()
    model.fit(data, epochs=2, shuffle=False, verbose=0, validation_data=checked, callbacks=watching)
    assert [alert for alert in (*stuck.alerts, *second.alerts) if named in alert.cause] == []
