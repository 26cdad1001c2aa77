"""What all of tfopt's callbacks cost `fit`: on each step, in their own threads, at the end, in memory, to begin with.

    python benchmarks/callback_cost.py [RESULTS.json]

Prints the figures, and writes them with the raw samples and the environment, part by part. NVML is a stand-in with
eight GPUs (tests/support/fake_nvml.py): a driver's own time is not in the figures. The goals, with all callbacks on at
1 Hz: at most 20 µs of CPU on a step of half a millisecond and 0.5 % on one of 5 ms, against the same fit without them,
all threads of the process included; sampling under 1 % of a core; under 100 ms at the end of fit; a week's readings
under 50 MB; import and construction under 50 ms beyond Keras'.
"""

import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import harness
import keras
import numpy as np
import psutil
import tensorflow as tf

from tfopt import callbacks
from tfopt.bench import isolated
from tfopt.callbacks.shared.reading_sources import find_source
from tfopt.hardware import GpuSample
from tfopt.hardware.nvml import driver

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from fake_nvml import GPM, FakeGpu, FakeNvml

GPUS = 8
BATCH = 32
# Name: width of the dense layers, whether XLA compiles the step, steps of a fit, pairs of fits.
NETS = {"0.5 ms, XLA": (16, True, 4000, 10), "0.5 ms": (16, False, 4000, 25), "5 ms": (1100, False, 400, 25)}
WARM_UP = 200  # steps of each fit that are not measured
SAMPLER_SECONDS = 20
STARTS = 6  # processes that import; the first is not measured
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


def stand_in():
    """Puts eight GPUs in the place of NVML."""
    nvml = FakeNvml()
    nvml.gpus += [FakeGpu(uuid=f"GPU-{number}", gpm=GPM) for number in range(GPUS)]
    driver._door = driver.Nvml(load=nvml.load, clock=time.monotonic)


def all_callbacks(folder):
    """All but PrecisionMonitor, which keeps to a share of the time, as a training would have them."""
    formats = ("csv", "jsonl", "tensorboard")
    return [
        callbacks.UtilizationLogger(folder, formats=formats),
        callbacks.ThroughputLogger(folder, formats=formats),
        callbacks.CompilationLogger(),
        callbacks.LossScaleLogger(folder, formats=formats),
        callbacks.UtilizationAlert("host_cpu_percent", below=None, above=1000, for_seconds=5),
        callbacks.StepProfiler(folder, start_step=None),
        callbacks.PrometheusExporter(Path(folder) / "training.prom"),
        callbacks.ReportWriter(Path(folder) / "report.html"),
        callbacks.TrackerLogger(NoTracker()),
    ]


def net(width, jit_compile=False):
    """Two dense layers with a metric, compiled."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(width, activation="relu") for _ in range(2)]
    model = keras.Sequential([keras.Input((64,)), *layers, keras.layers.Dense(4)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=jit_compile)
    return model


def batches():
    """Batches of noise, cached in memory."""
    random = np.random.default_rng(0)
    arrays = random.random((64 * BATCH, 64), "float32"), random.integers(4, size=64 * BATCH)
    return tf.data.Dataset.from_tensor_slices(arrays).batch(BATCH, drop_remainder=True).cache().prefetch(4)


class Clocks(keras.callbacks.Callback):
    """Reads the clocks after the warm-up and the last step: the wall's, and the CPU's of the process and its threads.

    In both arms: without any callback, Keras would read the logs in another thread.
    """

    def __init__(self, steps):
        super().__init__()
        self._steps = steps

    def on_train_batch_end(self, batch, logs=None):
        """Reads them."""
        if batch + 1 == WARM_UP:
            self._began = self._read()
            self._threads_began = cpu_seconds()
        elif batch + 1 == self._steps:
            a_step = 1e6 / (self._steps - WARM_UP)
            self.us = a_step * (self._read() - self._began)
            before = self._threads_began
            self.threads_us = {name: a_step * (now - before.get(name, 0.0)) for name, now in cpu_seconds().items()}

    def _read(self):
        return np.array([time.perf_counter(), time.thread_time(), time.process_time()])


def cpu_seconds():
    """The CPU time of each of tfopt's threads."""
    found = {}
    for thread in threading.enumerate():
        if thread.name.startswith("tfopt-"):
            seconds = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
            found[thread.name] = found.get(thread.name, 0.0) + seconds
    return found


def on_a_step(width, jit_compile, steps, pairs):
    """What a step of fit takes longer with all callbacks than without, in fits with and without them in turn."""
    model, data = net(width, jit_compile), batches().repeat()
    samples = {"without": [], "with": []}
    threads_us, closing_us = {}, {}
    for number in range(2 * pairs + 2):
        with tempfile.TemporaryDirectory() as folder:
            arm = ("without", "with")[number % 2]
            clocks = Clocks(steps)
            those = all_callbacks(folder) if arm == "with" else []
            for one in those if number >= 2 else ():
                one.on_train_end = timed(one.on_train_end, closing_us.setdefault(type(one).__name__, []))
            model.fit(data, steps_per_epoch=steps, verbose=0, shuffle=False, callbacks=[*those, clocks])
        if number >= 2:  # the first pair compiles
            samples[arm].append(clocks.us)
            for name, us in clocks.threads_us.items():
                threads_us.setdefault(name, []).append(us)
    before, after = (np.array(samples[arm]) for arm in ("without", "with"))
    figures = {"steps_per_fit": steps - WARM_UP, **by_callback(model, data)}
    figures["threads_us"] = {name: float(np.median(us)) for name, us in threads_us.items()}
    figures["closing_ms"] = {name: float(np.median(us)) / 1000 for name, us in closing_us.items()}
    for column, clock in enumerate(("wall", "training thread", "process")):
        figures[clock] = longer(before[:, column], after[:, column])
    return figures


def longer(before, after):
    """The medians of a step's time and of what it takes longer with the callbacks, with an interval."""
    more = after - before
    return {
        "step_us": float(np.median(before)),
        "longer_us": float(np.median(more)),
        "interval_us": harness.interval(np.median, more),
        "longer_percent": float(100 * np.median(more) / np.median(before)),
        "fits_us": {"without": before.tolist(), "with": after.tolist()},
    }


def by_callback(model, data):
    """The time that each callback's hooks take on a step, in µs: the median, and the mean with what is not done often.

    Rows and listeners are among the latter.
    """
    with tempfile.TemporaryDirectory() as folder:
        those = all_callbacks(folder)
        taken = {type(one).__name__: ([], []) for one in those}
        for one in those:
            begin, end = taken[type(one).__name__]
            one.on_train_batch_begin = timed(one.on_train_batch_begin, begin)
            one.on_train_batch_end = timed(one.on_train_batch_end, end)
        model.fit(data, steps_per_epoch=WARM_UP + 1000, verbose=0, shuffle=False, callbacks=those)
    empty = []
    nothing = timed(lambda batch, logs=None: None, empty)
    for batch in range(WARM_UP + 1000):
        nothing(batch, logs=None)

    def us(of):
        nothing = of(empty[WARM_UP:])
        return {name: sum(max(0.0, of(hook[WARM_UP:]) - nothing) for hook in both) for name, both in taken.items()}

    return {"hooks_us": us(np.median), "hooks_mean_us": us(np.mean)}


def timed(function, seconds):
    """The function, with the µs of each call noted."""

    def call(*args, **kwargs):
        began = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            seconds.append(1e6 * (time.perf_counter() - began))

    return call


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
            started, before = time.perf_counter(), sum(cpu_seconds().values())
            time.sleep(SAMPLER_SECONDS)
            self.percent = 100 * (sum(cpu_seconds().values()) - before) / (time.perf_counter() - started)


def of_a_week(send, seconds):
    """MiB that a new process grows by while the callbacks take a week's samples of a GPU at 1 Hz, and its pace.

    In a process of its own: what others have freed would hide the growth.
    """
    stand_in()
    feeding = Feed(seconds)
    with tempfile.TemporaryDirectory() as folder:
        # To no files, which take a disk and no memory.
        loggers = (callbacks.UtilizationLogger, callbacks.ThroughputLogger)
        those = [one for one in all_callbacks(folder) if not isinstance(one, loggers)]
        net(16).fit(batches(), verbose=0, callbacks=[*(kind() for kind in loggers), *those, feeding])
    return feeding.grown_mib


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
            throughput.listeners({"time_seconds": at, "elapsed_seconds": at, "epoch": 0, "step": number, **pace})
            if number == min(10_000, self.samples // 2):  # caches and pools are filled
                before = process.memory_info().rss
        self.grown_mib = (process.memory_info().rss - before) / 2**20


def to_begin_with():
    """Milliseconds of import and construction in new processes, beyond TensorFlow's and Keras' import.

    From compiled modules, as pip installs them: a first process compiles them.
    """
    with tempfile.TemporaryDirectory() as folder:
        environ = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": folder}
        command = [sys.executable, "-c", IMPORT]
        return [float(subprocess.check_output(command, text=True, env=environ)) for _ in range(STARTS)][1:]


def main():
    """Measures all of it, and writes what there is after each part."""
    figures = {"on a step": {}}
    results = harness.parser(__doc__).parse_args().results
    document = harness.document(stand_in_gpus=GPUS, batch_size=BATCH, figures=figures)
    stand_in()

    def save(text):
        print(text, flush=True)
        harness.write(results, document)

    for name, sizes in reversed(NETS.items()):
        figure = figures["on a step"][name] = on_a_step(*sizes)
        for clock in ("wall", "training thread", "process"):
            one = figure[clock]
            low, high = one["interval_us"]
            more = f"{one['longer_us']:.1f} µs ({low:.1f} to {high:.1f}), {one['longer_percent']:.2f} %"
            save(f"{name}, {clock}: {more} of {one['step_us']:.0f} µs")
        for part, values in figure.items():
            if part in ("hooks_us", "hooks_mean_us", "threads_us", "closing_ms"):
                what, _, unit = part.rpartition("_")
                save(f"{name}, {what}: {', '.join(f'{one} {value:.2f}' for one, value in values.items())} {unit}")
    figures["sampler_percent_of_a_core"] = of_the_sampler()
    save(f"sampling: {figures['sampler_percent_of_a_core']:.2f} % of a core")
    figures["week_mib"] = isolated.call(of_a_week, WEEK_SECONDS, seconds=3600)
    save(f"a week: {figures['week_mib']:.1f} MiB")
    figures["import_ms"] = to_begin_with()
    figures["threads_left"] = [one.name for one in threading.enumerate() if one.name.startswith("tfopt-")]
    save(f"import and construction: {np.median(figures['import_ms']):.0f} ms")


if __name__ == "__main__":
    main()
