"""Trains a small net and monitors it with files, TensorBoard, alerts, a trace, Prometheus, a tracker and a report.

Run it as it is: `python examples/monitor.py [FOLDER]`. It needs scikit-learn, jinja2, TensorBoard and
prometheus-client: `pip install '.[bench,tensorboard,prometheus]'`. It trains in mixed_float16, so that there is a loss
scale to log, and shows the GPU if there is one.
"""

import sys
from pathlib import Path

import keras
from sklearn.datasets import load_digits

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
from tfopt.pipelines import build_pipeline

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "monitor")


class Tracker:
    """Stands for a Weights & Biases run: anything with log(dict, step)."""

    logged = 0

    def log(self, values, step):
        self.logged += 1


digits = load_digits()
x, y = (digits.data / 16).astype("float32").reshape(-1, 8, 8, 1), digits.target.astype("int32")
dataset = build_pipeline((x, y), batch_size=32, seed=0, remainder="drop")

keras.utils.set_random_seed(0)
keras.config.set_dtype_policy("mixed_float16")
model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(8, 3, activation="relu"),
        keras.layers.Conv2D(16, 3, activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dense(10, dtype="float32"),
    ]
)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile("adam", loss, metrics=["accuracy"])

profiler, tracker = StepProfiler(folder, start_step=None), Tracker()
model.fit(
    dataset,
    epochs=20,
    verbose=0,
    callbacks=[
        UtilizationLogger(folder, 0.25, formats=("csv", "jsonl", "tensorboard")),
        ThroughputLogger(folder, formats=("csv", "jsonl", "tensorboard")),
        CompilationLogger(),
        LossScaleLogger(folder),
        # Fires on any machine, on purpose, and requests a trace of the next steps.
        UtilizationAlert("host_cpu_percent", above=1, for_seconds=1, action=profiler.request),
        # Warns if no step ends for two minutes, and says what fit waits for.
        UtilizationAlert("seconds_since_step", above=110, for_seconds=10),
        profiler,
        PrometheusExporter(folder / "training.prom", interval_seconds=1),
        TrackerLogger(tracker, interval_seconds=2),
        ReportWriter(folder / "report.html"),
        keras.callbacks.CSVLogger(folder / "epochs.csv"),
    ],
)
print(f"The tracker was called {tracker.logged} times; traces: {len(profiler.traces)}.")
print(f"In {folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")
print(f"Open {folder / 'report.html'}; curves: tensorboard --logdir {folder}")
