"""What the GPUs and the host do during `fit`."""

import math
import os
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import keras

from tfopt.callbacks.order import warn_of_earlier_loggers
from tfopt.callbacks.rows import RowWriter, check_formats, check_log_dir
from tfopt.hardware import GpuSample, GpuSampler
from tfopt.hardware.host import HostMeter

# Of a row's fields, those whose mean over an epoch says something: not the clock, not a counter, not a constant.
_SUMMARISED = (
    "gpu_utilization_percent",
    "gpu_memory_used_mib",
    "gpu_power_watts",
    "gpu_temperature_celsius",
    "sm_clock_mhz",
    "memory_clock_mhz",
    "pcie_rx_mib_per_second",
    "pcie_tx_mib_per_second",
    "host_cpu_percent",
    "host_memory_used_mib",
    "process_memory_mib",
)


class UtilizationLogger(keras.callbacks.Callback):
    """Logs what each GPU and the host do while `model.fit` runs, at regular times and as means per epoch.

    Readings are taken in a thread of their own; no training step waits for them, and nothing that goes wrong with them
    ends a training. Only the GPUs that this process may use are read. Without a GPU the host is logged alone. After a
    fit that was interrupted, sampling goes on until the next fit with this callback, or until nothing holds it.

    In `logs`, and so in Keras' history and in loggers that stand after this callback: the epoch's means over these
    GPUs of `gpu_utilization_percent`, `gpu_memory_used_mib`, `gpu_power_watts`, `gpu_temperature_celsius`,
    `sm_clock_mhz`, `memory_clock_mhz`, `pcie_rx_mib_per_second` and `pcie_tx_mib_per_second`, and of
    `host_cpu_percent`, `host_memory_used_mib` and `process_memory_mib`. What the device does not give is left out. An
    epoch shorter than the interval repeats the last reading.

    In files: `utilization.csv` and `utilization.jsonl`, a row for each reading and GPU with the fields of
    `tfopt.hardware.GpuSample`; an unknown value is empty or null. A second run appends.

    Args:
        log_dir: Folder for the files. None: only epoch logs.
        interval_seconds: Time between readings. Default 1.
        formats: Which files: "csv", "jsonl".

    Raises:
        ValueError: An unknown format, an interval that is not above 0, or a `log_dir` that can be no folder.

    Example:
        >>> model.fit(dataset, callbacks=[tfopt.callbacks.UtilizationLogger("logs")])
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str] | None = None,
        interval_seconds: float = 1.0,
        formats: Sequence[str] = ("csv", "jsonl"),
    ):
        super().__init__()
        self._log_dir = check_log_dir(log_dir)
        self._formats = check_formats(formats)
        self._interval_seconds = interval_seconds
        GpuSampler(interval_seconds)  # refuses what is no interval
        # Threads and locks are made by each fit, so that the callback can be copied.
        self._sampler: GpuSampler | None = None
        self._writer: RowWriter | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Starts sampling."""
        warn_of_earlier_loggers(self)
        self._stop()  # an exception ended the fit before, without on_train_end
        self._means = _Means()
        self._host = HostMeter()
        self._host.read()
        self._cpu_percent: dict[str, float] = {}
        if self._log_dir is not None:
            columns = [field.name for field in fields(GpuSample)]
            self._writer = RowWriter(self._log_dir, "utilization", self._formats, columns)
        # The rows are written as they come, so only the last is kept.
        self._sampler = GpuSampler(self._interval_seconds, keep=1, on_sample=_weakly(self)).start()
        # After an interrupted fit, whoever drops the callback ends its sampling.
        weakref.finalize(self, self._sampler.close)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Starts the epoch's means."""
        self._means.start()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the epoch's means to the logs."""
        if logs is None:
            return
        # A share of CPU time needs two readings some time apart, which epochs shorter than the interval do not have.
        percent = self._host.read().host_cpu_percent
        if percent is not None:
            self._cpu_percent = {"host_cpu_percent": percent}
        logs.update(self._cpu_percent | self._means.values())

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Ends sampling."""
        self._stop()

    def _stop(self) -> None:
        if self._sampler is not None:
            self._sampler.close()
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _take(self, rows: Sequence[GpuSample]) -> None:
        """Runs in the sampler's thread."""
        self._means.add(rows)
        writer = self._writer
        if writer is not None:
            for row in rows:
                writer.write(row.to_dict())


def _weakly(logger: UtilizationLogger) -> Callable[[Sequence[GpuSample]], None]:
    """Hands rows to the logger as long as somebody else holds it: the sampler's thread must not keep it alive."""
    reference = weakref.ref(logger)

    def take(rows: Sequence[GpuSample]) -> None:
        held = reference()
        if held is not None:
            held._take(rows)

    return take


class _Means:
    """Means of readings that one thread adds and another one takes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[str, list[float]] = {}
        self._last: dict[str, list[float]] = {}

    def start(self) -> None:
        """Starts anew, with the last reading for what has none yet."""
        with self._lock:
            self._seen = {}

    def add(self, rows: Sequence[GpuSample]) -> None:
        """Adds one reading: a row for each GPU."""
        reading: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for name in _SUMMARISED:
            for row in rows:
                value = getattr(row, name)
                if value is not None and math.isfinite(value):
                    reading[name][0] += value
                    reading[name][1] += 1
        with self._lock:
            self._last = dict(reading)
            for name, (total, count) in reading.items():
                before = self._seen.get(name, [0.0, 0.0])
                self._seen[name] = [before[0] + total, before[1] + count]

    def values(self) -> dict[str, float]:
        """The means since `start`, or of the last reading where there was none since."""
        with self._lock:
            return {name: total / count for name, (total, count) in (self._last | self._seen).items()}
