"""Warns when the GPU idles, or another metric is beyond its bound for too long."""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import keras
import tensorflow as tf

from tfopt.callbacks.alert.bounds import DEFAULT_BELOW, Episode, Sustained, make_bound
from tfopt.callbacks.shared.background import Background
from tfopt.callbacks.shared.progress import SECONDS_SINCE_STEP, Progress
from tfopt.callbacks.shared.reading_sources import THROUGHPUT_KEYS, Listeners, find_source, subscribe
from tfopt.callbacks.shared.running_fit import Callback, end_with_fit, replicas_of
from tfopt.callbacks.throughput_logger import ThroughputLogger
from tfopt.callbacks.utilization_logger import UtilizationLogger
from tfopt.causes.alert_causes import Situation, likely_cause
from tfopt.causes.readings import GPU_KEYS, HOST_KEYS, RunningMeans, Sums, Throttling
from tfopt.checks import number
from tfopt.errors import unknown_name
from tfopt.hardware import GpuSample
from tfopt.model.batches import steps_at_once
from tfopt.model.layers import computing_layers
from tfopt.warn import warn_once

_KEPT = 100
_METRICS = (*GPU_KEYS, *HOST_KEYS, *THROUGHPUT_KEYS, SECONDS_SINCE_STEP)
# The first step traces and compiles, which takes minutes for a large model.
_PATIENCE_AT_FIRST = 5.0
_RATES = ("examples_per_second", "tokens_per_second", "model_tflops_per_second", "mfu_percent")
_log = logging.getLogger("tfopt")


@dataclass(frozen=True, slots=True)
class Alert:
    """A metric that was beyond its bound for too long."""

    text: str
    """What was expected, what was found, and the likely cause with its remedy."""
    metric: str
    value: float
    """The metric's mean over that time, in its unit."""
    gpu_index: int | None
    """As in TensorFlow's `GPU:index`; None for a metric of the host or the training."""
    seconds: float
    """How long the metric was beyond its bound."""
    cause: str
    """The likely cause in words, or that no known cause fits."""

    def __str__(self) -> str:
        return self.text

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as JSON values."""
        return asdict(self)


class UtilizationAlert(Callback):
    """Warns, stops or calls a function when a metric is beyond a bound for a while, and names the likely cause.

    Use it for training that nobody watches: for a GPU that idles, steps that slow down, memory that fills up, or a
    `fit` that hangs. GPU metrics are judged separately for each GPU that TensorFlow may use. The time counts from the
    end of the first step, which traces and compiles, and includes validation and the time between epochs. After an
    alert, the metric must first be back within its bound, by a margin, for as long before the next one.

    Args:
        metric: A number of `tfopt.hardware.GpuSample`, one of `ThroughputLogger` (`step_time_ms`,
            `examples_per_second`, `input_wait_percent`, `mfu_percent`, …), or "seconds_since_step", how long no step of
            training or validation has ended. The latter is also judged in the first step, with five times the bound.
        below: Lower bound, in the metric's unit. Default 50 for "gpu_utilization_percent" and "sm_active_percent",
            required for other metrics unless `above` is given.
        above: Upper bound, in place of `below`.
        for_seconds: How long without a break. Default 60, longer than most validations and checkpoints.
        action: "warn" logs a warning (logger "tfopt"); "stop" also ends the training after the current step. A function
            is called with the `Alert` in its own thread.

    Raises:
        ValueError: If the metric or action is unknown, there is not exactly one bound, or the time is not above 0.
        TypeError: If a bound or the time is not a number.

    Example:
        >>> alert = tfopt.callbacks.UtilizationAlert("step_time_ms", above=200, for_seconds=30, action="stop")
        >>> hang = tfopt.callbacks.UtilizationAlert("seconds_since_step", above=120, for_seconds=10)
        >>> model.fit(dataset, callbacks=[alert, hang])
    """

    def __init__(
        self,
        metric: str = "gpu_utilization_percent",
        below: float | None = DEFAULT_BELOW,
        above: float | None = None,
        for_seconds: float = 60.0,
        action: str | Callable[[Alert], object] = "warn",
    ):
        super().__init__()
        if metric not in _METRICS:
            raise unknown_name("metric", metric, _METRICS)
        if not callable(action) and action not in ("warn", "stop"):
            raise unknown_name("alert action (or a function of the alert)", action, ("warn", "stop"))
        self._metric = metric
        self._bound = make_bound(metric, below, above)
        self._for_seconds = number("for_seconds", for_seconds, "Give seconds.", above=0)
        self._action = action
        self._ending = ExitStack()
        self._progress = Progress()
        self._background: Background | None = None
        self._throughput: ThroughputLogger | None = None
        self._lock: threading.Lock | None = None  # of a fit, so that the callback can be copied
        self.alerts: tuple[Alert, ...] = ()
        """The last 100 alerts of the last `fit`."""
        self.listeners = Listeners()
        """Called with each alert as it is raised, in the thread that takes the readings."""

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Subscribes to readings."""
        self._end()  # if an exception ended the previous fit
        self.alerts = ()
        self._known = False
        self._progress = Progress()
        self._lock = threading.Lock()
        self._pace: Mapping[str, Any] = {}  # ThroughputLogger's last figures
        self._unknown_since: float | None = None
        self._rules: dict[int | None, Sustained] = {}
        self._throttling, self._means = Throttling(), RunningMeans()
        self._replicas = replicas_of(self.model)
        self._explained: dict[tuple[int, ...], int] = {}  # GPUs with one and the same cause: that of the alert
        self._start: Sums = {}  # readings before the end of the first step
        self._since: dict[int | None, Sums] = {}  # readings before the metric went beyond its bound
        self._float32, self._memory_grows = _computes_in_float32(self.model), _memory_grows()
        self._background = Background("alert action", self._action if callable(self._action) else _warn)
        end_with_fit(self, self._background.close)
        self._ending.callback(self._background.close)
        self._throughput = find_source(ThroughputLogger, self)
        subscribe(self, {UtilizationLogger: self._take_samples, ThroughputLogger: self._take_throughput}, self._ending)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes what fit is doing."""
        self._progress.begin_epoch(((self.params or {}).get("steps") or 0) - 1)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes when a step has ended."""
        self._progress.end_step(batch)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Notes what fit is doing."""
        self._progress.phase = "validation"

    def on_test_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes when a step of validation begins."""
        self._progress.begin_validation_step()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes what fit is doing."""
        self._progress.phase = "between epochs"

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Ends, after the queued alerts were acted upon."""
        self._end()

    def _end(self) -> None:
        self._ending.close()
        self._background = self._throughput = self._lock = None

    def _take_samples(self, rows: tuple[GpuSample, ...]) -> None:
        """Runs in the sampler's thread."""
        host, visible = rows[0], None if self._replicas is None else self._replicas.visible
        # tf.config.set_visible_devices hides GPUs that are read all the same.
        rows = tuple(row for row in rows if visible is None or row.index is None or row.index in visible)
        for row in rows:  # without a GPU one of the host alone, whose time passes too
            reasons = self._throttling.reasons(row)
            # For a low clock the power cap is an answer however little it slows the GPU.
            self._means.add_gpu(row, row.throttle_reasons if self._metric == "sm_clock_mhz" else reasons)
        if self._metric in GPU_KEYS:
            for row in rows:
                self._take(row.index, getattr(row, self._metric))
        elif self._metric in HOST_KEYS:
            self._take(None, getattr(host, self._metric))
        elif self._metric == SECONDS_SINCE_STEP:
            self._take(None, self._progress.seconds_since_step)
        else:
            self._take_step_under_way()

    def _take_throughput(self, row: Mapping[str, Any]) -> None:
        """Runs in the training thread, about once a second."""
        self._pace = row
        self._means.add_input_wait(row.get("input_wait_percent"), row.get("window_seconds", 1.0))
        if self._metric in THROUGHPUT_KEYS:
            self._take(None, row.get(self._metric))

    def _take_step_under_way(self) -> None:
        """Judges a pace by the step under way once that alone puts it beyond its bound: no figures come in a hang."""
        progress, throughput = self._progress, self._throughput
        if progress.stepped_at is None or throughput is None or progress.phase != "training":
            return
        seconds, steps = time.monotonic() - progress.step_began_at, steps_at_once(self.model)
        pace: float | None = None
        if self._metric.startswith("step_time"):
            pace = 1000 * seconds / steps  # at least
        elif self._metric in _RATES and throughput.batch_size and seconds > 0:
            rate, before = throughput.batch_size * steps / seconds, self._pace.get("examples_per_second")
            value = self._pace.get(self._metric)
            # At most. What the model computes per example stays the same.
            pace = rate if self._metric == _RATES[0] else value * rate / before if value and before else None
        if pace is not None and self._bound.exceeded_by(pace):
            self._take(None, pace)

    def _take(self, gpu_index: int | None, value: float | None) -> None:
        lock, background = self._lock, self._background
        if lock is None or background is None or background.closed:
            return
        now = time.monotonic()
        with lock:  # the training and the sampler's thread both judge a pace
            if self._progress.stepped_at is None:
                self._start = self._means.moment()
                if (
                    self._metric != SECONDS_SINCE_STEP
                    or value is None
                    or value <= _PATIENCE_AT_FIRST * self._bound.value
                ):
                    return
            self._warn_if_unknown(value, now)
            rule = self._rules.setdefault(gpu_index, Sustained(self._bound, self._for_seconds))
            episode = rule.take(value, now)
            since = self._since.get(gpu_index, self._start)
            if not rule.counting:
                self._since[gpu_index] = self._means.moment()
        alert = None if episode is None else self._alert(gpu_index, episode, since)
        if alert is not None:
            self._raise_alert(alert, background)

    def _raise_alert(self, alert: Alert, background: Background) -> None:
        self.alerts = (*self.alerts, alert)[-_KEPT:]
        if self._action == "stop":
            self.model.stop_training = True
        background.put(alert)
        self.listeners(alert)

    def _alert(self, gpu_index: int | None, episode: Episode, since: Sums) -> Alert | None:
        """The alert; None if that of another GPU has told the same cause and stands."""
        stalled, phase, callback = self._standstill()
        cause = likely_cause(
            Situation(
                self._metric,
                self._bound.above,
                self._means.since(since),
                gpu_index=gpu_index,
                replicas=self._replicas,
                float32=self._float32,
                memory_grows=self._memory_grows,
                stalled_seconds=stalled,
                phase=phase,
                callback=callback,
            )
        )
        if gpu_index is not None and cause.gpus:
            told = self._explained.setdefault(cause.gpus, gpu_index)
            if told != gpu_index and self._rules[told].reported:
                return None
            self._explained[cause.gpus] = gpu_index
        where = "" if gpu_index is None else f" of GPU:{gpu_index}"
        found = f"{episode.mean:.4g}" if abs(episode.mean) < 1000 else f"{episode.mean:,.0f}"
        text = (
            f"Expected {self._metric}{where} to be {self._bound}. Found {found} on average for "
            f"{episode.seconds:.0f} s. {cause.text}"
        )
        if self._action == "stop":
            text += ' The training is stopped (action="stop").'
        return Alert(text, self._metric, episode.mean, gpu_index, episode.seconds, cause.text)

    def _standstill(self) -> tuple[float | None, str, str | None]:
        """How long no step has ended, if unusually long, and what fit is doing."""
        progress, asked = self._progress, self._metric == SECONDS_SINCE_STEP
        without = progress.seconds_since_step
        stalled = without if asked or progress.stepped_at is None else time.monotonic() - progress.stepped_at
        if not asked and stalled < self._for_seconds / 2:
            return None, progress.phase, None
        if not asked and without < self._for_seconds / 2:  # the steps of validation end
            return stalled, progress.phase, None
        return stalled, *progress.standstill()

    def _warn_if_unknown(self, value: float | None, now: float) -> None:
        """Warns that a metric without a reading so far cannot raise an alert."""
        self._known = self._known or value is not None
        if self._known:
            return
        if self._unknown_since is None:
            self._unknown_since = now
        if now - self._unknown_since >= self._for_seconds:
            text = (
                f"Expected readings of {self._metric}. Found none for {self._for_seconds:g} s, so UtilizationAlert "
                "cannot raise an alert; the training goes on. Choose a metric that is logged here."
            )
            warn_once(f"no {self._metric} for UtilizationAlert", text)


def _warn(alert: Alert) -> None:
    _log.warning("%s", alert.text)


def _computes_in_float32(model: keras.Model | None) -> bool:
    dtypes = {layer.compute_dtype for layer in computing_layers(model)} if model is not None else set()
    return "float32" in dtypes and not dtypes & {"float16", "bfloat16"}


def _memory_grows() -> bool:
    try:
        devices = tf.config.list_physical_devices("GPU")
        return bool(devices) and all(tf.config.experimental.get_memory_growth(device) for device in devices)
    except (RuntimeError, ValueError):  # the devices' settings differ
        return False
