"""What tfopt's callbacks cost `fit`: on each step, in the sampler's thread, in memory over a week, and to begin with.

    python benchmarks/callback_cost.py [RESULTS.json]

Prints the figures, and writes them with the raw samples and the environment. The goals, with all of them on at 1 Hz: at
most 0.5 % on a step of 5 ms and 20 µs on one of half a millisecond, against the same fit without them, in turn; the
sampler's thread under 1 % of a core; a week's readings under 50 MB; import and construction under 50 ms beyond Keras'.
"""

import json
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
from tfopt.callbacks.sources import source
from tfopt.files import write_atomic
from tfopt.hardware import GpuSample
from tfopt.measure import FitTimer, environment, interleave

STEPS = 1000
BATCH = 32
# Name: width of the dense layers and turns; short turns, as the speed of a shared machine drifts within seconds.
NETS = {"0.5 ms": (16, 15), "5 ms": (1100, 9)}
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


class Clock:
    """Wall time for a FitTimer, and beside it the CPU time of the process, which neighbours disturb less."""

    def __init__(self):
        self._seconds = []
        self.turns_ms = []

    def __call__(self):
        self._seconds.append(time.process_time())
        return time.perf_counter()

    def end_turn(self, times):
        """Keeps the CPU time of a step of the turn that has just been timed."""
        blocks = len(times.repeats_ms[-1])
        seconds = self._seconds[-1] - self._seconds[-1 - blocks]
        self.turns_ms.append(1000 * seconds / (blocks * times.steps_per_sample))


def on_a_step(width, repeats):
    """What a step of fit takes longer with the callbacks than without, in turn: by the wall, and of CPU time."""
    clocks = {"without": Clock(), "with": Clock()}
    with tempfile.TemporaryDirectory() as folder:
        chosen = {"without": [], "with": all_callbacks(folder)}
        timers = {
            name: FitTimer(net(width), batches(), callbacks=those, clock=clocks[name]) for name, those in chosen.items()
        }

        def turn(name):
            times = timers[name](STEPS)
            clocks[name].end_turn(times)
            return times

        times = interleave({name: lambda name=name: turn(name) for name in chosen}, repeats=repeats)
    # Means, not medians: what is done once a second falls into few of a turn's blocks.
    wall = {name: [float(np.mean(turn)) for turn in times[name].repeats_ms] for name in chosen}
    cpu = {name: clocks[name].turns_ms[-repeats:] for name in chosen}
    return {"wall": longer(**wall), "cpu": longer(**cpu), "times": {name: one.to_dict() for name, one in times.items()}}


def longer(without, **others):
    """The medians of a step's time and of what it takes longer with the callbacks, with an interval."""
    before, after = np.array(without), np.array(others["with"])
    more = 1000 * (after - before)
    drawn = np.random.default_rng(0).integers(len(more), size=(2000, len(more)))
    return {
        "step_ms": float(np.median(before)),
        "longer_us": float(np.median(more)),
        "interval_us": [float(end) for end in np.percentile(np.median(more[drawn], axis=1), (2.5, 97.5))],
        "longer_percent": float(100 * np.median(more / 1000 / before)),
        "turns_ms": {"without": list(without), "with": list(others["with"])},
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
            source(kind, self) for kind in (callbacks.UtilizationLogger, callbacks.ThroughputLogger)
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
    """Milliseconds of import and construction in new processes, beyond TensorFlow's and Keras' import."""
    return [float(subprocess.check_output([sys.executable, "-c", IMPORT], text=True)) for _ in range(5)]


def main():
    """Measures all of it."""
    figures = {"on a step": {name: on_a_step(*sizes) for name, sizes in NETS.items()}}
    for name, figure in figures["on a step"].items():
        for clock in ("wall", "cpu"):
            one = figure[clock]
            low, high = one["interval_us"]
            more = f"{one['longer_us']:.1f} µs ({low:.1f} to {high:.1f}), {one['longer_percent']:.2f} %"
            print(f"{name}, {clock}: {more} of {one['step_ms']:.2f} ms", flush=True)
    figures["sampler_percent_of_a_core"] = of_the_sampler()
    print(f"sampling: {figures['sampler_percent_of_a_core']:.2f} % of a core", flush=True)
    figures["week_mib"] = of_a_week()
    print(f"a week: {figures['week_mib']:.1f} MiB", flush=True)
    figures["import_ms"] = to_begin_with()
    print(f"import and construction: {np.median(figures['import_ms']):.0f} ms")
    figures["threads_left"] = [one.name for one in threading.enumerate() if one.name.startswith("tfopt-")]
    if len(sys.argv) > 1:
        document = {"environment": environment(), "steps": STEPS, "batch_size": BATCH, "figures": figures}
        write_atomic(sys.argv[1], json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    take_a_week() if sys.argv[1:] == [WEEK] else main()
