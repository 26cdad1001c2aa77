"""A word when the GPU idles, or another metric is beyond its bound for too long."""

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import keras
import tensorflow as tf

from tfopt.callbacks.alerts.bounds import DEFAULT_BELOW, make_bound
from tfopt.callbacks.alerts.likely_cause import Situation, likely_cause
from tfopt.callbacks.alerts.running_means import RunningMeans, Sums
from tfopt.callbacks.alerts.sustained import Episode, Sustained
from tfopt.callbacks.background import Background, end_with_fit
from tfopt.callbacks.readings import GPU_KEYS, HOST_KEYS, take_readings
from tfopt.callbacks.sources import Listeners
from tfopt.callbacks.throttling import Throttling
from tfopt.callbacks.throughput_logger import THROUGHPUT_KEYS
from tfopt.checks import number
from tfopt.errors import unknown_name
from tfopt.hardware import GpuSample
from tfopt.warn import warn_once

_KEPT = 100
_log = logging.getLogger("tfopt")


@dataclass(frozen=True, slots=True)
class Alert:
    """A metric that was beyond its bound for too long.

    Attributes:
        text: What was expected, what was found, and the likely cause with its remedy.
        metric: Which metric.
        value: Its mean over that time, in its unit.
        gpu_index: Of which GPU, as in TensorFlow's `GPU:index`. None: a metric of the host or of the training.
        seconds: How long.
        cause: The likely cause in words, or that none is known to fit.
    """

    text: str
    metric: str
    value: float
    gpu_index: int | None
    seconds: float
    cause: str

    def __str__(self) -> str:
        return self.text

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)


class UtilizationAlert(keras.callbacks.Callback):
    """Warns, stops or calls a function when a metric is below or above a bound for a time, and says the likely cause.

    Use it for trainings that nobody watches: for a GPU that idles, for steps that become slow, for a memory that fills.
    Readings come from the `UtilizationLogger` and `ThroughputLogger` in fit's list, or from ones that it adds, about
    once a second. A GPU's metric is looked at for each GPU by itself. The time runs from the end of the first step on,
    which traces and compiles. Validation and what callbacks do between epochs counts as well: a GPU that idles there
    idles. Once told, a metric is told again only after it was back within its bound for as long, by a tenth of the
    bound (of a percentage, by half of the way to 0 or 100 if that is less). What is unknown is a break; a metric that
    nothing gives, such as a GPU's where there is none, is told once.

    Args:
        metric: A number of `tfopt.hardware.GpuSample`, or one of `ThroughputLogger`: `step_time_ms`,
            `examples_per_second`, `input_wait_percent`, `mfu_percent`, … Default: "gpu_utilization_percent".
        below: Lower bound, in the metric's unit. Default 50, of "gpu_utilization_percent" and "sm_active_percent".
        above: Upper bound; one of the two.
        for_seconds: How long without a break. Default 60.
        action: "warn" logs a warning (logger "tfopt"), each time. "stop" does, and ends the training after the step
            that runs. A function is called with the `Alert` in a thread of its own, for which no step waits; while one
            call hangs, 16 more wait and the rest is dropped. Its errors are reported once.
        clock: Seconds, monotonic.

    Attributes:
        alerts: The last 100 alerts of the last `fit`, a tuple of `Alert`.
        listeners: Told of each alert as it is found, in the thread that takes the readings.

    Raises:
        ValueError: An unknown metric or action, no bound or two, or a time that is not above 0.
        TypeError: A bound or time that is no number; True and False are none.

    Example:
        >>> alert = tfopt.callbacks.UtilizationAlert("step_time_ms", above=200, for_seconds=30, action="stop")
        >>> model.fit(dataset, callbacks=[alert])
    """

    def __init__(
        self,
        metric: str = "gpu_utilization_percent",
        below: float | None = DEFAULT_BELOW,
        above: float | None = None,
        for_seconds: float = 60.0,
        action: str | Callable[[Alert], object] = "warn",
        *,
        clock: Callable[[], float] = time.monotonic,
    ):
        super().__init__()
        if metric not in (*GPU_KEYS, *HOST_KEYS, *THROUGHPUT_KEYS):
            raise unknown_name("metric", metric, (*GPU_KEYS, *HOST_KEYS, *THROUGHPUT_KEYS))
        if not callable(action) and action not in ("warn", "stop"):
            raise unknown_name("alert action (or a function of the alert)", action, ("warn", "stop"))
        self._metric = metric
        self._bound = make_bound(metric, below, above)
        self._for_seconds = number("for_seconds", for_seconds, "Give seconds.", above=0)
        self._action = action
        self._clock = clock
        self._ending = ExitStack()
        self._background: Background | None = None
        self.alerts: tuple[Alert, ...] = ()
        self.listeners = Listeners()

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begins to look at readings."""
        self._end()  # an exception ended the fit before, without on_train_end
        self.alerts = ()
        self._known = False
        self._stepped_at: float | None = None  # None until the first step has ended
        self._phase = "training"
        self._unknown_since: float | None = None
        self._rules: dict[int | None, Sustained] = {}
        self._throttling, self._means = Throttling(), RunningMeans()
        self._start: Sums = {}  # what was read before the end of the first step
        self._since: dict[int | None, Sums] = {}  # and before the metric went beyond its bound
        self._float32, self._memory_grows = _computes_in_float32(self.model), _memory_grows()
        self._background = Background("alert action", self._action if callable(self._action) else _warn)
        end_with_fit(self, self._background.close)
        self._ending.callback(self._background.close)
        self._ending.callback(take_readings(self, self._take_samples, self._take_throughput))

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes what fit is doing."""
        self._phase = "training"

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes when a step has ended."""
        self._stepped_at = self._clock()

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Notes what fit is doing."""
        self._phase = "validation"

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes what fit is doing."""
        self._phase = "between epochs"

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Ends it, after the alerts that are still to be acted upon."""
        self._end()

    def _end(self) -> None:
        self._ending.close()
        self._background = None

    def _take_samples(self, rows: tuple[GpuSample, ...]) -> None:
        """Runs in the sampler's thread."""
        for row in rows:
            if row.index is not None:
                reasons = self._throttling.reasons(row)
                # Whoever asks why a clock is low is told of the power cap, too, however low that is.
                self._means.add_gpu(row, row.throttle_reasons if self._metric == "sm_clock_mhz" else reasons)
        if self._metric in GPU_KEYS:
            for row in rows:
                self._take(row.index, getattr(row, self._metric))
        elif self._metric in HOST_KEYS:
            self._take(None, getattr(rows[0], self._metric))

    def _take_throughput(self, row: Mapping[str, Any]) -> None:
        """Runs in the training thread, about once a second."""
        self._means.add_throughput(row)
        if self._metric in THROUGHPUT_KEYS:
            self._take(None, row.get(self._metric))

    def _take(self, gpu_index: int | None, value: float | None) -> None:
        background = self._background
        if self._stepped_at is None:
            self._start = self._means.moment()
        if self._stepped_at is None or background is None or background.closed:
            return
        now = self._clock()
        self._tell_if_unknown(value, now)
        if gpu_index not in self._rules:
            bound = self._bound
            rule = Sustained(bound.value, above=bound.above, margin=bound.margin, for_seconds=self._for_seconds)
            self._rules[gpu_index] = rule
        rule = self._rules[gpu_index]
        episode = rule.take(value, now)
        alert = None if episode is None else self._alert(gpu_index, episode)
        if not rule.counting:
            self._since[gpu_index] = self._means.moment()
        if alert is None:
            return
        self.alerts = (*self.alerts, alert)[-_KEPT:]
        if self._action == "stop":
            self.model.stop_training = True
        background.put(alert)
        self.listeners(alert)

    def _alert(self, gpu_index: int | None, episode: Episode) -> Alert:
        since = self._since.get(gpu_index, self._start)
        stalled = self._clock() - (self._stepped_at or 0.0)
        cause = likely_cause(
            Situation(
                self._metric,
                self._bound.above,
                self._means.gpus(since, only=gpu_index),
                self._means.throughput(since),
                float32=self._float32,
                memory_grows=self._memory_grows,
                stalled_seconds=stalled if stalled >= self._for_seconds / 2 else None,
                phase=self._phase,
            )
        )
        where = "" if gpu_index is None else f" of GPU:{gpu_index}"
        text = (
            f"Expected {self._metric}{where} to be {self._bound}. Found "
            f"{episode.mean:.4g} on average for {episode.seconds:.0f} s. {cause}"
        )
        if self._action == "stop":
            text += ' The training is stopped (action="stop").'
        return Alert(text, self._metric, episode.mean, gpu_index, episode.seconds, cause)

    def _tell_if_unknown(self, value: float | None, now: float) -> None:
        """Says that a metric which nothing has given for so long will raise no alert."""
        self._known = self._known or value is not None
        if self._known:
            return
        if self._unknown_since is None:
            self._unknown_since = now
        if now - self._unknown_since >= self._for_seconds:
            text = (
                f"Expected readings of {self._metric}. Found none for {self._for_seconds:g} s: UtilizationAlert has "
                "nothing to tell, and the training goes on. Choose a metric that is logged here."
            )
            warn_once(f"no {self._metric} for UtilizationAlert", text)


def _warn(alert: Alert) -> None:
    _log.warning("%s", alert.text)


def _computes_in_float32(model: keras.Model) -> bool:
    from tfopt.repairs import computing_layers  # here, as the repairs take a sixth of what all callbacks take to load

    dtypes = {layer.compute_dtype for layer in computing_layers(model)}
    return "float32" in dtypes and not dtypes & {"float16", "bfloat16"}


def _memory_grows() -> bool:
    try:
        devices = tf.config.list_physical_devices("GPU")
        return bool(devices) and all(tf.config.experimental.get_memory_growth(device) for device in devices)
    except (RuntimeError, ValueError):  # devices that are set up in unlike ways
        return False
