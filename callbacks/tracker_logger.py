"""Logs epochs and readings to an experiment tracker."""

import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

from tfopt.callbacks.shared.background import Background
from tfopt.callbacks.shared.reading_sources import THROUGHPUT_KEYS, finite, subscribe, throughput_weight
from tfopt.callbacks.shared.running_fit import Callback, end_with_fit, most_steps, steps_trained
from tfopt.callbacks.throughput_logger import ThroughputLogger
from tfopt.callbacks.utilization_logger import UtilizationLogger
from tfopt.causes.readings import GPU_KEYS, HOST_KEYS, UNAVERAGED_KEYS, SampleSpans
from tfopt.checks import number
from tfopt.hardware import GpuSample

_QUEUED = 64
_STEP = "tfopt/step"


class TrackerLogger(Callback):
    """Logs epochs and readings to an experiment tracker, such as a Weights & Biases run.

    Epoch logs keep their names, including those of callbacks earlier in the list. About every `interval_seconds` come
    the means over the time since, and over this process's GPUs, under `live/`: `live/gpu_utilization_percent`,
    `live/host_cpu_percent`, `live/step_time_ms`, … Only finite numbers are sent.

    The step is the optimizer's step count. It never decreases, not even from one `fit` with this callback to the next.
    For W&B it is a metric, `tfopt/step`, and the x axis of all others: W&B drops logs whose own step goes back, as it
    would beside a callback that logs every batch.

    Args:
        tracker: Its `log` is called as `log(values, step=step)`, in its own thread; as `log(values)`, with the step
            among the values, if it has a method `define_metric`. While it hangs, 64 logs wait and the rest are dropped.
        interval_seconds: Time between readings. Default 10, which a week of training turns into 60,000 points.

    Raises:
        TypeError: If the tracker has no method `log`, or the interval is not a number.
        ValueError: If the interval is not above 0.

    Example:
        >>> run = wandb.init(project="photos")
        >>> model.fit(dataset, callbacks=[tfopt.callbacks.TrackerLogger(run)])
    """

    def __init__(self, tracker: Any, *, interval_seconds: float = 10.0):
        super().__init__()
        if not callable(getattr(tracker, "log", None)):
            raise TypeError(
                f"Expected a tracker with a method log(dict, step). Received: {tracker!r}. Pass a W&B run, or an "
                "object whose log hands the numbers on."
            )
        self._tracker = tracker
        self._interval_seconds = number("interval_seconds", interval_seconds, "Give seconds.", above=0)
        self._step = self._before = 0
        self._most = sys.maxsize
        self._ending = ExitStack()
        self._background: Background | None = None
        self._means: _Means | None = None
        self.dropped = 0
        """How many logs of the last `fit` did not fit."""

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Subscribes to readings."""
        self._end()  # if an exception ended the previous fit
        self.dropped = 0
        self._begun = False
        self._before, self._most = self._step, most_steps(self)
        self._means, self._spans = _Means(time.monotonic()), SampleSpans()
        background = self._background = Background("tracker", _ordered_log(self._tracker), most=_QUEUED)
        end_with_fit(self, background.close)
        self._ending.callback(self._close, background)
        subscribe(self, {UtilizationLogger: self._take_samples, ThroughputLogger: self._take_throughput}, self._ending)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Continues the count of steps."""
        if not self._begun:
            self._begun = True
            # Not in on_train_begin: BackupAndRestore may follow this callback.
            self._step = max(self._step, steps_trained(self.model))
        self._before = self._step

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts steps."""
        self._step = self._before + min(batch + 1, self._most)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Logs the epoch."""
        self._before = self._step
        self._send(finite(logs or {}))

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Logs the rest, and waits for the tracker for up to 5 seconds."""
        self._end()

    def _end(self) -> None:
        self._ending.close()
        self._background = self._means = None

    def _close(self, background: Background) -> None:
        if self._means is not None:
            self._send(self._means.since(time.monotonic(), 0.0))
        background.close()
        self.dropped = background.dropped

    def _take_samples(self, rows: tuple[GpuSample, ...]) -> None:
        """Runs in the sampler's thread."""
        values = {key: [getattr(row, key) for row in rows] for key in GPU_KEYS if key not in UNAVERAGED_KEYS}
        values |= {key: [getattr(rows[0], key)] for key in HOST_KEYS}
        seconds = self._spans.seconds(rows[0])
        self._take((key, value, seconds) for key, found in values.items() for value in found)

    def _take_throughput(self, row: Mapping[str, Any]) -> None:
        """Runs in the training thread, about once a second."""
        self._take((key, row.get(key), throughput_weight(key, row)) for key in THROUGHPUT_KEYS)

    def _take(self, readings: Iterable[tuple[str, Any, float]]) -> None:
        means = self._means
        if means is not None:
            means.add(readings)
            self._send(means.since(time.monotonic(), self._interval_seconds))

    def _send(self, values: Mapping[str, float]) -> None:
        background = self._background
        if background is not None and values:
            background.put((values, self._step))


class _Means:
    """Weighted means of readings, added by two threads."""

    def __init__(self, now: float):
        self._lock = threading.Lock()  # held for microseconds only
        self._since = now
        self._seen: dict[str, tuple[float, float]] = {}

    def add(self, readings: Iterable[tuple[str, Any, float]]) -> None:
        """Adds readings: name, value and weight."""
        with self._lock:
            for key, given, weight in readings:
                for value in finite({key: given}).values():
                    total, weights = self._seen.get(key, (0.0, 0.0))
                    self._seen[key] = total + value * weight, weights + weight

    def since(self, now: float, seconds: float) -> dict[str, float]:
        """Returns and resets the means if the last reset was at least `seconds` ago, else nothing."""
        with self._lock:
            if now - self._since < seconds:
                return {}
            seen, self._seen, self._since = self._seen, {}, now
        return {f"live/{key}": total / weights for key, (total, weights) in seen.items()}


def _ordered_log(tracker: Any) -> Callable[[tuple[Mapping[str, float], int]], None]:
    """Returns a function that logs values and their step, never a step below the previous one: two threads send."""
    last = 0
    define = getattr(tracker, "define_metric", None)
    defined: set[str] = set()

    def log(item: tuple[Mapping[str, float], int]) -> None:
        nonlocal last
        values, step = item
        last = max(last, step)
        if define is None:
            tracker.log(dict(values), step=last)
            return
        tracker.log({**values, _STEP: last})
        new = [key for key in values if key not in defined]
        defined.update(new)
        for key in new:
            define(key, step_metric=_STEP)

    return log
