"""Epoch logs and readings for an experiment tracker."""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import keras

from tfopt.callbacks.background import Background, end_with_fit
from tfopt.callbacks.readings import GPU_KEYS, HOST_KEYS, finite, take_readings
from tfopt.callbacks.steps_trained import steps_trained
from tfopt.callbacks.throughput_logger import THROUGHPUT_KEYS
from tfopt.checks import number
from tfopt.hardware import GpuSample

_WAITING = 64
# A counter and a constant, whose means say nothing.
_NO_MEANS = ("gpu_energy_joules", "gpu_memory_total_mib")


class TrackerLogger(keras.callbacks.Callback):
    """Logs epochs and readings to a tracker: anything with a method `log(dict, step)`, as a Weights & Biases run is.

    Epoch logs go there at each epoch's end under their own names, those of callbacks before this one included. Readings
    go there about every `interval_seconds`, as the means since the last time over this process's GPUs, with `live/`
    before their names: `live/gpu_utilization_percent`, `live/host_cpu_percent`, `live/step_time_ms`, … They come from
    the `UtilizationLogger` and `ThroughputLogger` in fit's list, or from ones that it adds. Finite numbers only; what
    is unknown is left out.

    The step is that of the training: how many the optimizer had taken when `fit` began, and those since. It never goes
    back, from one `fit` with this callback to the next either: W&B ignores what does.

    The tracker is called in a thread of its own, for which no step waits: a tracker that hangs or raises is reported
    once, 64 logs wait for it, what does not fit is dropped, and at the end of `fit` it is waited for 5 seconds at most.

    Args:
        tracker: Its `log` is called as `log(values, step=step)`.
        interval_seconds: Time between readings. Default 10.
        clock: Seconds, monotonic.

    Attributes:
        dropped: How many logs did not fit, in the last `fit`.

    Raises:
        TypeError: A tracker without a method `log`, or an interval that is no number.
        ValueError: An interval that is not above 0.

    Example:
        >>> run = wandb.init(project="photos")
        >>> model.fit(dataset, callbacks=[tfopt.callbacks.TrackerLogger(run)])
    """

    def __init__(self, tracker: Any, *, interval_seconds: float = 10.0, clock: Callable[[], float] = time.monotonic):
        super().__init__()
        if not callable(getattr(tracker, "log", None)):
            raise TypeError(
                f"Expected a tracker with a method log(dict, step). Received: {tracker!r}. Pass a W&B run, or an "
                "object whose log hands the numbers on."
            )
        self._tracker = tracker
        self._interval_seconds = number("interval_seconds", interval_seconds, "Give seconds.", above=0)
        self._clock = clock
        self._step = 0
        self._ending = ExitStack()
        self._background: Background | None = None
        self._means: _Means | None = None
        self.dropped = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begins to take readings."""
        self._end()  # an exception ended the fit before, without on_train_end
        self.dropped = 0
        self._begun = False
        self._before = self._step
        self._means = _Means(self._clock())
        background = self._background = Background("tracker", _in_order(self._tracker), most=_WAITING)
        end_with_fit(self, background.close)
        self._ending.callback(self._close, background)
        self._ending.callback(take_readings(self, self._take_samples, self._take_throughput))

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts on from the steps before."""
        if not self._begun:
            self._begun = True
            # Here, not when fit begins: BackupAndRestore may stand behind this callback.
            self._step = max(self._step, steps_trained(self.model))
        self._before = self._step

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts the steps."""
        self._step = self._before + batch + 1

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Logs the epoch."""
        self._send(finite(logs or {}))

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Logs the rest, and waits a little for the tracker."""
        self._end()

    def _end(self) -> None:
        self._ending.close()
        self._background = self._means = None

    def _close(self, background: Background) -> None:
        if self._means is not None:
            self._send(self._means.since(self._clock(), 0.0))
        background.close()
        self.dropped = background.dropped

    def _take_samples(self, rows: tuple[GpuSample, ...]) -> None:
        """Runs in the sampler's thread."""
        values = [{key: getattr(row, key) for key in GPU_KEYS if key not in _NO_MEANS} for row in rows]
        self._take(*values, {key: getattr(rows[0], key) for key in HOST_KEYS})

    def _take_throughput(self, row: Mapping[str, Any]) -> None:
        """Runs in the training thread, about once a second."""
        self._take({key: row.get(key) for key in THROUGHPUT_KEYS})

    def _take(self, *readings: Mapping[str, Any]) -> None:
        means = self._means
        if means is not None:
            means.add(finite(reading) for reading in readings)
            self._send(means.since(self._clock(), self._interval_seconds))

    def _send(self, values: Mapping[str, float]) -> None:
        background = self._background
        if background is not None and values:
            background.put((values, self._step))


class _Means:
    """Means of readings, which two threads add to."""

    def __init__(self, now: float):
        self._lock = threading.Lock()  # held for microseconds only
        self._since = now
        self._seen: dict[str, tuple[float, int]] = {}

    def add(self, readings: Iterable[Mapping[str, float]]) -> None:
        with self._lock:
            for reading in readings:
                for key, value in reading.items():
                    total, count = self._seen.get(key, (0.0, 0))
                    self._seen[key] = total + value, count + 1

    def since(self, now: float, seconds: float) -> dict[str, float]:
        """Returns the means since the last time, if that is so many seconds ago; otherwise nothing."""
        with self._lock:
            if now - self._since < seconds:
                return {}
            seen, self._seen, self._since = self._seen, {}, now
        return {f"live/{key}": total / count for key, (total, count) in seen.items()}


def _in_order(tracker: Any) -> Callable[[tuple[Mapping[str, float], int]], None]:
    """Logs values with their step, or with that of the logs before if it is higher: two threads send them."""
    last = 0

    def log(item: tuple[Mapping[str, float], int]) -> None:
        nonlocal last
        values, step = item
        last = max(last, step)
        tracker.log(dict(values), step=last)

    return log
