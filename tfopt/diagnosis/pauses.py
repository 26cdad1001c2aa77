"""What stops a training between steps: tracing and compiling for new shapes, validation, and the ends of epochs."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import keras

from tfopt import xla
from tfopt.diagnosis.arms import quiet
from tfopt.diagnosis.training import Training, evaluation_batches, hooks_replaced, writing_elsewhere
from tfopt.measure import StepTimes
from tfopt.measure.timers import wait

_EPOCHS = 3
_OPENINGS = 6  # of the data; they vary more than steps
_VALIDATION_BATCHES = 12
_EPOCH_HOOKS = ("on_epoch_begin", "on_epoch_end", "on_test_begin", "on_test_end")


@dataclass(frozen=True, slots=True)
class Retracing:
    """What the steps of a fresh `fit` took beyond the usual, because their batch had a new shape."""

    seconds: float
    times: int
    """How many steps were traced or compiled again, the first one not counted."""
    steps: int
    goes_on: bool
    """Whether it still happened in the second half of the steps."""


def retracing(training: Training, steps: int) -> Retracing | None:
    """Fits so many steps from the first trace on, and finds those that were traced or compiled again.

    None if the data end before the second step.
    """
    training.model.train_function = None
    log = _logged(training, steps)
    if len(log.seconds) < 2:
        return None
    again = [number for number, (before, after) in enumerate(pairwise(log.counts)) if number > 0 and after > before]
    others = [seconds for number, seconds in enumerate(log.seconds) if number > 0 and number not in again]
    if len(others) < len(again):  # too few to tell what a step takes: the same ones once more, now compiled
        others = _logged(training, steps).seconds[1:]
    usual = median(others)
    extra = sum(max(0.0, log.seconds[number] - usual) for number in again)
    return Retracing(extra, len(again), len(log.seconds), any(number >= len(log.seconds) / 2 for number in again))


def _logged(training: Training, steps: int) -> "_StepLog":
    """Fits so many steps."""
    log = _StepLog(steps)
    with _traces_counted(training.model, log), xla.watch() as compilations, quiet():
        log.compilations = compilations
        training.model.fit(training.dataset, epochs=steps, verbose=0, shuffle=False, callbacks=[log])
    return log


class _StepLog(keras.callbacks.Callback):
    """The seconds of each step, and how often anything had been traced or compiled after it."""

    def __init__(self, steps: int):
        super().__init__()
        self._steps = steps
        self.traces = 0
        self.compilations: Any = None
        self.seconds: list[float] = []
        self.counts = [0]
        self._began = 0.0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._began = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        wait()
        self.seconds.append(time.perf_counter() - self._began)
        self.counts.append(self.traces + self.compilations.count)
        if len(self.seconds) >= self._steps:
            self.model.stop_training = True


@contextmanager
def _traces_counted(model: keras.Model, log: _StepLog) -> Iterator[None]:
    """Counts calls of the model's `train_step`, which Python runs once for each trace."""
    original, own = model.train_step, "train_step" in model.__dict__

    def train_step(*args: Any, **kwargs: Any) -> Any:
        log.traces += 1
        return original(*args, **kwargs)

    model.__dict__["train_step"] = train_step
    try:
        yield
    finally:
        if own:
            model.__dict__["train_step"] = original
        else:
            del model.__dict__["train_step"]


def validation(model: keras.Model, given: Mapping[str, Any]) -> tuple[StepTimes, int] | None:
    """The time of a batch of validation, from a few of them, and how many there are; None if that is unknown."""
    batches = evaluation_batches(given)
    if batches is None:
        return None
    ends: list[float] = []
    clock = keras.callbacks.LambdaCallback()
    clock.on_test_batch_end = lambda batch, logs=None: ends.append(time.perf_counter())
    few = min(batches, _VALIDATION_BATCHES)
    for _ in range(2):  # the first traces and compiles
        ends[:] = [time.perf_counter()]
        model.evaluate(**{**given, "steps": few, "verbose": 0, "callbacks": [clock]})
    # The first batch waits until the data are open, which happens once.
    each = [1000 * (later - earlier) for earlier, later in pairwise(ends[-few:] if few > 1 else ends)]
    return StepTimes(repeats_ms=(tuple(each),), steps_per_sample=1, first_step_seconds=0.0), batches


def hook_seconds(training: Training, names: Mapping[keras.callbacks.Callback, str]) -> dict[str, list[float]]:
    """Seconds that each callback's hooks at the ends of an epoch and of validation take, in each of three epochs."""
    took: dict[tuple[str, str], list[float]] = {}

    def timed(callback: keras.callbacks.Callback, hook: str) -> Callable[..., Any]:
        return _timed(getattr(callback, hook), took.setdefault((names[callback], hook), []))

    given = training.validation
    validated = {}
    if given is not None:
        parts = given["x"], given["y"], given["sample_weight"]
        size = given["batch_size"]
        data = parts[0] if parts[1] is None else parts[: 2 if parts[2] is None else 3]
        validated = {"validation_data": data, "validation_batch_size": size, "validation_steps": 1}
    with writing_elsewhere(list(names)), hooks_replaced(names, _EPOCH_HOOKS, timed), quiet():
        training.model.fit(
            training.resident,
            steps_per_epoch=training.model.steps_per_execution,
            epochs=_EPOCHS,
            verbose=0,
            shuffle=False,
            callbacks=list(names),
            **validated,
        )
    hooks = {name: [took[name, hook] for hook in _EPOCH_HOOKS if took[name, hook]] for name in names.values()}
    return {name: [sum(epoch) for epoch in zip(*lists, strict=False)] for name, lists in hooks.items() if lists}


def epoch_starts(training: Training, steps: int, step_seconds: float) -> list[float]:
    """Seconds from the last step of an epoch to the first of the next, less a step, for six epochs of so many steps.

    No callback is run. The data are opened anew for each epoch, which fills shuffle buffers again.
    """
    ends: list[float] = []

    def end(batch: int, logs: Any = None) -> None:
        wait()
        ends.append(time.perf_counter())

    clock = keras.callbacks.LambdaCallback(on_train_batch_end=end)
    with quiet():
        training.model.fit(training.dataset, epochs=_OPENINGS + 1, verbose=0, shuffle=False, callbacks=[clock])
    each = math.ceil(steps / training.model.steps_per_execution)
    firsts = range(each, min(len(ends), (_OPENINGS + 1) * each), each)
    return [max(0.0, ends[first] - ends[first - 1] - step_seconds) for first in firsts]


def _timed(hook: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return hook(*args, **kwargs)
        finally:
            seconds.append(time.perf_counter() - started)

    return timed
