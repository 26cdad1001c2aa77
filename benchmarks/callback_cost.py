"""What tfopt's callbacks cost `fit`: on each step, in the sampler's thread, in memory over a week, and to begin with.

    python benchmarks/callback_cost.py [RESULTS.json]

Prints the figures, and writes them with the raw samples and the environment, part by part. The goals, with all of
them on at 1 Hz: at most 0.5 % on a step of 5 ms and 20 µs on one of half a millisecond, against steps of the same fit
without them; the sampler's thread under 1 % of a core; a week's readings under 50 MB; import and construction under
50 ms beyond Keras'.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import keras
import numpy as np
import psutil
import tensorflow as tf

from tfopt import callbacks
from tfopt.callbacks.shared.reading_sources import find_source
from tfopt.files import write_atomic
from tfopt.hardware import GpuSample
from tfopt.measure import environment

BATCH = 32
# Name: width of the dense layers, steps in a block, pairs of blocks.
NETS = {"0.5 ms": (16, 50, 400), "5 ms": (1100, 10, 200)}
SAMPLER_SECONDS = 20
WEEK = "--week"  # for a process of its own: what others have freed would hide the growth
WEEK_SECONDS = 7 * 24 * 3600
IMPORT = """
import time, tensorflow, keras
keras.layers.Dense, keras.callbacks.Callback  # lazy parts of Keras that any training loads
started = time.perf_counter()
from tfopt import callbacks
callbacks.UtilizationLogger(), callbacks.ThroughputLogger(), callbacks.UtilizationAlert()
print(1000 * (time.perf_counter() - started))
"""


class NoTracker:
    """Takes what a tracker takes."""

    def log(self, values, step):
        """Does nothing."""


def all_callbacks(folder):
    """Those that take or use readings, as a training would have them."""
    return [
        callbacks.UtilizationLogger(folder),
        callbacks.ThroughputLogger(folder),
        callbacks.UtilizationAlert("host_cpu_percent", below=None, above=1000, for_seconds=5),
        callbacks.PrometheusExporter(Path(folder) / "training.prom"),
        callbacks.TrackerLogger(NoTracker()),
        callbacks.StepProfiler(folder, start_step=10**9),
        callbacks.ReportWriter(Path(folder) / "report.html"),
    ]


def net(width):
    """Two dense layers with a metric, compiled."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(width, activation="relu") for _ in range(2)]
    model = keras.Sequential([keras.Input((64,)), *layers, keras.layers.Dense(4)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, metrics=["accuracy"], jit_compile=False)
    return model


def batches():
    """Batches of noise, cached in memory."""
    random = np.random.default_rng(0)
    arrays = random.random((64 * BATCH, 64), "float32"), random.integers(4, size=64 * BATCH)
    return tf.data.Dataset.from_tensor_slices(arrays).batch(BATCH, drop_remainder=True).cache().prefetch(4)


class Switched(keras.callbacks.Callback):
    """Passes everything on to callbacks, but what belongs to a step only in every other block of steps.

    So both are measured in one fit, a fraction of a second apart, and a drift of the machine's speed cancels out. By
    the wall, and by the CPU time of the training thread, which neighbours disturb less.
    """

    def __init__(self, those, block):
        super().__init__()
        self._those = keras.callbacks.CallbackList(those)
        self._each = those  # on a step the list would convert logs again that Keras' own has converted
        self._block = block
        self._done = -3 * block  # compilation and what is slow at first
        self._on = False
        self._marks = None
        self.blocks = []  # (on, wall, thread) in seconds

    def set_model(self, model):
        """Passes it on."""
        super().set_model(model)
        self._those.set_model(model)

    def set_params(self, params):
        """Passes it on."""
        super().set_params(params)
        self._those.set_params(params)

    def on_train_begin(self, logs=None):
        """Passes it on."""
        self._those.on_train_begin(logs)

    def on_epoch_begin(self, epoch, logs=None):
        """Passes it on."""
        self._those.on_epoch_begin(epoch, logs)

    def on_epoch_end(self, epoch, logs=None):
        """Passes it on."""
        self._those.on_epoch_end(epoch, logs)

    def on_train_end(self, logs=None):
        """Passes it on, and measures what the threads have taken."""
        ours = [thread for thread in threading.enumerate() if thread.name.startswith("tfopt-")]
        seconds = sum(time.clock_gettime(time.pthread_getcpuclockid(thread.ident)) for thread in ours)
        self.threads_percent = 100 * seconds / (time.perf_counter() - self._started)
        self._those.on_train_end(logs)

    def on_train_batch_begin(self, batch, logs=None):
        """Passes it on in every other block."""
        if self._on:
            for one in self._each:
                one.on_train_batch_begin(batch, logs)

    def on_train_batch_end(self, batch, logs=None):
        """Passes it on in every other block, at whose end the clocks are read."""
        if self._on:
            for one in self._each:
                one.on_train_batch_end(batch, logs)
        self._done += 1
        if self._done >= 0 and self._done % self._block == 0:
            now = np.array([time.perf_counter(), time.thread_time()])
            if self._marks is None:
                self._started = now[0]
            else:
                self.blocks.append((self._on, *(now - self._marks)))
            self._on = not self._on
            self._marks = np.array([time.perf_counter(), time.thread_time()])


def on_a_step(width, block, pairs):
    """What a step of fit takes longer with the callbacks than without: by the wall, and of the thread's CPU time."""
    with tempfile.TemporaryDirectory() as folder:
        switched = Switched(all_callbacks(folder), block)
        steps = block * (2 * pairs + 4)
        net(width).fit(batches().repeat(), steps_per_epoch=steps, verbose=0, shuffle=False, callbacks=[switched])
    blocks = np.array(switched.blocks)[: 2 * pairs]
    on, off = (1000 * blocks[blocks[:, 0] == wanted, 1:] / block for wanted in (1, 0))
    figures = {"threads_percent": switched.threads_percent, "steps_per_block": block}
    for column, clock in enumerate(("wall", "thread")):
        figures[clock] = longer(off[:, column], on[:, column])
    return figures


def longer(before, after):
    """The medians of a step's time and of what it takes longer with the callbacks, with an interval."""
    more = 1000 * (after - before)
    drawn = np.random.default_rng(0).integers(len(more), size=(2000, len(more)))
    return {
        "step_ms": float(np.median(before)),
        "longer_us": float(np.median(more)),
        "interval_us": [float(end) for end in np.percentile(np.median(more[drawn], axis=1), (2.5, 97.5))],
        "longer_percent": float(np.median(more) / 10 / np.median(before)),
        "blocks_ms": {"without": before.tolist(), "with": after.tolist()},
    }


def of_the_sampler():
    """The share of a core that a UtilizationLogger's threads take at 1 Hz, files and NVML included.

    Nothing else runs meanwhile: fit waits in its first step.
    """
    with tempfile.TemporaryDirectory() as folder:
        waiting = Wait()
        net(16).fit(batches(), verbose=0, callbacks=[callbacks.UtilizationLogger(folder), waiting])
    return waiting.percent


class Wait(keras.callbacks.Callback):
    """Measures the CPU time of tfopt's threads while nothing else runs."""

    def on_train_batch_end(self, batch, logs=None):
        """Does it after the first step."""
        if batch == 0:
            time.sleep(2)  # the first sample looks for the devices
            started, before = time.perf_counter(), self._seconds()
            time.sleep(SAMPLER_SECONDS)
            self.percent = 100 * (self._seconds() - before) / (time.perf_counter() - started)

    def _seconds(self):
        ours = [thread for thread in threading.enumerate() if thread.name in ("tfopt-sampler", "tfopt-nvml")]
        clocks = [time.pthread_getcpuclockid(thread.ident) for thread in ours]
        return sum(map(time.clock_gettime, clocks))


def of_a_week():
    """MiB that a new process grows by while the callbacks take a week's samples of a GPU at 1 Hz, and its pace."""
    return float(subprocess.check_output([sys.executable, __file__, WEEK], text=True).split()[-1])


def take_a_week():
    """Prints how many MiB this process grows by."""
    feeding = Feed(WEEK_SECONDS)
    with tempfile.TemporaryDirectory() as folder:
        # To no files, which take a disk and no memory.
        loggers = (callbacks.UtilizationLogger, callbacks.ThroughputLogger)
        those = [one for one in all_callbacks(folder) if not isinstance(one, loggers)]
        net(16).fit(batches(), verbose=0, callbacks=[*(kind() for kind in loggers), *those, feeding])
    print(feeding.grown_mib)


class Feed(keras.callbacks.Callback):
    """Hands samples and the pace to the listeners in its fit, as the loggers would."""

    def __init__(self, samples):
        super().__init__()
        self.samples = samples

    def on_train_batch_end(self, batch, logs=None):
        """Does it after the first step."""
        if batch:
            return
        utilization, throughput = (
            find_source(kind, self) for kind in (callbacks.UtilizationLogger, callbacks.ThroughputLogger)
        )
        process, random = psutil.Process(), np.random.default_rng(0).integers(100, size=997).tolist()
        for number in range(self.samples):
            busy = random[number % len(random)]
            at = float(number)
            utilization._take((GpuSample(at, at, 0, "GPU-0", busy, 1000.0 + busy, 140e3, 5.0 * busy),))
            pace = {"step_time_ms": 1.0 + busy, "examples_per_second": 1e5 / (1 + busy), "input_wait_percent": busy}
            throughput.listeners({"time_seconds": at, "epoch": 0, "step": number, **pace})
            if number == 10_000:  # caches and pools are filled
                before = process.memory_info().rss
        self.grown_mib = (process.memory_info().rss - before) / 2**20


def to_begin_with():
    """Milliseconds of import and construction in new processes, beyond TensorFlow's and Keras' import.

    From compiled modules, as pip installs them: a first process compiles them.
    """
    with tempfile.TemporaryDirectory() as folder:
        environ = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": folder}
        command = [sys.executable, "-c", IMPORT]
        return [float(subprocess.check_output(command, text=True, env=environ)) for _ in range(6)][1:]


def main():
    """Measures all of it, and writes what there is after each part."""
    figures = {"on a step": {}}
    document = {"environment": environment(), "batch_size": BATCH, "figures": figures}

    def save(text):
        print(text, flush=True)
        if len(sys.argv) > 1:
            write_atomic(sys.argv[1], json.dumps(document, indent=1) + "\n")

    for name, sizes in reversed(NETS.items()):
        figure = figures["on a step"][name] = on_a_step(*sizes)
        for clock in ("wall", "thread"):
            one = figure[clock]
            low, high = one["interval_us"]
            more = f"{one['longer_us']:.1f} µs ({low:.1f} to {high:.1f}), {one['longer_percent']:.2f} %"
            save(f"{name}, {clock}: {more} of {one['step_ms']:.2f} ms")
        save(f"{name}: all threads of tfopt {figure['threads_percent']:.2f} % of a core")
    figures["sampler_percent_of_a_core"] = of_the_sampler()
    save(f"sampling: {figures['sampler_percent_of_a_core']:.2f} % of a core")
    figures["week_mib"] = of_a_week()
    save(f"a week: {figures['week_mib']:.1f} MiB")
    figures["import_ms"] = to_begin_with()
    figures["threads_left"] = [one.name for one in threading.enumerate() if one.name.startswith("tfopt-")]
    save(f"import and construction: {np.median(figures['import_ms']):.0f} ms")


if __name__ == "__main__":
    take_a_week() if sys.argv[1:] == [WEEK] else main()
