"""XLA on or off for a model, decided by measuring both."""

import math
import time
from dataclasses import fields
from functools import partial
from numbers import Integral, Real
from typing import Any

import keras
import tensorflow as tf

from tfopt.errors import PipelineError, essence
from tfopt.measure import StepTimer, StepTimes, interleave, one_batch
from tfopt.model.batches import not_finite_parts
from tfopt.model.require import require_compiled
from tfopt.xla.decision import JitDecision, Weighed
from tfopt.xla.drift import Timers, measure_drift
from tfopt.xla.explaining import explain
from tfopt.xla.obstacles import standing_obstacles
from tfopt.xla.padding import padded
from tfopt.xla.shapes import BatchShapes, batch_shapes, shape_of

_REPEATS = 5
_FIRST_STEPS = 2


def decide(
    model: keras.Model,
    data: Any,
    steps: int = 30,
    *,
    planned_steps: int | None = None,
    tolerance: float | None = 0.1,
) -> JitDecision:
    """Measures the model's training step with XLA and without, in turn, and says which to use.

    XLA is worth it where the step is faster beyond doubt, computes the same, and saves more than compiling it costs:
    once for every batch shape. The step is measured on the first batch; the dataset is then read for other shapes, for
    as long as one compilation took at most. Where they are too many, `.pad` says what one fixed shape would bring.

    The model comes back as it was; call `.apply(model)` on the result. XLA compiles the step once, and a second time
    where it is faster and the model has dropout, or where another shape is tried.

    Args:
        model: A compiled model.
        data: A tf.data.Dataset of batches or one batch: (x, y[, sample_weight]).
        steps: Steps to time with each setting.
        planned_steps: Steps planned in all: epochs times steps per epoch. None: unknown, so that XLA is on where it
            pays after any number of them.
        tolerance: The largest `drift` that counts as the same computation. None: decide by speed alone.

    Returns:
        The decision with its figures.

    Raises:
        TypeError: `data` is neither a dataset nor a batch, or the model is no Keras model.
        ValueError: The model is not compiled or has nothing to train, the batch does not fit it, or an argument is out
            of range.
        tfopt.errors.PipelineError: The dataset is empty or fails while it is read, or its first batch holds NaN or
            infinity (which `tolerance=None` allows).

    Example:
        >>> decision = tfopt.xla.decide(model, dataset, planned_steps=20 * 5000)
        >>> print(decision)
        XLA on: with it a step runs 1.90× (95 %: 1.88–1.93), faster; compiling took 6.1 s, paid back after 3,900 …
        >>> decision.apply(model)
    """
    _check(model, steps, planned_steps, tolerance)
    batch = one_batch(data)  # one for all: a dataset that shuffles would give each timer another
    wrong = not_finite_parts(batch) if tolerance is not None else []
    if wrong:  # after which no two trainings can be compared
        raise PipelineError(
            f"Expected a batch of finite numbers. Found NaN or infinity in {' and '.join(wrong)}. "
            "Clean the data; where the model is made for them, decide by speed alone: tolerance=None."
        )
    off = _without_xla(model, batch)
    standing = standing_obstacles(model)
    if standing:
        return JitDecision(enabled=False, reason=" ".join(map(str, standing)))
    first_off = _first_call(off)  # what fails without XLA is no matter of XLA
    try:
        on = StepTimer(model, batch, jit_compile=True)
        first_on = _first_call(on)
        timers = {"off": off, "on": on}
        times = _in_turn(timers, steps)
    except (tf.errors.OpError, ValueError) as error:
        return JitDecision(enabled=False, reason=f"XLA cannot run this model: {_why(model, batch, error)}")
    per_step = (times["on"].median_ms - times["off"].median_ms) / 1000
    compile_seconds = max(0.0, first_on - first_off - _FIRST_STEPS * per_step)
    found = _shapes(data, batch, first_on)
    weighed = Weighed.of(times["off"], times["on"], compile_seconds, found, planned_steps)
    if weighed.pays:
        return _judged(model, batch, weighed, timers, tolerance)
    too_many = weighed.faster and found.count > 1
    pad = padded(model, batch, found, times, compile_seconds=compile_seconds, steps=steps) if too_many else None
    return _decision(False, f"{weighed}." + (f" {pad}." if pad else ""), weighed, pad=pad)


def _shapes(data: Any, batch: Any, seconds: float) -> BatchShapes:
    """The dataset's shapes; where it can be read once and `batch` was all of it, that one's."""
    try:
        return batch_shapes(data, seconds=seconds)
    except PipelineError as error:
        if error.__cause__ is not None:  # it failed
            raise
        return BatchShapes(seen=(shape_of(batch),), batches=(1,), complete=True)


def _judged(
    model: keras.Model,
    batch: Any,
    weighed: Weighed,
    timers: Timers,
    tolerance: float | None,
) -> JitDecision:
    """The decision where XLA pays: on if it computes the same."""
    if tolerance is None:
        return _decision(True, f"{weighed}; drift not measured.", weighed)
    drift, unknown = measure_drift(model, timers, partial(_timers, model, batch))
    if drift is None:
        found, same = f"drift unknown, since {unknown} (tolerance=None ignores it)", False
    else:
        found, same = f"drift {drift:.1g}", drift <= tolerance  # not so for NaN
        found += "" if same else f", above the tolerance of {tolerance:g}: it does not compute the same"
    return _decision(same, f"{weighed}; {found}.", weighed, drift=drift)


def _decision(enabled: bool, reason: str, weighed: Weighed, **found: Any) -> JitDecision:
    figures = {field.name: getattr(weighed, field.name) for field in fields(weighed)}
    return JitDecision(enabled=enabled, reason=reason, **figures, **found)


def _timers(model: keras.Model, batch: Any) -> Timers:
    return {name: StepTimer(model, batch, jit_compile=on) for name, on in (("off", False), ("on", True))}


def _first_call(timer: StepTimer) -> float:
    """Seconds of the first steps, which compile; tracing came before."""
    started = time.perf_counter()
    timer(_FIRST_STEPS - 1, warmup=0, samples=1)
    return time.perf_counter() - started


def _in_turn(timers: Timers, steps: int) -> dict[str, StepTimes]:
    # One step to warm up: the turn before was the other one's.
    turn = partial(StepTimer.__call__, steps=max(1, steps // _REPEATS), warmup=1, samples=1)
    return interleave({name: partial(turn, timer) for name, timer in timers.items()}, _REPEATS)


def _without_xla(model: keras.Model, batch: Any) -> StepTimer:
    try:
        return StepTimer(model, batch, jit_compile=False)
    except ValueError as error:
        raise ValueError(
            f"Expected a batch that {model.name!r} can train on. Found: {essence(error)}. "
            "Give batches (x, y[, sample_weight]) as model.fit takes them."
        ) from error


def _why(model: keras.Model, batch: Any, error: Exception) -> str:
    """What stands against XLA, with the remedy where that is known."""
    obstacles = explain(model, batch).obstacles if isinstance(error, tf.errors.OpError) else ()
    return " ".join(map(str, obstacles)) or essence(error)


def _check(model: keras.Model, steps: int, planned_steps: int | None, tolerance: float | None) -> None:
    """Raises an error for arguments that no measurement is needed to refuse."""
    for name, value in (("steps", steps), ("planned_steps", planned_steps)):
        if value is None and name == "planned_steps":
            continue
        if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
            raise ValueError(
                f"Expected {name} to be an integer of at least 1. Received: {name}={value!r}. Give a count of steps."
            )
    number = isinstance(tolerance, Real) and not isinstance(tolerance, bool)
    if tolerance is not None and not (number and 0 <= tolerance < math.inf):
        raise ValueError(
            f"Expected tolerance to be a number from 0, or None. Received: tolerance={tolerance!r}. "
            "Give a drift such as 0.1, or None to decide by speed alone."
        )
    require_compiled(model)
    if not (model.layers or model.weights) or (model.built and not model.trainable_weights):
        raise ValueError(
            f"Expected a model with weights to train. Received: {model.name!r}, which has none. "
            "Add layers, or set trainable = True on those to train."
        )
