"""XLA for a Keras model: on or off, decided by measuring both."""

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfopt.errors import UnsupportedError
from tfopt.measure import Comparison, StepTimer, StepTimes, compare, interleave

_DRIFT_STEPS = 4
_REPEATS = 5


def set_jit(model: keras.Model, on: bool) -> None:
    """Switches XLA on or off for a compiled model, from its next step on, fitted before or not.

    Weights, optimizer and metrics stay. (Setting `model.jit_compile` does nothing once the model was fitted.)

    Args:
        model: A compiled model.
        on: Whether `fit`, `evaluate` and `predict` run under XLA.

    Raises:
        ValueError: The model is not compiled.
        tfopt.errors.UnsupportedError: XLA is asked for and a layer does not support it, or the model runs eagerly.
    """
    if not model.compiled:
        raise ValueError(
            f"Expected a compiled model. Received: {model.name!r}, which is not compiled. "
            "Call model.compile(optimizer, loss) first."
        )
    reason = _unsupported(model) if on else None
    if reason:
        raise UnsupportedError(f"Expected a model that XLA can compile. Found: {reason} Leave XLA off for this model.")
    model.jit_compile = on
    model.train_function = model.test_function = model.predict_function = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JitDecision:
    """Whether XLA should be on for a model, and the measurement behind it.

    Attributes:
        enabled: Whether it should.
        reason: In words.
        comparison: How many times as fast the step ran with XLA, with its interval; None if it could not run.
        compile_seconds: What XLA added to the first step.
        break_even_steps: Steps after which compilation has paid for itself; None if it never does.
        drift: Distance between the weights after four steps with XLA and without, over the distance they travelled.
            With float32 rounding alone it stays below 0.001, with bfloat16 below 0.1; another computation gives 0.3
            and more. It is taken without dropout, whose masks XLA draws differently. None where it was not measured
            or the model draws other random numbers.
        off: The samples without XLA.
        on: The samples with XLA.
    """

    enabled: bool
    reason: str
    comparison: Comparison | None = None
    compile_seconds: float | None = None
    break_even_steps: int | None = None
    drift: float | None = None
    off: StepTimes | None = None
    on: StepTimes | None = None

    @property
    def speedup(self) -> float | None:
        """How many times as fast the step ran with XLA."""
        return self.comparison.ratio if self.comparison else None

    def apply(self, model: keras.Model) -> None:
        """Sets the model as decided."""
        set_jit(model, self.enabled)

    def to_dict(self) -> dict[str, Any]:
        """JSON, raw samples included."""
        plain = {name: getattr(self, name) for name in ("enabled", "reason", "speedup", "compile_seconds")}
        plain |= {"break_even_steps": self.break_even_steps, "drift": self.drift}
        nested = {name: getattr(self, name) for name in ("comparison", "off", "on")}
        return plain | {name: part and part.to_dict() for name, part in nested.items()}

    def __str__(self) -> str:
        return f"XLA {'on' if self.enabled else 'off'}: {self.reason}"


def decide(model: keras.Model, data: Any, steps: int = 30, *, tolerance: float | None = 0.1) -> JitDecision:
    """Measures the model's training step with XLA and without, in turn, and says which to use.

    XLA is worth it where the step is faster beyond doubt and computes the same. The model comes back as it was; call
    `.apply(model)` on the result. The batch measured is the first one: each further batch shape costs another
    compilation, so give `fit` batches of one shape (`build_pipeline(..., remainder="drop")`).

    Args:
        model: A compiled model.
        data: A tf.data.Dataset of batches or one batch: (x, y[, sample_weight]).
        steps: Steps to time with each setting.
        tolerance: The largest `drift` that counts as the same computation. None: decide by speed alone.

    Returns:
        The decision with its figures.

    Raises:
        ValueError, TypeError, tfopt.errors.PipelineError: As for `tfopt.measure.step_time`.

    Example:
        >>> decision = tfopt.xla.decide(model, dataset)
        >>> print(decision)
        XLA on: 1.9× (95 %: 1.88–1.93), faster; compiling took 6.1 s, paid back after 3,900 steps; drift 2e-05.
        >>> decision.apply(model)
    """
    timers = _timers(model, data)  # checks the arguments
    reason = _unsupported(model)
    if reason:
        return JitDecision(enabled=False, reason=reason)
    block = max(1, steps // _REPEATS)
    try:
        times = interleave({name: partial(timer, block) for name, timer in timers.items()}, _REPEATS)
        drift = None if tolerance is None else _drift(model, data, timers)
    except (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError) as error:
        return JitDecision(enabled=False, reason=f"XLA cannot compile this model: {_first_line(error)}")
    return _decided(times["off"], times["on"], drift, tolerance)


def _decided(off: StepTimes, on: StepTimes, drift: float | None, tolerance: float | None) -> JitDecision:
    comparison = compare(off, on)
    compile_seconds = max(0.0, on.first_step_seconds - off.first_step_seconds)
    gain_ms = off.median_ms - on.median_ms
    faster = comparison.verdict == "faster" and gain_ms > 0
    break_even = math.ceil(compile_seconds * 1000 / gain_ms) if faster else None
    paid = f"paid back after {break_even:,} steps" if break_even is not None else "never paid back"
    same, found = _same(drift, tolerance)
    return JitDecision(
        enabled=faster and same,
        reason=f"{comparison}; compiling took {compile_seconds:.2g} s, {paid}; {found}.",
        comparison=comparison,
        compile_seconds=compile_seconds,
        break_even_steps=break_even,
        drift=drift,
        off=off,
        on=on,
    )


def _same(drift: float | None, tolerance: float | None) -> tuple[bool, str]:
    """Whether XLA may count as computing the same, and why."""
    if tolerance is None:
        return True, "drift not measured"
    if drift is None:
        return False, "drift unknown, since the model draws random numbers outside dropout (tolerance=None: ignore it)"
    if drift > tolerance:
        return False, f"drift {drift:.1g}, above the tolerance of {tolerance:g}: it does not compute the same"
    return True, f"drift {drift:.1g}"


def _unsupported(model: keras.Model) -> str | None:
    """Why Keras would not run this model under XLA, or None."""
    if model.run_eagerly:
        return "the model runs eagerly (run_eagerly=True)."
    layers = [layer.name for layer in model._flatten_layers() if not layer.supports_jit]
    return f"layers that XLA does not support: {', '.join(layers)}." if layers else None


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _timers(model: keras.Model, data: Any) -> dict[str, StepTimer]:
    return {name: StepTimer(model, data, jit_compile=on) for name, on in (("off", False), ("on", True))}


def _drift(model: keras.Model, data: Any, timers: Mapping[str, StepTimer]) -> float | None:
    """The distance between two ends of a training over the distance travelled; None where it cannot be compared."""
    with ExitStack() as stack:
        if timers["off"].draws_random_numbers:
            stack.enter_context(_without_dropout(model))
            timers = _timers(model, data)
        off = timers["off"].weights_after(_DRIFT_STEPS)
        if timers["off"].draws_random_numbers:
            return None
        on = timers["on"].weights_after(_DRIFT_STEPS)
    start = [weight.numpy() for weight in model.trainable_variables]
    travelled, apart = _distance(off, start), _distance(on, off)
    return apart / travelled if travelled else math.inf if apart else 0.0


def _distance(a: list[Any], b: list[Any]) -> float:
    return math.sqrt(
        sum(float(np.sum((x.astype("float64") - y.astype("float64")) ** 2)) for x, y in zip(a, b, strict=True))
    )


@contextmanager
def _without_dropout(model: keras.Model) -> Iterator[None]:
    """Takes the random draws out of Keras' layers: XLA draws other numbers from the same seed.

    Either dropout mask is right, but two trainings that differ in their masks cannot be compared.
    """
    layers = [layer for layer in model._flatten_layers() if hasattr(layer, "seed_generator")]
    names = ("rate", "dropout", "recurrent_dropout", "stddev")
    rates = [(layer, name, getattr(layer, name)) for layer in layers for name in names if hasattr(layer, name)]
    try:
        for layer, name, _ in rates:
            setattr(layer, name, 0.0)
        yield
    finally:
        for layer, name, rate in rates:
            setattr(layer, name, rate)
