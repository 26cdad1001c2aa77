"""What stops a training between steps: tracing and compiling for new shapes, validation, and the ends of epochs."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import keras

from tfopt import xla
from tfopt.causes.catalogue import BETWEEN_EPOCHS, EPOCH_STARTS, NEW_SHAPES, VALIDATION
from tfopt.diagnosis import remedies
from tfopt.diagnosis.arms import quiet
from tfopt.diagnosis.candidates import callback_names
from tfopt.diagnosis.findings import NotTested
from tfopt.diagnosis.training import Training, evaluation_batches, hooks_replaced, writing_elsewhere
from tfopt.measure.timers import wait
from tfopt.model.batches import is_endless, repeated

_EPOCHS = 5  # whose extremes hold the median in 94 % of cases
_TURNS, _OPENINGS = 2, 3  # of the data; they vary more than steps
_VALIDATION_BATCHES = 12
_EPOCH_HOOKS = ("on_epoch_begin", "on_epoch_end", "on_test_begin", "on_test_end")
_PAUSE_MS = 1.0
_SHORT_EPOCH_MS = 1500.0  # in longer ones what it takes to begin is next to nothing
_EPOCH_MS = 150.0  # of steps, in the epochs that are timed


class Cost(NamedTuple):
    """What something costs a step."""

    name: str
    cost_ms: float
    evidence: str
    remedy: str
    interval_ms: tuple[float, float]
    saved: float = 1.0
    """The share of it that the remedy saves."""
    at_most: bool = False
    """Whether it may save less."""


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

    acts_every = 1

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


@dataclass(frozen=True, slots=True)
class EpochEnds:
    """What epochs took, each compared with the steps beside it: a busy machine slows both down."""

    steps: list[float]
    """Seconds of a step, in each epoch."""
    hooks: dict[str, dict[str, list[float]]]
    """Seconds of each hook of each callback, by its name, in each epoch."""
    validation_batches: list[float]
    """Seconds of a batch of validation, in each epoch; none without validation."""

    def in_steps(self, seconds: Sequence[float]) -> tuple[float, float, float]:
        """How many steps something takes: the median over the epochs, the least and the most."""
        each = [one / step for one, step in zip(seconds, self.steps, strict=False)]
        return median(each), min(each), max(each)


def epoch_ends(training: Training, names: Mapping[keras.callbacks.Callback, str], steps: int) -> EpochEnds:
    """Fits in short epochs of so many steps, with validation on a few batches, and times what comes between them.

    The first epoch compiles and does not count.
    """
    model, once = training.model, training.model.steps_per_execution
    took: dict[str, dict[str, list[float]]] = {name: {} for name in names.values()}

    def timed(callback: keras.callbacks.Callback, hook: str) -> Callable[..., Any]:
        return _timed(getattr(callback, hook), took[names[callback]].setdefault(hook, []))

    endless, log = repeated(training.dataset), _EndsLog(once)
    model.train_function = None
    with writing_elsewhere(list(names)), hooks_replaced(names, _EPOCH_HOOKS, timed), quiet():
        model.fit(
            endless if is_endless(endless) else training.resident,
            steps_per_epoch=once * math.ceil(max(steps, 2 * once) / once),
            epochs=1 + _EPOCHS,
            verbose=0,
            shuffle=False,
            callbacks=[*names, log],
            **_few_batches(training.validation),
        )
    hooks = {name: {hook: each[1:] for hook, each in of.items() if each[1:]} for name, of in took.items()}
    return EpochEnds(log.steps[1:], hooks, log.batches[1:])


def _few_batches(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Arguments of `fit` for a validation on a few batches."""
    if given is None:
        return {}
    parts = given["x"], given["y"], given["sample_weight"]
    few = min(evaluation_batches(given) or 1, _VALIDATION_BATCHES)
    data = parts[0] if parts[1] is None else parts[: 2 if parts[2] is None else 3]
    return {"validation_data": data, "validation_batch_size": given["batch_size"], "validation_steps": few}


class _EndsLog(keras.callbacks.Callback):
    """The seconds of a step and of a batch of validation in each epoch, from the end of the first one on."""

    def __init__(self, once: int):
        super().__init__()
        self._once = once
        self.steps: list[float] = []
        self.batches: list[float] = []
        self._ends: list[tuple[int, float]] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._ends = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch < self._once or batch + 1 >= self.params["steps"]:
            wait()
            self._ends.append((batch + 1, time.perf_counter()))
        if batch + 1 >= self.params["steps"]:
            self.steps.append(_each(self._ends))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.stop_training = False  # which another callback may have asked for

    def on_test_begin(self, logs: Any = None) -> None:
        self._ends = [(0, time.perf_counter())]

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self._ends.append((batch + 1, time.perf_counter()))

    def on_test_end(self, logs: Any = None) -> None:
        # The first batch waits until the data are open, which happens once.
        self.batches.append(_each(self._ends[1:] if len(self._ends) > 2 else self._ends))


def _each(ends: Sequence[tuple[int, float]]) -> float:
    """Seconds from one to the next, of when the first and the last of several ended."""
    (first, began), (last, ended) = ends[0], ends[-1]
    return (ended - began) / max(1, last - first)


def epoch_starts(training: Training, steps: int) -> tuple[list[float], list[float]]:
    """Seconds of epochs of so many steps, whose data are opened for each, and opened once for all of them, in turn.

    No callback is run. The latter are none if the data cannot be repeated.
    """
    training.model.train_function = None
    endless = repeated(training.dataset)
    opened: list[float] = []
    once: list[float] = []
    for _ in range(_TURNS):
        opened += _epochs(training, training.dataset)
        if is_endless(endless):
            once += _epochs(training, endless, steps_per_epoch=steps)
    return opened, once


def _epochs(training: Training, dataset: Any, **length: int) -> list[float]:
    """Seconds from the last step of an epoch to that of the next."""
    ends: list[float] = []

    def end(epoch: int, logs: Any = None) -> None:
        wait()
        ends.append(time.perf_counter())

    clock = keras.callbacks.LambdaCallback(on_epoch_end=end)
    with quiet():
        training.model.fit(dataset, epochs=_OPENINGS + 1, verbose=0, shuffle=False, callbacks=[clock], **length)
    return [later - earlier for earlier, later in pairwise(ends)]


def _timed(hook: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return hook(*args, **kwargs)
        finally:
            seconds.append(time.perf_counter() - started)

    return timed


def pause_costs(
    training: Training, retraced: Retracing | None, step_ms: float, say: Callable[[str], None]
) -> Iterator[Cost | NotTested]:
    """Times what stops the training between steps of so many milliseconds."""
    steps = training.steps_per_epoch
    if retraced is not None and retraced.times:
        over = retraced.steps if retraced.goes_on or steps is None else steps * training.epochs
        ms = 1000 * retraced.seconds / over
        yield Cost(
            NEW_SHAPES.name,
            ms,
            f"Of the first {retraced.steps} steps, {retraced.times} after the first were traced or compiled again, "
            f"which took {retraced.seconds:.2g} s, here spread over {over:,} steps.",
            remedies.shapes(training),
            (ms, ms),
        )
    if steps is None:
        reason = "the number of steps in an epoch is unknown: pass steps_per_epoch to fit"
        yield NotTested("pauses between epochs", reason)
        return
    if training.opened_each_epoch and training.epochs > 1 and steps * step_ms <= _SHORT_EPOCH_MS:
        say("epoch starts")
        yield from _epoch_starts(training, steps, step_ms)
    names = callback_names(training.callbacks)
    if training.validation is None and not names:
        return
    say("pauses between epochs")
    ends = epoch_ends(training, names, math.ceil(_EPOCH_MS / step_ms))
    if training.validation is not None:
        yield _validation(training, training.validation, ends, steps, step_ms)
    yield from _hooks(training, ends, {name: one for one, name in names.items()}, steps, step_ms)


def _epoch_starts(training: Training, steps: int, step_ms: float) -> Iterator[Cost]:
    """What epochs take beyond their steps, as these run when the data are open."""
    opened, once = epoch_starts(training, steps)
    costs = [1000 * seconds / steps - step_ms for seconds in opened]
    if not costs or (cost := median(costs)) * steps < _PAUSE_MS:
        return
    (remedy, why), saved = remedies.opened_each_epoch(training), 1.0
    if repeats := not remedy and bool(once) and max(once) < min(opened):
        remedy, saved = remedies.repeated(training), min(1.0, 1000 * (median(opened) - median(once)) / steps / cost)
    yield Cost(
        EPOCH_STARTS.name,
        cost,
        f"Opening the data again takes {cost * steps / 1000:.2g} s, after each {steps:,} steps. {why}".strip(),
        remedy or remedies.no_line("opening the data once, by repeat(), is no faster here; longer epochs open it less"),
        (min(costs), max(costs)),
        saved,
        at_most=not repeats,
    )


def _validation(
    training: Training, given: Mapping[str, Any], ends: EpochEnds, steps: int, step_ms: float
) -> Cost | NotTested:
    batches = evaluation_batches(given)
    if batches is None:
        return NotTested(VALIDATION.name, "the number of its batches is unknown: pass validation_steps to fit")
    after = steps * training.epochs_per_validation
    cost, low, high = (step_ms * batches / after * one for one in ends.in_steps(ends.validation_batches))
    remedy, saved = remedies.validation(training, batches)
    said = f"{batches:,} batches take {cost * after / 1000:.2g} s, after {after:,} steps each time."
    return Cost(VALIDATION.name, cost, said, remedy, (low, high), saved)


def _hooks(
    training: Training,
    ends: EpochEnds,
    callbacks: Mapping[str, keras.callbacks.Callback],
    steps: int,
    step_ms: float,
) -> Iterator[Cost]:
    for name, hooks in ends.hooks.items():
        seconds = [sum(epoch) for epoch in zip(*hooks.values(), strict=False)]
        if not seconds or 1000 * (each := median(seconds)) < _PAUSE_MS:
            continue
        longest = max(hooks, key=lambda hook: median(hooks[hook]))
        remedy, saved = remedies.between_epochs(training, callbacks[name], longest)
        cost, low, high = (step_ms / steps * one for one in ends.in_steps(seconds))
        said = f"It takes {each:.2g} s in each epoch of {steps:,} steps, most of it in {longest}."
        yield Cost(f"{name}, {BETWEEN_EPOCHS.name}", cost, said, remedy, (low, high), saved)
