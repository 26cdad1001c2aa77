"""Decides whether XLA pays for a model, by timing its step both ways and comparing the results."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from typing import Any

import keras
import tensorflow as tf

from tfopt import checks
from tfopt.errors import PipelineError, summarize_error
from tfopt.measure import Comparison, StepTimer, StepTimes, compare, interleave
from tfopt.model.batches import first_alike_batches, not_finite_parts
from tfopt.model.layers import require_optimizer
from tfopt.model.undoing import only_looks
from tfopt.text import Shown
from tfopt.xla.comparing import computes_in_16_bits
from tfopt.xla.drift import Timers, measure_drift
from tfopt.xla.explaining import compared, explain, obstacles_in_training
from tfopt.xla.obstacles import indices_refused, standing_obstacles, wrong_operations
from tfopt.xla.shapes import BatchShapes, Pad, batch_shapes, padded, shape_of, unreadable
from tfopt.xla.toggles import set_jit
from tfopt.xla.traced_graph import recorded_scopes, traced_operations

_REPEATS = 5
_FIRST_STEPS = 2
_BATCHES = 4  # that the step runs on


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class JitDecision(Shown):
    """Whether XLA should be on for a model, and the measurement behind it."""

    enabled: bool
    """Whether to switch XLA on."""
    reason: str
    """Why, as a sentence."""
    comparison: Comparison | None = None
    """Speed with XLA over speed without, with its interval; None if the step could not run, or was compiled again."""
    compile_seconds: float | None = None
    """What XLA adds to the first step with each batch shape."""
    shapes: BatchShapes | None = None
    """Batch shapes in the dataset."""
    break_even_steps: int | None = None
    """Steps after which compiling every shape has paid for itself; None if it never does."""
    planned_steps: int | None = None
    """As passed to `decide`."""
    drift: float | None = None
    """Distance between two four-step trainings from one state, with and without XLA, over the distance moved (64 steps
    if four move nothing). float32 rounding gives less than 0.001, bfloat16 less than 0.1, a different computation 0.3
    or more. Measured without dropout, whose masks XLA draws differently. None if unknown, or if XLA is off for another
    reason."""
    pad: Pad | None = None
    """What padding every batch to one shape would gain, if XLA is off because there are too many shapes."""
    off: StepTimes | None = None
    """Samples without XLA."""
    on: StepTimes | None = None
    """Samples with XLA."""

    @property
    def speedup(self) -> float | None:
        """Speed with XLA over speed without."""
        return self.comparison.ratio if self.comparison else None

    def apply(self, model: keras.Model) -> None:
        """Switches XLA on or off for `model`, as decided."""
        set_jit(model, self.enabled)

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON values, including the raw samples. A drift that is not finite becomes null."""
        names = ("enabled", "reason", "speedup", "compile_seconds", "break_even_steps", "planned_steps")
        drift = self.drift if self.drift is not None and math.isfinite(self.drift) else None
        nested = {name: getattr(self, name) for name in ("comparison", "shapes", "pad", "off", "on")}
        plain = {name: getattr(self, name) for name in names} | {"drift": drift}
        return plain | {name: part and part.to_dict() for name, part in nested.items()}

    def __str__(self) -> str:
        return f"XLA {'on' if self.enabled else 'off'}: {self.reason}"


@only_looks
def decide(
    model: keras.Model,
    data: Any,
    steps: int = 30,
    *,
    planned_steps: int | None = None,
    tolerance: float | None = 0.1,
) -> JitDecision:
    """Times the model's training step with and without XLA on one batch, interleaved, and decides which to use.

    Arrays (x, y) are that one batch, whatever their length: batch a data set of 3,000 rows first.

    XLA pays if the step is clearly faster, computes the same, is compiled once per batch shape, and saves more than
    that costs. A model that XLA compiles again for each new value in a batch, or drawn in the model, is refused, as
    `explain` finds it. The step is timed on the first batch. Then the dataset is read for other shapes, for at most as
    long as one compilation took. If there are too many shapes, `.pad` says what one fixed shape would gain.

    The model is left as it was; call `.apply(model)` on the result. XLA compiles the step once, and once more if it is
    faster and the model has dropout, if a padded shape is tried, or if a 16-bit model drifts.

    Args:
        model: A compiled model.
        data: A tf.data.Dataset of batches of the size to train with, or one such batch (x, y[, sample_weight]).
        steps: Steps to time with each setting.
        planned_steps: Total steps planned, epochs × steps per epoch. None: unknown; XLA is on if it ever pays.
        tolerance: Largest `drift` that counts as the same computation. None: decide by speed alone. The default, 0.1,
            separates bfloat16's rounding (below 0.1) from a different computation (0.3 or more). A model that drifts
            further in 16 bits is compared result by result, as by `explain`.

    Returns:
        The decision with its figures.

    Raises:
        TypeError: If `model` is not a Keras model, `data` is neither a dataset nor a batch, or `steps` is an array.
        ValueError: If the model is not compiled with an optimizer or has nothing to train, the batch does not fit it,
            or an argument is out of range.
        tfopt.errors.PipelineError: If the dataset is empty or fails while it is read, or its first batch holds NaN or
            infinity (which `tolerance=None` allows).

    Example:
        >>> decision = tfopt.xla.decide(model, dataset, planned_steps=20 * 5000)
        >>> print(decision)
        XLA on: with it a step of 64 examples runs 1.9 times as fast (95 %: 1.88–1.93); compiling took 6.1 s, paid …
        >>> decision.apply(model)
    """
    _check(model, steps, planned_steps, tolerance)
    batch, *others = _first_batches(data)  # the same for both timers, even if the dataset shuffles
    wrong = not_finite_parts(batch) if tolerance is not None else []
    if wrong:  # two trainings on NaN cannot be compared
        raise PipelineError(
            f"Expected a batch of finite numbers. Found NaN or infinity in {' and '.join(wrong)}. "
            "Clean the data, or decide by speed alone with tolerance=None if the model expects such values."
        )
    with recorded_scopes() as scopes:
        off = _without_xla(model, batch)
    # Some operations that are wrong under XLA end the process, so they must not run.
    standing = standing_obstacles(model) or wrong_operations(traced_operations(off.graph, scopes))
    if standing:
        return JitDecision(enabled=False, reason=" ".join(map(str, standing)))
    with indices_refused():  # outside the try: a failure here is not due to XLA
        first_off = _first_call(off)
        off.run_on(others)
    try:
        on = StepTimer(model, batch, jit_compile=True)
        first_on = _first_call(on)
        if again := _recompilations(model, batch):
            return JitDecision(enabled=False, reason=again)
        timers = {"off": off, "on": on}
        times = _in_turn(timers, steps)
    except (tf.errors.OpError, ValueError) as error:
        return JitDecision(enabled=False, reason=f"XLA cannot run this model: {_why(model, batch, error)}")
    per_step = (times["on"].median_ms - times["off"].median_ms) / 1000
    compile_seconds = max(0.0, first_on - first_off - _FIRST_STEPS * per_step)
    shapes = _shapes(data, batch, first_on)
    comparison = compare(times["off"], times["on"])
    by_speed = weigh(times, comparison, compile_seconds, shapes, planned_steps)
    if by_speed.enabled:
        return _judged(model, batch, by_speed, timers, tolerance)
    too_many = comparison.verdict == "faster" and shapes.count > 1
    pad = padded(model, batch, shapes, times, compile_seconds=compile_seconds, steps=steps) if too_many else None
    return replace(by_speed, reason=f"{by_speed.reason}." + (f" {pad}." if pad else ""), pad=pad)


def _first_batches(data: Any) -> list[Any]:
    try:
        return first_alike_batches(data, _BATCHES)
    except tf.errors.OpError as error:
        raise unreadable(error) from error


def _shapes(data: Any, batch: Any, seconds: float) -> BatchShapes:
    """The dataset's shapes; the batch's if the dataset can be read only once and held nothing else."""
    try:
        return batch_shapes(data, seconds=seconds)
    except PipelineError as error:
        if error.__cause__ is not None:  # reading failed
            raise
        return BatchShapes(seen=(shape_of(batch),), batches=(1,), complete=True)


def weigh(
    times: Mapping[str, StepTimes],
    comparison: Comparison,
    compile_seconds: float,
    shapes: BatchShapes,
    planned_steps: int | None,
) -> JitDecision:
    """Decides by speed alone: whether the time saved covers compiling every shape. The reason lacks its full stop."""
    saved_ms = times["off"].median_ms - times["on"].median_ms if comparison.verdict == "faster" else 0.0
    steps = break_even(saved_ms / 1000, compile_seconds, shapes)
    reason = f"with it {times['off'].a_step} runs {comparison}; compiling took {compile_seconds:.2g} s"
    if shapes.count > 1:
        reason += f", for each of {shapes}"
    if comparison.verdict == "faster":
        reason += _describe_payback(steps, planned_steps, shapes)
    return JitDecision(
        enabled=steps is not None and (planned_steps is None or planned_steps >= steps),
        reason=reason,
        comparison=comparison,
        compile_seconds=compile_seconds,
        shapes=shapes,
        break_even_steps=steps,
        planned_steps=planned_steps,
        off=times["off"],
        on=times["on"],
    )


def _describe_payback(steps: int | None, planned_steps: int | None, shapes: BatchShapes) -> str:
    if steps is None:
        return ", and new shapes come faster than they pay off"
    paid = f", paid back after {steps:,} steps"
    if planned_steps is not None:
        return f"{paid} of {planned_steps:,} planned"
    epoch = shapes.steps_per_epoch or 0
    return f"{paid} (an epoch has {epoch:,})" if epoch > 1 else paid


def break_even(gain_seconds: float, compile_seconds: float, shapes: BatchShapes) -> int | None:
    """Smallest number of steps whose gain covers compiling the shapes they bring; None if there is none."""
    rate = shapes.new_per_batch * compile_seconds
    if gain_seconds <= rate or gain_seconds <= 0:
        return None
    later = (shapes.count - shapes.new_per_batch * shapes.batches_read) * compile_seconds / (gain_seconds - rate)
    return math.ceil(max(shapes.count * compile_seconds / gain_seconds, later))


def _judged(
    model: keras.Model, batch: Any, by_speed: JitDecision, timers: Timers, tolerance: float | None
) -> JitDecision:
    """The decision if XLA pays: on if it computes the same, or is not to blame for the difference."""
    if tolerance is None:
        return replace(by_speed, reason=f"{by_speed.reason}; drift not measured.")
    drift, unknown = measure_drift(model, batch, timers)
    if drift is None:
        found, same = f"drift unknown, since {unknown} (tolerance=None ignores it).", False
    elif drift <= tolerance:
        found, same = f"drift {drift:.1g}.", True
    else:
        results, same = "", False
        if computes_in_16_bits(model):
            results, distance, obstacles = compared(model, batch, tolerance)
            same = distance is not None and not obstacles
        verdict = "" if same else ": XLA computes something else"
        found = f"drift {drift:.1g}, above the tolerance of {tolerance:g}{verdict}. {results}".rstrip()
    return replace(by_speed, enabled=same, reason=f"{by_speed.reason}; {found}", drift=drift)


def _first_call(timer: StepTimer) -> float:
    """Seconds of the first steps, which compile; the step is already traced."""
    started = time.perf_counter()
    timer(_FIRST_STEPS - 1, warmup=0, samples=1)
    return time.perf_counter() - started


def _recompilations(model: keras.Model, batch: Any) -> str:
    """The values for each of which XLA compiles the step again, as `explain` finds them."""
    return " ".join(str(one) for one in obstacles_in_training(model, batch) if one.kind == "recompilation")


def _in_turn(timers: Timers, steps: int) -> dict[str, StepTimes]:
    block = max(1, steps // _REPEATS)
    # One warm-up step, because the other timer ran before.
    return interleave({name: partial(timer, block, warmup=1, samples=1) for name, timer in timers.items()}, _REPEATS)


def _without_xla(model: keras.Model, batch: Any) -> StepTimer:
    try:
        return StepTimer(model, batch, jit_compile=False)
    except ValueError as error:
        raise ValueError(
            f"Expected a batch that {model.name!r} can train on. Found: {summarize_error(error)}. "
            "Pass batches (x, y[, sample_weight]) as model.fit takes them."
        ) from error


def _why(model: keras.Model, batch: Any, error: Exception) -> str:
    """What keeps XLA from running the step, with the remedy if one is known."""
    obstacles = explain(model, batch).obstacles if isinstance(error, tf.errors.OpError) else ()
    return " ".join(map(str, obstacles)) or summarize_error(error)


def _check(model: keras.Model, steps: int, planned_steps: int | None, tolerance: float | None) -> None:
    """Checks the arguments; raises as `decide` does."""
    if hasattr(steps, "__len__") and not isinstance(steps, str):
        raise TypeError(
            f"Expected data as one argument, then a number of steps. Received: steps of type {type(steps).__name__}. "
            "Pass a batch as a tuple: decide(model, (x, y))."
        )
    checks.count("steps", steps, "Pass a number of steps.")
    if planned_steps is not None:
        checks.count("planned_steps", planned_steps, "Pass a number of steps.")
    number = isinstance(tolerance, Real) and not isinstance(tolerance, bool)
    if tolerance is not None and not (number and 0 <= tolerance < math.inf):
        raise ValueError(
            f"Expected tolerance to be a number of at least 0, or None. Received: tolerance={tolerance!r}. "
            "Pass a drift such as 0.1, or None to decide by speed alone."
        )
    require_optimizer(model)
    if not (model.layers or model.weights) or (model.built and not model.trainable_weights):
        raise ValueError(
            f"Expected a model with weights to train. Received: {model.name!r}, which has none. "
            "Add layers, or set trainable = True on some."
        )
