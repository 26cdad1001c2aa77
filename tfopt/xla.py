"""XLA for a Keras model: on or off, decided by measuring both."""

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfopt.errors import UnsupportedError
from tfopt.measure import Comparison, StepTimer, StepTimes, compare, interleave, one_batch

# Weights may stand still at first: float16 skips steps until its loss scale fits, accumulation applies every n-th.
_DRIFT_STEPS = (4, 64)
_REPEATS = 5


def set_jit(model: keras.Model, on: bool) -> None:
    """Switches XLA on or off for a compiled model, from its next step on, fitted before or not.

    Weights, optimizer and metrics stay. (Setting `model.jit_compile` does nothing once the model was fitted.)

    Args:
        model: A compiled model.
        on: Whether `fit`, `evaluate` and `predict` run under XLA.

    Raises:
        TypeError: `on` is no bool.
        ValueError: The model is not compiled.
        tfopt.errors.UnsupportedError: XLA is asked for and a layer does not support it, or the model runs eagerly.
    """
    if not model.compiled:
        raise ValueError(
            f"Expected a compiled model. Received: {model.name!r}, which is not compiled. "
            "Call model.compile(optimizer, loss) first."
        )
    if not isinstance(on, bool):
        raise TypeError(f"Expected True or False. Received: {on!r}. Let tfopt.xla.decide(model, data) choose.")
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
        drift: Distance between two trainings of four steps from one state, with XLA and without, over the distance
            travelled (after 64 steps, where four move nothing). It is taken on what the optimizer keeps of the
            gradients, or on the weights where it keeps nothing: Adam moves a weight whose gradient is rounding noise as
            far as any other. With float32 rounding it stays below 0.001, with bfloat16 below 0.1; another computation
            gives 0.3 and more. It is taken without dropout, whose masks XLA draws differently. None where it was not
            measured, the model draws other random numbers, or nothing moved.
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
    `.apply(model)` on the result. It compiles the step once, and once more where the model has dropout. The batch
    measured is the first one: each further batch shape costs another compilation, so give `fit` batches of one shape
    (`build_pipeline(..., remainder="drop")`).

    Args:
        model: A compiled model.
        data: A tf.data.Dataset of batches or one batch: (x, y[, sample_weight]).
        steps: Steps to time with each setting.
        tolerance: The largest `drift` that counts as the same computation. None: decide by speed alone.

    Returns:
        The decision with its figures.

    Raises:
        ValueError, TypeError, tfopt.errors.PipelineError: As for `tfopt.measure.step_time`, or `tolerance` is negative.

    Example:
        >>> decision = tfopt.xla.decide(model, dataset)
        >>> print(decision)
        XLA on: with it a step runs 1.90× (95 %: 1.88–1.93), faster; compiling took 6.1 s, paid back after 3,900 …
        >>> decision.apply(model)
    """
    if isinstance(steps, bool) or not isinstance(steps, Integral) or steps < 1:
        raise ValueError(f"Expected steps to be an integer of at least 1. Received: steps={steps!r}.")
    if tolerance is not None and not 0 <= tolerance < math.inf:
        raise ValueError(f"Expected tolerance to be a number from 0, or None. Received: tolerance={tolerance!r}.")
    batch = one_batch(data)  # one for all: a dataset that shuffles would give each timer another
    timers = _timers(model, batch)
    reason = _unsupported(model)
    if reason:
        return JitDecision(enabled=False, reason=reason)
    # What fails without XLA is no matter of XLA.
    timers["off"].state_after(1)
    try:
        turn = partial(StepTimer.__call__, steps=max(1, steps // _REPEATS), samples=1)
        times = interleave({name: partial(turn, timer) for name, timer in timers.items()}, _REPEATS)
        drift = None if tolerance is None else _drift(model, batch, timers)
    except tf.errors.OpError as error:
        return JitDecision(enabled=False, reason=f"XLA cannot run this model: {_essence(error)}")
    return _decided(times["off"], times["on"], drift, tolerance)


def _decided(off: StepTimes, on: StepTimes, drift: float | None, tolerance: float | None) -> JitDecision:
    comparison = compare(off, on)
    compile_seconds = max(0.0, on.first_step_seconds - off.first_step_seconds)
    gain_ms = off.median_ms - on.median_ms
    faster = comparison.verdict == "faster" and gain_ms > 0
    break_even = math.ceil(compile_seconds * 1000 / gain_ms) if faster else None
    paid = f", paid back after {break_even:,} steps" if break_even is not None else ""
    same, found = _same(drift, tolerance)
    return JitDecision(
        enabled=faster and same,
        reason=f"with it a step runs {comparison}; compiling took {compile_seconds:.2g} s{paid}; {found}.",
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
        unknown = "the model draws random numbers outside dropout, or its weights did not move"
        return False, f"drift unknown, since {unknown} (tolerance=None ignores it)"
    if drift <= tolerance:
        return True, f"drift {drift:.1g}"
    # NaN ends here too.
    return False, f"drift {drift:.1g}, above the tolerance of {tolerance:g}: it does not compute the same"


def _unsupported(model: keras.Model) -> str | None:
    """Why Keras would not run this model under XLA, or None."""
    if model.run_eagerly:
        return "the model runs eagerly (run_eagerly=True)."
    layers = [layer.name for layer in model._flatten_layers() if not layer.supports_jit]
    return f"layers that XLA does not support: {', '.join(layers)}." if layers else None


def _essence(error: Exception) -> str:
    """The first line that says something; TensorFlow begins with where, not what."""
    where = ("Graph execution error", "Detected at node", "  File ", "Stack trace", "Exception encountered")
    lines = (line.strip() for line in str(error).splitlines() if line.strip() and not line.startswith(where))
    return next(lines, type(error).__name__)


def _timers(model: keras.Model, batch: Any) -> dict[str, StepTimer]:
    return {name: StepTimer(model, batch, jit_compile=on) for name, on in (("off", False), ("on", True))}


def _drift(model: keras.Model, batch: Any, timers: Mapping[str, StepTimer]) -> float | None:
    """The distance between two trainings over the distance travelled; None where it cannot be compared."""
    with ExitStack() as stack:
        if timers["off"].draws_random_numbers:
            stack.enter_context(_without_dropout(model))
            timers = _timers(model, batch)
        if timers["off"].draws_random_numbers:
            return None
        start = timers["off"].state_after(0)
        for steps in _DRIFT_STEPS:
            off = timers["off"].state_after(steps)
            for part in range(len(start)):
                travelled = _distance(off[part], start[part])
                if travelled:
                    return _distance(timers["on"].state_after(steps)[part], off[part]) / travelled
    return None


def _distance(a: list[Any], b: list[Any]) -> float:
    return math.sqrt(
        sum(float(np.sum((x.astype("float64") - y.astype("float64")) ** 2)) for x, y in zip(a, b, strict=True))
    )


@contextmanager
def _without_dropout(model: keras.Model) -> Iterator[None]:
    """Takes the random draws out of Keras' layers: XLA draws other numbers from the same seed.

    Either dropout mask is right, but two trainings that differ in their masks cannot be compared.
    """
    # Keras' own layers only: what a rate of 0 does to another is not known.
    layers = [layer for layer in model._flatten_layers() if type(layer).__module__.startswith("keras.")]
    names = ("rate", "dropout", "recurrent_dropout", "stddev")
    seeded = [layer for layer in layers if hasattr(layer, "seed_generator")]
    rates = [(layer, name, getattr(layer, name)) for layer in seeded for name in names if hasattr(layer, name)]
    try:
        for layer, name, _ in rates:
            setattr(layer, name, 0.0)
        yield
    finally:
        for layer, name, rate in rates:
            setattr(layer, name, rate)
