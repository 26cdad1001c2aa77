"""Logs what the GPUs and the host do during `fit`."""

import functools
import math
import os
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import fields
from typing import Any

from tfopt.callbacks.shared.reading_sources import Listeners
from tfopt.callbacks.shared.row_files import BackgroundRows, check_formats
from tfopt.callbacks.shared.run import COORDINATES, begin_run
from tfopt.callbacks.shared.running_fit import (
    Callback,
    EpochExamples,
    check_shown,
    end_with_fit,
    log_epoch,
    most_steps,
    steps_trained,
    warn_of_earlier_loggers,
)
from tfopt.callbacks.shared.workers import WorkerSummaries, worker_rank
from tfopt.causes.readings import GPU_KEYS, HOST_KEYS, UNAVERAGED_KEYS, SampleSpans, Throttling
from tfopt.checks import log_folder, number
from tfopt.hardware import GpuSample, GpuSampler
from tfopt.hardware.host_activity import HOST_RATES, HostMeter
from tfopt.warn import warn_once

_COLUMNS = tuple(dict.fromkeys((*COORDINATES, *(field.name for field in fields(GpuSample)))))
# An epoch's figures are this process's.
_NOT_AVERAGED = {*UNAVERAGED_KEYS, "gpu_memory_others_mib"}
_AVERAGED = tuple(key for key in (*GPU_KEYS, *HOST_KEYS) if key not in _NOT_AVERAGED)
# Of all samples and GPUs, logs hold the highest.
_PEAKS = {
    "gpu_memory_peak_mib": "gpu_memory_used_mib",
    "gpu_memory_allocated_peak_mib": "gpu_memory_allocated_peak_mib",
}
_LOGGED = (
    *_AVERAGED,
    *_PEAKS,
    "throttled_percent",
    "gpu_energy_joules",
    "gpu_energy_joules_per_thousand_examples",
)


class UtilizationLogger(Callback):
    """Logs what each GPU and the host do during `model.fit`: rows at regular intervals, and figures per epoch.

    A thread samples the GPUs this process may use and the host; without a GPU, the host alone. Errors never end a
    training. docs/callbacks.md lists every key with its unit and source.

    In `logs`, and so in Keras' history and later loggers, for an epoch with its validation: means over time and GPUs,
    `gpu_memory_peak_mib`, `throttled_percent`, `gpu_energy_joules` and
    `gpu_energy_joules_per_thousand_examples`. What is unknown is left out. An epoch shorter than the interval repeats
    the last sample.

    In files (`utilization.csv`, `utilization.jsonl`): a row per sample and GPU with the fields of
    `tfopt.hardware.GpuSample`; what is unknown is empty or null. For TensorBoard: curves `gpu0/…` per GPU and `host/…`
    over the training step. With several workers (TF_CONFIG) each writes its own files and a summary per epoch; the
    chief merges the summaries into `utilization-summary.json`.

    Args:
        log_dir: Folder for the files. Default None: only epoch logs.
        interval_seconds: Time between samples. Default 1.
        formats: Which files: "csv", "jsonl", "tensorboard".
        show: Which of the epoch's figures the progress bar prints. None: all.

    Raises:
        ValueError: If a format is unknown, the interval is not above 0, or `log_dir` cannot be a folder.
        TypeError: If `log_dir` is not a path, or the interval not a number.
        tfopt.errors.UnsupportedError: If TensorBoard is asked for and not installed.

    Example:
        >>> model.fit(dataset, callbacks=[tfopt.callbacks.UtilizationLogger("logs")])
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str] | None = None,
        interval_seconds: float = 1.0,
        formats: Sequence[str] = ("csv", "jsonl"),
        *,
        show: Collection[str] | None = ("gpu_utilization_percent", "gpu_memory_peak_mib"),
    ):
        super().__init__()
        self._show = check_shown(show, _LOGGED)
        self._log_dir = log_folder(log_dir)
        self._formats = check_formats(formats)
        self._interval_seconds = number("interval_seconds", interval_seconds, "Give seconds.", above=0)
        # Each fit creates its threads and locks, so that the callback can be copied.
        self._end: Callable[[], None] | None = None
        self._first_step = self._step = 0
        self._writer: BackgroundRows | None = None
        self._summaries: WorkerSummaries | None = None
        self.listeners = Listeners()
        """Called with each sample's rows (`tuple[GpuSample, ...]`, one per GPU), in the sampler's thread."""

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Starts sampling."""
        warn_of_earlier_loggers(self)
        self._stop()  # if an exception ended the previous fit
        self._readings = EpochReadings()
        self._host = HostMeter()
        self._host.read()
        self._host_rates: dict[str, float] = {}
        self._examples = EpochExamples(self.model)
        self._epoch: int | None = None
        self._first_step = self._step = steps_trained(self.model)
        self._most = most_steps(self)
        self._gpus = 0
        self._run = begin_run(self)
        if self._log_dir is not None:
            self._writer = BackgroundRows(self._log_dir, "utilization", self._formats, _COLUMNS)
            worker = worker_rank()
            self._summaries = WorkerSummaries(self._log_dir, worker) if worker.task in worker.tasks else None
        sampler = GpuSampler(self._interval_seconds, keep=1, on_sample=_weakly(self))
        self._end = functools.partial(_close, sampler, self._writer, self._summaries)
        end_with_fit(self, self._end)
        self._sampling_since = self._run.elapsed_seconds
        try:
            sampler.start()
        except RuntimeError as error:
            warn_once(
                "sampler thread",
                f"Expected to start a thread that reads the GPUs. Found: {error}. The training goes on, and nothing is "
                "sampled. Check the process limit (ulimit -u; pids.max of the control group).",
            )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Starts the epoch's figures."""
        self._epoch = epoch
        # BackupAndRestore may have restored the optimizer's count; the optimizer does not count skipped steps.
        self._first_step = self._step = max(self._step, steps_trained(self.model))
        self._examples.start((self.params or {}).get("steps"))
        self._readings.start()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts steps."""
        if self._end is None:  # a loop without on_train_begin
            return
        self._step = self._first_step + min(batch + 1, self._most)
        if batch >= self._examples.due:
            self._examples.look(batch)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Counts the epoch's examples before validation resets their count."""
        if self._end is not None and self._epoch is not None:
            self._examples.look_before_validation(self._step - self._first_step)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the epoch's figures to the logs."""
        if logs is None or self._end is None:
            return
        # A rate needs two readings some time apart: epochs shorter than the interval have no new one.
        now = self._host.read()
        rates = {name: getattr(now, name) for name in HOST_RATES}
        self._host_rates |= {name: rate for name, rate in rates.items() if rate is not None}
        figures = self._host_rates | self._readings.values()
        joules = figures.get("gpu_energy_joules")
        examples = self._examples.examples(self._step - self._first_step)
        if joules is not None and examples:
            figures["gpu_energy_joules_per_thousand_examples"] = joules / examples * 1000
        log_epoch(self, logs, figures, self._show)
        if self._summaries is not None:
            self._summaries.put(epoch, figures, gpus=self._gpus)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Ends sampling."""
        self._stop()

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the threads, locks and files, which belong to a fit."""
        of_a_fit = {"_readings", "_host"}
        state = {name: value for name, value in self.__dict__.items() if name not in of_a_fit}
        return state | {"_end": None, "_writer": None, "_summaries": None}

    def _stop(self) -> None:
        end, self._end = self._end, None
        if end is not None:
            end()
        self._writer = self._summaries = None

    def _take(self, rows: Sequence[GpuSample]) -> None:
        """Runs in the sampler's thread."""
        self._gpus = sum(row.uuid is not None for row in rows)
        self._readings.add(rows)
        self.listeners(rows)
        writer = self._writer
        if writer is None:
            return
        where = self._run.coordinates(epoch=self._epoch, step=self._step)
        for row in rows:
            when = {
                "time_seconds": row.time_seconds,
                "elapsed_seconds": self._sampling_since + row.elapsed_seconds,
            }
            writer.write(row.to_dict() | where | when, curves=_curves(row, with_host=row is rows[0]))


def _close(sampler: GpuSampler, writer: BackgroundRows | None, summaries: WorkerSummaries | None) -> None:
    sampler.close()
    if writer is not None:
        writer.close()
    if summaries is not None:
        summaries.close()


def _curves(row: GpuSample, *, with_host: bool) -> dict[str, Any]:
    """A row's readings by TensorBoard tag."""
    gpu = {} if row.index is None else {f"gpu{row.index}/{name}": getattr(row, name) for name in GPU_KEYS}
    host = {f"host/{name}": getattr(row, name) for name in HOST_KEYS} if with_host else {}
    return gpu | host


def _weakly(logger: UtilizationLogger) -> Callable[[Sequence[GpuSample]], None]:
    """Passes rows to the logger without keeping it alive, so that the sampler ends with it."""
    reference = weakref.ref(logger)

    def take(rows: Sequence[GpuSample]) -> None:
        held = reference()
        if held is not None:
            held._take(rows)

    return take


class EpochReadings:
    """Sums up an epoch's readings without keeping them. One thread adds while another takes the figures."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[float, float, float]] = {}  # integral over time, its seconds, and the maximum
        self._last: dict[str, tuple[float, float, float]] = {}
        self._spans = SampleSpans()
        self._powers: dict[str, MeanPower] = {}
        self._throttling = Throttling()
        self._began = time.monotonic()

    def start(self) -> None:
        """Begins an epoch. Until it has a reading, the last one stands."""
        with self._lock:
            self._seen = {}
            self._began = time.monotonic()
            for power in self._powers.values():
                power.start()

    def add(self, rows: Sequence[GpuSample]) -> None:
        """Adds one sample: a row per GPU."""
        reading: dict[str, list[float]] = defaultdict(list)
        seconds = self._spans.seconds(rows[0])
        for row in rows:
            for name, value in self._numbers(row):
                reading[name].append(value)
        with self._lock:
            self._last = {
                name: (sum(values) * seconds, len(values) * seconds, max(values)) for name, values in reading.items()
            }
            for name, (total, span, highest) in self._last.items():
                total_before, span_before, highest_before = self._seen.get(name, (0.0, 0.0, -math.inf))
                self._seen[name] = total_before + total, span_before + span, max(highest_before, highest)
            for row in rows:
                if row.uuid is not None:
                    power = self._powers.setdefault(row.uuid, MeanPower())
                    power.add(row.elapsed_seconds, joules=row.gpu_energy_joules, watts=row.gpu_power_watts)

    def values(self) -> dict[str, float]:
        """Returns the epoch's figures as finite numbers; those of the last sample if there was none since `start`."""
        with self._lock:
            sums = self._last | self._seen
            figures = {name: total / span for name, (total, span, _) in sums.items()}
            figures |= {peak: sums[name][2] for peak, name in _PEAKS.items() if name in sums}
            watts = [power.watts() for power in self._powers.values()]
            seconds = time.monotonic() - self._began
        known = [value for value in watts if value is not None]
        if known and len(known) == len(watts):
            figures["gpu_energy_joules"] = sum(known) * seconds
        return figures

    def _numbers(self, row: GpuSample) -> Iterator[tuple[str, float]]:
        for name in _AVERAGED:
            value = getattr(row, name)
            if value is not None and math.isfinite(value):
                yield name, value
        reasons = self._throttling.reasons(row)
        if reasons is not None:
            yield "throttled_percent", 100.0 * bool(reasons)


class MeanPower:
    """The mean power of one GPU, from its energy counter or from power readings.

    It is the energy counter's increase over the time between two readings of it. For a GPU without a counter (before
    Volta) power readings are integrated by trapezoids. That is less exact: NVML averages power over up to a second, and
    some GPUs sample only part of the time (Yang et al., "Part-time Power Measurements", 2023).
    """

    def __init__(self) -> None:
        self._reading: tuple[float, float | None, float | None] = (0.0, None, None)
        self._counter: tuple[float, float] | None = None  # its last known reading, which may be older
        self.start()

    def start(self) -> None:
        """Restarts from the last reading."""
        self._first = self._counter
        self._went_back = False
        self._integral = self._integrated_seconds = 0.0

    def add(self, elapsed_seconds: float, *, joules: float | None, watts: float | None) -> None:
        """Adds a reading of the counter and the power, None if unknown."""
        before, _, watts_before = self._reading
        self._reading = (elapsed_seconds, joules, watts)
        if joules is not None:
            self._went_back |= self._counter is not None and joules < self._counter[1]
            self._counter = (elapsed_seconds, joules)
            self._first = self._first or self._counter
        if watts is not None and watts_before is not None:
            self._integral += (watts + watts_before) / 2 * (elapsed_seconds - before)
            self._integrated_seconds += elapsed_seconds - before

    def watts(self) -> float | None:
        """Returns the mean since the start, or the last power reading if there was no second one since.

        None if the counter went back, as after a driver reload, or the GPU's last reading said nothing: it is lost.
        """
        _, joules, watts = self._reading
        if self._went_back or (joules is None and watts is None):
            return None
        if self._first and self._counter and self._counter[0] > self._first[0]:
            return (self._counter[1] - self._first[1]) / (self._counter[0] - self._first[0])
        return self._integral / self._integrated_seconds if self._integrated_seconds > 0 else watts
