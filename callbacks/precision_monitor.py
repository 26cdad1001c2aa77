"""Compares a 16-bit training with float32 while it runs, on one batch."""

import math
import time
import warnings
from collections import deque
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import tensorflow as tf

from tfopt.callbacks.shared.running_fit import Callback, steps_trained, warn_of_earlier_loggers
from tfopt.checks import integer
from tfopt.errors import UnsupportedError, summarize_error
from tfopt.fit.launching import steps_ahead
from tfopt.model.batches import one_batch
from tfopt.model.layers import computing_layers
from tfopt.precision.gate.comparison import in_float32
from tfopt.precision.gate.layer_table import LayerPrecision, as_json
from tfopt.precision.gate.probe import NotFiniteError
from tfopt.precision.gate.repeated import Repeated, RepeatedComparison
from tfopt.precision.gate.verdict import CLEAN
from tfopt.precision.layer_policies import current_policy, is_16_bit
from tfopt.text import aligned, percent
from tfopt.warn import warn_once

# Of the time since the first comparison.
LARGEST_SHARE = 0.01
# A layer's own error has grown if it is this many times that of the first comparison,
GROWTH = 4.0
# and above this. Healthy layers, measured in both dtypes, stay below 0.071.
LEAST_GROWN = 0.1
KEYS = ("precision_own_error_percent", "precision_loss_drift_percent", "precision_monitor_percent")
"""What is added to an epoch's logs."""
_KEPT = 1000
_STRATEGIES = (tf.distribute.MirroredStrategy, tf.distribute.OneDeviceStrategy)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionReading:
    """One comparison of the model with float32."""

    step: int
    """Steps of this `fit` done by then."""
    layer: str
    """Path of the layer with the largest own error, of those whose input is right; empty if there is none."""
    own_error: float
    """Error of its output beyond what it inherits, relative to the output's norm."""
    loss_drift: float
    """Distance of the loss from float32's, relative to it or, if larger, to the loss of the first comparison."""
    seconds: float
    """How long the comparison took, without tracing."""
    problems: tuple[str, ...]
    """What is wrong, a sentence each."""


class PrecisionMonitor(Callback):
    """Compares a 16-bit training with float32 while it runs, and warns once, with the layer, if errors grow.

    Use it for what `tfopt.precision.check` cannot see before the first step: values that grow, a moving average that
    stops in bfloat16, a counter beyond 256. After the first step and then every `every_steps` steps, it runs the same
    batch through the current weights, forward and backward, in float32 and under the model's own policies. It warns of
    whatever `check` does not pass, of a layer whose own error has become 4 times that of the first comparison, and of
    variables such as moving averages that do not move as in float32.

    Training stays the same, bit for bit. Comparisons take at most 1 % of the time: if they would take more, they become
    rarer, and `str` says how rare. Tracing happens once, takes as long as for `check`, and does not count towards that
    share. The comparison needs about three times the memory of a float32 step on the batch.

    Epochs with a comparison add to `logs`, and so to Keras' history and later loggers: `precision_own_error_percent`,
    `precision_loss_drift_percent` and `precision_monitor_percent`, the share of the time.

    Args:
        data: One batch, (x, y[, sample_weight]), or a tf.data.Dataset whose first batch is read here. It must not be
            the very dataset given to `fit` if that shuffles: reading a shuffled dataset changes its next order.
        every_steps: Least number of steps between comparisons. Default 500.

    Raises:
        TypeError: If `data` is neither a dataset nor a batch, or `every_steps` not an integer.
        ValueError: If `every_steps` is below 1.
        tfopt.errors.PipelineError: If the dataset is empty.
        tfopt.errors.UnsupportedError: From `fit`, if the model has quantized layers or 16-bit weights, or runs under
            another strategy than MirroredStrategy.

    Example:
        >>> monitor = tfopt.callbacks.PrecisionMonitor((x[:64], y[:64]))
        >>> model.fit(dataset, callbacks=[monitor])
        >>> print(monitor)
    """

    def __init__(self, data: Any, *, every_steps: int = 500):
        super().__init__()
        self._every_steps = integer("every_steps", every_steps, "Give a number of steps.", least=1)
        self._batch = one_batch(data)
        self._comparison: RepeatedComparison | None = None
        self._first: dict[str, float] = {}
        self._cost = self._spent = self._since = 0.0
        self._steps = self._before_epoch = self._logged = 0
        self._due = math.inf
        self.readings: deque[PrecisionReading] = deque(maxlen=_KEPT)
        """The comparisons of the last `fit`, the latest 1,000."""

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Refuses models that cannot be compared."""
        if self.model is None:
            raise ValueError("Expected a model to compare. Found none. Pass model=… to keras.callbacks.CallbackList.")
        warn_of_earlier_loggers(self)
        self.readings.clear()
        self._steps = self._before_epoch = self._logged = 0
        self._due = 1.0
        self._spent, self._since = 0.0, time.perf_counter()
        self._warned = False
        strategy = self.model._distribute_strategy
        if strategy is not None and not isinstance(strategy, _STRATEGIES):
            raise UnsupportedError(
                f"Expected a model without a strategy, or under a MirroredStrategy, for PrecisionMonitor to compare. "
                f"Found {type(strategy).__name__}. Fit without PrecisionMonitor, and check the weights that were saved "
                "with tfopt.precision.check."
            )
        in_float32(self.model)
        if not any(is_16_bit(current_policy(layer)) for layer in computing_layers(self.model)):
            self._due = math.inf
            warnings.warn(
                "Expected layers that compute in 16 bits, for PrecisionMonitor to compare with float32. Found none. "
                "Remove PrecisionMonitor, or apply a 16-bit policy before fit.",
                stacklevel=2,
            )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Goes on counting steps."""
        self._before_epoch = self._steps

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Compares if it is time to, and there is time for it."""
        self._steps = self._before_epoch + batch + 1
        if self._steps >= self._due and not steps_ahead(self.model) and self._can_afford():
            self._compare()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the epoch's last comparison to the logs."""
        if logs is None or not self.readings or self.readings[-1].step <= self._logged:
            return
        last = self.readings[-1]
        self._logged = last.step
        shares = dict(zip(KEYS, (last.own_error, last.loss_drift, self.share), strict=True))
        logs |= {key: 100 * share for key, share in shares.items() if math.isfinite(share)}

    @property
    def share(self) -> float:
        """Share of the time since the first comparison that the later ones took, 0 to 1."""
        elapsed = time.perf_counter() - self._since
        return self._spent / elapsed if elapsed > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """JSON: `every_steps`, the share of the time, and the comparisons; null for numbers that are not finite."""
        readings = [asdict(reading) for reading in self.readings]
        document: dict[str, Any] = as_json(
            {"every_steps": self._every_steps, "share": self.share, "readings": readings}
        )
        return document

    def __str__(self) -> str:
        if not self.readings:
            return "No comparison with float32 yet."
        readings = [*self.readings]
        head = f"{len(readings)} comparison{'s' * (len(readings) > 1)} with float32, {percent(self.share)} of the time"
        gaps = [after.step - before.step for before, after in pairwise(readings)]
        if gaps and (mean := sum(gaps) / len(gaps)) > 1.1 * self._every_steps:
            head += f", every {mean:,.0f} steps instead of {self._every_steps:,} to stay below {percent(LARGEST_SHARE)}"
        shown = sorted({*range(3), *range(len(readings) - 9, len(readings))} & {*range(len(readings))})
        rows = [("step", "own error", "loss drift", "layer")]
        for reading in (readings[place] for place in shown):
            rows.append((f"{reading.step:,}", percent(reading.own_error), percent(reading.loss_drift), reading.layer))
        problems = [f"- step {one.step:,}: {problem}" for one in readings if one.problems for problem in one.problems]
        return "\n".join([f"{head}.", *problems[:3], *aligned(rows, texts=0)])

    def _can_afford(self) -> bool:
        return self._spent + self._cost <= LARGEST_SHARE * (time.perf_counter() - self._since)

    def _compare(self) -> None:
        steps_trained(self.model)  # waits for launched steps, whose time is not the comparison's
        started = time.perf_counter()
        try:
            traced = self._trace()
            if traced:
                started = time.perf_counter()  # the run after tracing shows what one costs
            found = self._comparison() if self._comparison else None
        except NotFiniteError as error:
            where = f", from {error.args[0]!r} on" if error.args[0] else ""
            self._warn(f"the loss or a gradient is NaN or infinite in float32 too{where}. No policy will help")
            self._due = math.inf
            return
        except Exception as error:  # noqa: BLE001 - whatever the user's layers raise; training goes on
            self._due = math.inf
            warn_once(
                "PrecisionMonitor",
                f"Expected a batch and a model that can be compared with float32. Found: {summarize_error(error)} "
                "PrecisionMonitor stops; training goes on. tfopt.precision.check(model, batch, {}) says more.",
            )
            return
        seconds = time.perf_counter() - started
        # Not only the last one's, which may have been quick by chance.
        self._cost = seconds if traced else max(seconds, 0.9 * self._cost)
        if traced:
            self._spent, self._since = 0.0, time.perf_counter()
        else:
            self._spent += seconds
        if found is not None:
            self._judge(found, seconds)
        self._due = self._steps + self._every_steps

    def _trace(self) -> bool:
        """Traces the comparison and runs it once, unless that was done for this model and its policies."""
        if self._comparison and self._comparison.model is self.model and self._comparison.is_current:
            return False
        self._comparison = RepeatedComparison(self.model, self._batch)
        self._first = {layer.path: layer.own_error for layer in _right(self._comparison())}
        return True

    def _judge(self, found: Repeated, seconds: float) -> None:
        layers = _right(found)
        worst = max(layers, key=lambda layer: layer.own_error, default=None)
        problems = found.problems or tuple(self._grown(layers))
        reading = PrecisionReading(
            step=self._steps,
            layer=worst.path if worst else "",
            own_error=worst.own_error if worst else 0.0,
            loss_drift=found.loss_drift,
            seconds=seconds,
            problems=problems,
        )
        if problems:
            more = f" ({len(problems) - 1} more: print the callback.)" if len(problems) > 1 else ""
            right = next((one.step for one in reversed(self.readings) if not one.problems), None)
            since = f" At step {right:,} nothing was wrong." if right is not None else ""
            self._warn(f"{problems[0]}{more}{since}")
        self.readings.append(reading)

    def _grown(self, layers: list[LayerPrecision]) -> list[str]:
        """Layers whose own error has grown since the first comparison, worst first."""
        grown = [x for x in layers if x.own_error > max(LEAST_GROWN, GROWTH * self._first.get(x.path, math.inf))]
        return [
            f"The own error of {layer.path!r} has grown from {percent(self._first[layer.path])} to "
            f"{percent(layer.own_error)} of its output's norm. Keep the layer in float32."
            for layer in sorted(grown, key=lambda layer: layer.own_error, reverse=True)
        ]

    def _warn(self, found: str) -> None:
        if self._warned:
            return
        self._warned = True
        warnings.warn(
            f"Expected the model to compute the same as in float32, apart from rounding. Found after step "
            f"{self._steps:,}: {found.rstrip('.')}. Look at the table of tfopt.precision.check(model, batch, {{}}), "
            "apply its fallback, and go on from weights saved before.",
            stacklevel=4,
        )


def _right(found: Repeated) -> list[LayerPrecision]:
    """The layers whose input is right, so that their own error means something."""
    return [x for x in found.report.layers if x.output and (not x.input or x.input.error <= CLEAN)]
