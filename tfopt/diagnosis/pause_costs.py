"""What the pauses between steps cost, spread over the steps, and what to do about them."""

import math
from collections.abc import Callable, Iterator, Mapping
from statistics import median
from typing import Any, NamedTuple

import keras

from tfopt.causes.catalogue import BETWEEN_EPOCHS, EPOCH_STARTS, NEW_SHAPES, VALIDATION
from tfopt.diagnosis import pauses, remedies
from tfopt.diagnosis.candidates import callback_names
from tfopt.diagnosis.findings import NotTested
from tfopt.diagnosis.training import Training, evaluation_batches

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


def pause_costs(
    training: Training, retraced: pauses.Retracing | None, step_ms: float, say: Callable[[str], None]
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
    ends = pauses.epoch_ends(training, names, math.ceil(_EPOCH_MS / step_ms))
    if training.validation is not None:
        yield _validation(training, training.validation, ends, steps, step_ms)
    yield from _hooks(training, ends, {name: one for one, name in names.items()}, steps, step_ms)


def _epoch_starts(training: Training, steps: int, step_ms: float) -> Iterator[Cost]:
    """What epochs take beyond their steps, as these run when the data are open."""
    opened, once = pauses.epoch_starts(training, steps)
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
    training: Training, given: Mapping[str, Any], ends: pauses.EpochEnds, steps: int, step_ms: float
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
    ends: pauses.EpochEnds,
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
