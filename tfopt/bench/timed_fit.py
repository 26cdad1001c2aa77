"""Times a call of `fit` as the script makes it, up to a number of steps, as it is or with what `tune` would apply."""

import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import keras

from tfopt.causes.catalogue import NO_PREFETCH
from tfopt.diagnosis.candidates import prefetched
from tfopt.diagnosis.diagnosing import ROUNDS
from tfopt.diagnosis.tuning import apply_changes
from tfopt.errors import UnsupportedError
from tfopt.measure import StepTimes
from tfopt.measure.timers import wait

WARMUP = 10  # steps before the clock starts: they compile, and fill what is read ahead


def timed_fit(
    fit: Callable[..., Any], model: keras.Model, arguments: Mapping[str, Any], steps: int, causes: Collection[str]
) -> dict[str, Any]:
    """Runs `fit(model, **arguments)` with everything that belongs to it, and ends it after so many steps.

    Args:
        fit: Keras' own.
        model: The model, which trains.
        arguments: All arguments of `fit`.
        steps: Steps to time, after a few to warm up.
        causes: What to take away before, by the names that `Tuning.applied` has.

    Returns:
        `{"times": ..., "steps": ..., "loss": ...}`: `StepTimes.to_dict()`, the steps run in all, and the loss then.

    Raises:
        tfopt.errors.UnsupportedError: If the training has fewer steps.
    """
    apply_changes(model, causes, [])
    if NO_PREFETCH.name in causes:
        arguments = {**arguments, "x": prefetched(arguments["x"])}
    clock, callbacks = _Clock(steps), arguments["callbacks"] or []
    given = callbacks if isinstance(callbacks, list | tuple) else [callbacks]
    started = time.perf_counter()
    try:
        fit(model, **{**arguments, "callbacks": [*given, clock]})
    except _EnoughError:
        return clock.result(started)
    raise UnsupportedError(
        f"Expected a training of {WARMUP + steps} steps or more to time. Found that it ended after {clock.steps}. "
        "Pass a smaller --steps, or train for more epochs."
    )


class _EnoughError(Exception):
    """Ends `fit`."""


class _Clock(keras.callbacks.Callback):
    """Takes the time of blocks of steps, with a wait at the end of each, and ends `fit` after the last."""

    acts_every = 0  # what it reads within a launch is the time after it

    def __init__(self, steps: int):
        super().__init__()
        self.steps = 0
        self._block = steps // ROUNDS
        self._ends: list[tuple[int, float]] = []
        self._loss: float | None = None

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._first = batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps += batch - self._first + 1  # several under steps_per_execution
        if self.steps < WARMUP + len(self._ends) * self._block:
            return
        wait()
        self._ends.append((self.steps, time.perf_counter()))
        if len(self._ends) > ROUNDS:
            self._loss = float(logs["loss"]) if logs and "loss" in logs else None
            raise _EnoughError

    def result(self, started: float) -> dict[str, Any]:
        """What was measured."""
        blocks = zip(self._ends[:-1], self._ends[1:], strict=True)
        samples = tuple(1000 * (end - begin) / (last - first) for (first, begin), (last, end) in blocks)
        warm = self._ends[0][1] - started
        times = StepTimes(repeats_ms=(samples,), steps_per_sample=self._block, first_step_seconds=warm)
        return {"times": times.to_dict(), "steps": self.steps, "loss": self._loss}
