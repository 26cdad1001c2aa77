"""What the GPUs and the host do during `fit`."""

import functools
import os
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import keras

from tfopt.callbacks.background import end_with_fit
from tfopt.callbacks.epoch_examples import EpochExamples
from tfopt.callbacks.files.ranks import rank
from tfopt.callbacks.files.rows import RowWriter, check_formats
from tfopt.callbacks.order import warn_of_earlier_loggers
from tfopt.callbacks.sources import Listeners
from tfopt.callbacks.steps_trained import steps_trained
from tfopt.callbacks.utilization.epoch_readings import EpochReadings
from tfopt.callbacks.utilization.summaries import Summaries
from tfopt.checks import log_folder, number
from tfopt.hardware import GpuSample, GpuSampler
from tfopt.hardware.host_activity import HOST_FIELDS, HostMeter
from tfopt.hardware.nvml.reading import GPU_FIELDS
from tfopt.warn import warn_once

_COLUMNS = tuple(field.name for field in fields(GpuSample))


class UtilizationLogger(keras.callbacks.Callback):
    """Logs what each GPU and the host do while `model.fit` runs, at regular times and as figures per epoch.

    Readings are taken in a thread of their own; no training step waits for them, and nothing that goes wrong with them
    ends a training. Only the GPUs that this process may use are read. Without a GPU the host is logged alone. Where an
    exception ends a fit, sampling ends with it, as soon as nothing holds the exception's traceback.

    In `logs`, and so in Keras' history and in loggers that stand after this callback, of an epoch with its validation:

    - means over the readings and over these GPUs of `gpu_utilization_percent`, `sm_active_percent`,
      `sm_occupancy_percent`, `tensor_active_percent`, `dram_active_percent`, `gpu_memory_used_mib`,
      `gpu_memory_process_mib`, `gpu_power_watts`, `gpu_temperature_celsius`, `sm_clock_mhz`, `memory_clock_mhz`,
      `pcie_rx_mib_per_second`, `pcie_tx_mib_per_second`, `nvlink_rx_mib_per_second`, `nvlink_tx_mib_per_second`; and of
      `host_cpu_percent`, `host_memory_used_mib`, `process_memory_mib`, `disk_read_mib_per_second`;
    - `gpu_memory_peak_mib`: the most that was used of one GPU's memory, at the times of the readings;
    - `throttled_percent`: the share of readings in which heat, a hardware brake or a power cap held the
      clocks back, a power cap only if below three quarters of the highest clock seen;
    - `gpu_energy_joules`: each GPU's mean power times the epoch's duration, summed over these GPUs. The mean power is
      the difference of the energy counter from the last reading before the epoch to the last one in it, over the time
      between the two; without a counter, the power readings integrated over that time. Absent where a counter went
      back or a GPU was lost;
    - `gpu_energy_joules_per_thousand_examples`: that over the examples trained, in thousands, which Keras' own loss
      tracker counts; absent where a `train_step` of one's own does not update it. A process counts its own GPUs, and
      the examples of all: with several workers, add up the workers'.

    What the device does not give is left out. An epoch shorter than the interval repeats the last reading.

    In files: `utilization.csv` and `utilization.jsonl`, a row for each reading and GPU with the fields of
    `tfopt.hardware.GpuSample`; an unknown value is empty or null. A second run appends. For TensorBoard, event files in
    the folder `utilization`: curves `gpu0/…` for each GPU and `host/…` over the training step.

    Of several workers, as TF_CONFIG tells, each has files of its own, `utilization-worker1.csv`, and at the end of each
    epoch a summary, `utilization-summary-worker1.json`; the chief merges those there are, without waiting for any, into
    `utilization-summary.json`.

    Args:
        log_dir: Folder for the files. None: only epoch logs.
        interval_seconds: Time between readings. Default 1.
        formats: Which files: "csv", "jsonl", "tensorboard".
        clock: Seconds, monotonic.

    Attributes:
        listeners: Told of each sample's rows (`tuple[GpuSample, ...]`, one a GPU), in the sampler's thread.

    Raises:
        ValueError: An unknown format, an interval that is not above 0, or a `log_dir` that can be no folder.
        TypeError: `log_dir` is no path, or the interval no number.
        tfopt.errors.UnsupportedError: TensorBoard is asked for and not installed.

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
        # Threads and locks are made by each fit, so that the callback can be copied.
        self._end: Callable[[], None] | None = None
        self._writer: RowWriter | None = None
        self._summaries: Summaries | None = None
        self.listeners = Listeners()

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Starts sampling."""
        warn_of_earlier_loggers(self)
        self._stop()  # an exception ended the fit before, without on_train_end
        self._readings = EpochReadings(self._clock)
        self._host = HostMeter(self._clock)
        self._host.read()
        self._host_rates: dict[str, float] = {}
        self._examples = EpochExamples(self.model)
        self._step = steps_trained(self.model)
        self._gpus = 0
        if self._log_dir is not None:
            self._writer = RowWriter(self._log_dir, "utilization", self._formats, _COLUMNS)
            worker = rank()
            self._summaries = Summaries(self._log_dir, worker) if worker.task in worker.tasks else None
        # The rows are written as they come, so only the last is kept.
        sampler = GpuSampler(self._interval_seconds, keep=1, on_sample=_weakly(self), clock=self._clock)
        self._end = functools.partial(_close, sampler, self._writer, self._summaries)
        end_with_fit(self, self._end)
        try:
            sampler.start()
        except RuntimeError as error:
            warn_once(
                "sampler thread",
                f"Expected to start a thread that reads the GPUs. Found: {error}. The training goes on, and nothing is "
                "sampled. Look at the limit of processes (ulimit -u; pids.max of the control group).",
            )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Starts the epoch's figures."""
        # Again, since BackupAndRestore may stand behind this callback. A step skipped for overflow counts here only.
        self._first_step = self._step = max(self._step, steps_trained(self.model))
        self._examples.start((self.params or {}).get("steps"))
        self._readings.start()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes how far the training is."""
        self._step = self._first_step + batch + 1
        if batch >= self._examples.due:
            self._examples.look(batch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the epoch's figures to the logs."""
        if logs is None:
            return
        # A rate needs two readings some time apart, which epochs shorter than the interval do not have.
        now = self._host.read()
        rates = {name: getattr(now, name) for name in ("host_cpu_percent", "disk_read_mib_per_second")}
        self._host_rates |= {name: rate for name, rate in rates.items() if rate is not None}
        figures = self._host_rates | self._readings.values()
        joules, examples = (
            figures.get("gpu_energy_joules"),
            self._examples.examples(self._step - self._first_step),
        )
        if joules is not None and examples:
            figures["gpu_energy_joules_per_thousand_examples"] = joules / examples * 1000
        logs.update(figures)
        if self._summaries is not None:
            self._summaries.put(epoch, figures, gpus=self._gpus)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Ends sampling."""
        self._stop()

    def __getstate__(self) -> dict[str, Any]:
        """A copy begins as new: threads, locks and files belong to a fit."""
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
        self.listeners(rows)  # first: a disk may hang
        writer, step = self._writer, self._step
        if writer is not None:
            for row in rows:
                writer.write(row.to_dict(), step=step, curves=_curves(row, with_host=row is rows[0]))


def _close(sampler: GpuSampler, writer: RowWriter | None, summaries: Summaries | None) -> None:
    sampler.close()
    if writer is not None:
        writer.close()
    if summaries is not None:
        summaries.close()


def _curves(row: GpuSample, *, with_host: bool) -> dict[str, Any]:
    """A row's readings by TensorBoard's tags."""
    gpu = {} if row.index is None else {f"gpu{row.index}/{name}": getattr(row, name) for name in GPU_FIELDS}
    host = {f"host/{name}": getattr(row, name) for name in HOST_FIELDS} if with_host else {}
    return gpu | host


def _weakly(logger: UtilizationLogger) -> Callable[[Sequence[GpuSample]], None]:
    """Hands rows to the logger as long as somebody else holds it: the sampler's thread must not keep it alive."""
    reference = weakref.ref(logger)

    def take(rows: Sequence[GpuSample]) -> None:
        held = reference()
        if held is not None:
            held._take(rows)

    return take
