"""Whether a training step computes with XLA what it computes without."""

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import keras
import numpy as np

from tfopt.measure import StepTimer
from tfopt.measure.draws import without_dropout

# Weights may stand still at first: float16 skips steps until its loss scale fits, accumulation applies every n-th.
_STEPS = (4, 64)

Timers = Mapping[str, StepTimer]
"""The training step without XLA and with it, by the names "off" and "on"."""


def measure_drift(model: keras.Model, timers: Timers, without_random: Callable[[], Timers]) -> tuple[float | None, str]:
    """The distance between two trainings from one state, with XLA and without, over the distance travelled.

    It is taken on what the optimizer keeps of the gradients, or on the weights where it keeps nothing: Adam moves a
    weight whose gradient is rounding noise as far as any other. With float32 rounding it stays below 0.001, with
    bfloat16 below 0.1; another computation gives 0.3 and more (NaN where only XLA computes no finite number).

    Args:
        model: The model of the timers.
        timers: Both steps.
        without_random: Makes both steps anew. It is called where the step draws random numbers, after dropout was taken
            out: XLA draws other masks from the same seed.

    Returns:
        The drift, or None and why it is unknown.
    """
    with ExitStack() as stack:
        if timers["off"].draws_random_numbers:
            stack.enter_context(without_dropout(model))
            timers = without_random()
        if timers["off"].draws_random_numbers:
            return None, "the model draws random numbers outside dropout"
        start = timers["off"].state_after(0)
        for steps in _STEPS:
            off = timers["off"].state_after(steps)
            for part in range(len(start)):
                travelled = _distance(off[part], start[part])
                if not math.isfinite(travelled):
                    return None, "the training gives no finite numbers without XLA either"
                if travelled:
                    return _distance(timers["on"].state_after(steps)[part], off[part]) / travelled, ""
    return None, "its weights did not move"


def _distance(a: list[Any], b: list[Any]) -> float:
    return math.sqrt(
        sum(float(np.sum((x.astype("float64") - y.astype("float64")) ** 2)) for x, y in zip(a, b, strict=True))
    )
