"""Trains a model from one state with and without XLA, and measures how far apart the results are."""

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import keras
import numpy as np

from tfopt.measure import StepTimer
from tfopt.measure.timers import TrainedState
from tfopt.model.state import without_dropout

# Weights may not move at first: float16 skips steps until its loss scale fits, accumulation updates every n-th step.
_DRIFT_STEPS = (4, 64)
SMALL_GRADIENT = 0.1
"""Relative to all gradients; anything smaller may be rounding noise."""

Timers = Mapping[str, StepTimer]
"""Timers of the step without and with XLA, named "off" and "on"."""


def both_timers(model: keras.Model, batch: Any) -> Timers:
    """Returns timers of the training step without and with XLA."""
    return {name: StepTimer(model, batch, jit_compile=on) for name, on in (("off", False), ("on", True))}


def measure_drift(model: keras.Model, batch: Any, timers: Timers) -> tuple[float | None, str]:
    """Trains from one state with and without XLA; returns the distance between the results over the distance moved.

    The distance is measured on the optimizer's slots, which hold gradients, or on the weights if there are no slots:
    Adam moves a weight whose gradient is rounding noise as far as any other. `JitDecision.drift` lists typical values.
    If the step draws random numbers, both steps are traced again without dropout, because XLA draws different masks
    from the same seed.

    Returns:
        The drift and "", or None and why it is unknown. Infinite if only XLA's numbers are not finite.
    """
    with ExitStack() as stack:
        if timers["off"].draws_random_numbers:
            stack.enter_context(without_dropout(model))
            timers = both_timers(model, batch)
        if timers["off"].draws_random_numbers:
            return None, "the model draws random numbers outside dropout"
        return _drift(timers)


def _drift(timers: Timers) -> tuple[float | None, str]:
    trained = train(timers)
    if isinstance(trained, str):
        return None, trained
    return drifts(trained.changes(trained.off), trained.changes(trained.on))[0], ""


class Trained(NamedTuple):
    """Two trainings from one state, without and with XLA."""

    start: TrainedState
    off: TrainedState
    on: TrainedState
    part: str
    """What to compare: "slots", or "weights" if there are no slots."""
    steps: int

    def changes(self, state: TrainedState) -> list[Any]:
        """What training to that state changed."""
        return _changes(self.start, state, self.part)


def train(timers: Timers) -> Trained | str:
    """Trains with and without XLA until something moves; returns why the results cannot be compared if they cannot."""
    start = timers["off"].state_after(0)
    for steps in _DRIFT_STEPS:
        off = timers["off"].state_after(steps)
        for part in ("slots", "weights"):
            moved = _changes(start, off, part)
            if not all(np.isfinite(change).all() for change in moved):
                return "the training gives no finite numbers without XLA either"
            if any(change.any() for change in moved):
                return Trained(start, off, timers["on"].state_after(steps), part, steps)
    return "its weights did not move"


def _changes(start: TrainedState, state: TrainedState, part: str) -> list[Any]:
    return [
        np.subtract(after, before, dtype=np.promote_types(after.dtype, "float32"))
        for before, after in zip(getattr(start, part), getattr(state, part), strict=True)
    ]


def drifts(plain: Sequence[Any], other: Sequence[Any]) -> list[float]:
    """The distance of all changes together over their norm; then of each over its norm, or a tenth of all if larger."""
    norms = [norm(change) for change in plain]
    total = math.hypot(*norms)
    scales = [max(one, SMALL_GRADIENT * total) for one in norms]
    each = list(map(relative, plain, other, scales))
    return [math.hypot(*(distance * scale for distance, scale in zip(each, scales, strict=True))) / total, *each]


def relative(plain: Any, other: Any, scale: float) -> float:
    """Distance of two arrays over `scale`; infinite if shapes differ, or which numbers are finite; 0 beside NaN."""
    if plain.shape != other.shape:
        return math.inf
    if np.isnan(plain).any():  # after an overflow, say, which proves nothing
        return 0.0
    finite = np.isfinite(plain)
    if not np.array_equal(finite, np.isfinite(other)):
        return math.inf
    distance = norm(other[finite].astype("float64") - plain[finite].astype("float64"))
    return distance / scale if scale else math.inf if distance else 0.0


def norm(array: Any) -> float:
    """The norm of the finite numbers in an array."""
    array = array.astype("float64")
    return float(np.linalg.norm(array[np.isfinite(array)]))
