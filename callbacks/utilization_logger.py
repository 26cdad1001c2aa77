"""Logs what the GPUs and the host do during `fit`."""

import functools
import os
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import keras

from tfopt.callbacks.shared.reading_sources import Listeners
from tfopt.callbacks.shared.row_files import RowWriter, check_formats
from tfopt.callbacks.shared.running_fit import EpochExamples, end_with_fit, steps_trained, warn_of_earlier_loggers
from tfopt.callbacks.shared.worker_rank import worker_rank
from tfopt.callbacks.utilization.epoch_readings import EpochReadings
from tfopt.callbacks.utilization.worker_summaries import WorkerSummaries
from tfopt.checks import log_folder, number
from tfopt.hardware import GpuSample, GpuSampler
from tfopt.hardware.host_activity import HOST_FIELDS, HostMeter
from tfopt.hardware.nvml.gpu_reading import GPU_FIELDS
from tfopt.warn import warn_once

_COLUMNS = tuple(field.name for field in fields(GpuSample))


class UtilizationLogger(keras.callbacks.Callback):
    """Logs what each GPU and the host do during `model.fit`: rows at regular times, and figures per epoch.

    A thread samples the GPUs this process may use and the host; without a GPU, the host alone. Errors never end a
    training. docs/callbacks.md lists every key with its unit and source.

    In `logs`, and so in Keras' history and later loggers, for an epoch with its validation: means over the samples and
    GPUs, `gpu_memory_peak_mib`, `throttled_percent`, `gpu_energy_joules` and
    `gpu_energy_joules_per_thousand_examples`. What is unknown is left out. An epoch shorter than the interval repeats
    the last sample.

    In files (`utilization.csv`, `utilization.jsonl`): a row per sample and GPU with the fields of
    `tfopt.hardware.GpuSample`; what is unknown is empty or null. For TensorBoard: curves `gpu0/…` per GPU and `host/…`
    over the training step. With several workers (TF_CONFIG) each writes its own files and a summary per epoch; the
    chief merges the summaries into `utilization-summary.json`.

    Args:
        log_dir: Folder for the files. Default None: only epoch logs.
        interval_seconds: Time between samples. Default 1, which costs 0.1 % of a core.
        formats: Which files: "csv", "jsonl", "tensorboard".
        clock: Seconds, monotonic.

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
        clock: Callable[[], float] = time.monotonic,
    ):
        super().__init__()
        self._log_dir = log_folder(log_dir)
        self._formats = check_formats(formats)
        self._interval_seconds = number("interval_seconds", interval_seconds, "Give seconds.", above=0)
        self._clock = clock
        # Each fit creates its threads and locks, so that the callback can be copied.
        self._end: Callable[[], None] | None = None
        self._writer: RowWriter | None = None
        self._summaries: WorkerSummaries | None = None
        self.listeners = Listeners()
        """Called with each sample's rows (`tuple[GpuSample, ...]`, one per GPU), in the sampler's thread."""

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Starts sampling."""
        warn_of_earlier_loggers(self)
        self._stop()  # if an exception ended the previous fit
        self._readings = EpochReadings(self._clock)
        self._host = HostMeter(self._clock)
        self._host.read()
        self._host_rates: dict[str, float] = {}
        self._examples = EpochExamples(self.model)
        self._step = steps_trained(self.model)
        self._gpus = 0
        if self._log_dir is not None:
            self._writer = RowWriter(self._log_dir, "utilization", self._formats, _COLUMNS)
            worker = worker_rank()
            self._summaries = WorkerSummaries(self._log_dir, worker) if worker.task in worker.tasks else None
        sampler = GpuSampler(self._interval_seconds, keep=1, on_sample=_weakly(self), clock=self._clock)
        self._end = functools.partial(_close, sampler, self._writer, self._summaries)
        end_with_fit(self, self._end)
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
        # BackupAndRestore may have restored the optimizer's count; the optimizer does not count skipped steps.
        self._first_step = self._step = max(self._step, steps_trained(self.model))
        self._examples.start((self.params or {}).get("steps"))
        self._readings.start()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts steps."""
        self._step = self._first_step + batch + 1
        if batch >= self._examples.due:
            self._examples.look(batch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the epoch's figures to the logs."""
        if logs is None:
            return
        # A rate needs two readings some time apart: epochs shorter than the interval have no new one.
        now = self._host.read()
        rates = {name: getattr(now, name) for name in ("host_cpu_percent", "disk_read_mib_per_second")}
        self._host_rates |= {name: rate for name, rate in rates.items() if rate is not None}
        figures = self._host_rates | self._readings.values()
        joules = figures.get("gpu_energy_joules")
        examples = self._examples.examples(self._step - self._first_step)
        if joules is not None and examples:
            figures["gpu_energy_joules_per_thousand_examples"] = joules / examples * 1000
        logs.update(figures)
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
        self.listeners(rows)  # before writing: a disk may hang
        writer, step = self._writer, self._step
        if writer is not None:
            for row in rows:
                writer.write(row.to_dict(), step=step, curves=_curves(row, with_host=row is rows[0]))


def _close(sampler: GpuSampler, writer: RowWriter | None, summaries: WorkerSummaries | None) -> None:
    sampler.close()
    if writer is not None:
        writer.close()
    if summaries is not None:
        summaries.close()


def _curves(row: GpuSample, *, with_host: bool) -> dict[str, Any]:
    """A row's readings by TensorBoard tag."""
    gpu = {} if row.index is None else {f"gpu{row.index}/{name}": getattr(row, name) for name in GPU_FIELDS}
    host = {f"host/{name}": getattr(row, name) for name in HOST_FIELDS} if with_host else {}
    return gpu | host


def _weakly(logger: UtilizationLogger) -> Callable[[Sequence[GpuSample]], None]:
    """Passes rows to the logger without keeping it alive, so that the sampler ends with it."""
    reference = weakref.ref(logger)

    def take(rows: Sequence[GpuSample]) -> None:
        held = reference()
        if held is not None:
            held._take(rows)

    return take
