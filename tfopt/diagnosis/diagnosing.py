"""`diagnose`: takes each cause of a slow training away in turn, and times the training without it."""

import datetime
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfopt import checks
from tfopt.causes.catalogue import (
    BETWEEN_EPOCHS,
    COMMUNICATION,
    COPYING,
    EPOCH_STARTS,
    FLOAT32,
    INPUT,
    NEW_SHAPES,
    NO_PREFETCH,
    SIXTEEN_BITS,
    SMALL_BATCH,
    VALIDATION,
)
from tfopt.diagnosis import pauses, remedies
from tfopt.diagnosis.arms import FitArm, StepArm
from tfopt.diagnosis.candidates import NOW, STEP, Candidate, callback_names, candidates, copied_ahead, prefetched
from tfopt.diagnosis.findings import CauseCost, Diagnosis, NotTested
from tfopt.diagnosis.readings import describe, readings, tensor_cores
from tfopt.diagnosis.training import Training
from tfopt.errors import TfoptError, summarize_error
from tfopt.measure import Comparison, StepTimes, compare, environment, interleave
from tfopt.measure.times import difference_ms
from tfopt.pipelines import profile_pipeline
from tfopt.pipelines.plan import PipelinePlan
from tfopt.precision import recommend
from tfopt.text import figure

ROUNDS = 5
_FLOOR, _TOGETHER = "floor", "without all of them"
_PROFILE_SECONDS = 2.0
_FOUR_FIFTHS = 0.8  # what doing something every fifth time saves
_PAUSE_SECONDS = 0.001
_SHORT_EPOCH_MS = 1500.0  # in longer ones what it takes to begin is next to nothing
_LEAST_MS = 150.0  # of an arm in a round


def diagnose(
    model: keras.Model, data: Any, callbacks: Sequence[keras.callbacks.Callback] = (), steps: int = 50
) -> Diagnosis:
    """Finds what slows training down: takes each cause away in turn, and times training without it.

    Use it when a GPU idles, or before optimising anything. Each experiment runs real training steps through `fit`,
    interleaved with the training as it stands: on a batch that stays in memory, without each callback, with steps
    launched ahead, with XLA or without, in the dtype recommended for the device if `tfopt.precision.check` passes it,
    on a batch twice as large. What pauses training between steps (validation, callbacks at the end of an epoch, tracing
    for new shapes) is timed separately.

    The model comes back as it was, bit for bit: weights, optimizer, metrics, seeds and compiled functions; so do
    callbacks, unless they change objects that they only refer to. Keras' and tfopt's callbacks, and subclasses of them,
    write into temporary folders meanwhile; your others are run as they are. The data are read from their start about
    three times `steps` batches an experiment, for two seconds more if the input proves slow, and seven times whole if
    an epoch takes less than 1.5 s; a generator continues from there afterwards.

    Args:
        model: A compiled model.
        data: What `fit` takes: a tf.data.Dataset, a PyDataset, a generator, a plan of tfopt.pipelines, or arrays
            `(x, y[, sample_weight])`, which `fit` would feed in batches of 32.
        callbacks: The callbacks of the training.
        steps: Steps to time in each experiment, in five rounds. Default: 50.

    Returns:
        The causes, each with its cost, evidence and remedy. `print` it, or write a page with `to_html(path)`.

    Raises:
        TypeError: If `model` is not a Keras model, or `fit` does not take `data`.
        ValueError: If the model is not compiled, or `steps` is below 5.
        tfopt.errors.PipelineError: If the data are empty.
        tfopt.errors.UnsupportedError: If the model runs eagerly and its step cannot be traced, so that not everything
            it changes could be restored.

    Example:
        >>> print(tfopt.diagnose(model, dataset))
        The input takes 71 % of a step, 29.3 of 41.2 ms: …
    """
    return diagnose_fit(model, as_arguments(data) | {"callbacks": callbacks}, steps)


def diagnose_fit(model: keras.Model, arguments: Mapping[str, Any], steps: int = 50) -> Diagnosis:
    """Diagnoses the training that `model.fit(**arguments)` would run; otherwise as `diagnose`."""
    with experiments(model, arguments, steps) as its:
        return its.run()


def as_arguments(data: Any) -> dict[str, Any]:
    """The arguments of `fit` for data given as one value; a tuple holds arrays."""
    return dict(zip(("x", "y", "sample_weight"), data, strict=False)) if isinstance(data, tuple) else {"x": data}


@contextmanager
def experiments(model: keras.Model, arguments: Mapping[str, Any], steps: int) -> Iterator["Experiments"]:
    """Yields the experiments on a training, and gives everything back as it was at the end of the block."""
    checks.count("steps", steps, "Pass a number of steps, such as 50.", least=ROUNDS)
    training = Training.of(model, arguments)
    with training.untouched(), _Progress() as progress, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about experiments that the user has not asked for one by one
        yield Experiments(training, steps, progress)


class _Cost(NamedTuple):
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


class Experiments:
    """The experiments on one training, and what they found."""

    def __init__(self, training: Training, steps: int, progress: "_Progress"):
        self.training, self._steps, self._progress = training, steps, progress
        self.tested: list[Candidate] = []
        self._not_tested: list[NotTested] = []

    def run(self) -> Diagnosis:
        """Runs them all."""
        self._progress.say("tracing")
        eager = self.training.model.run_eagerly or tf.config.functions_run_eagerly()
        with readings(self.training) as noticed:
            retraced = None if eager else pauses.retracing(self.training, self._steps)
            found = list(candidates(self.training))
            self._not_tested += [one for one in found if isinstance(one, NotTested)]
            self.tested = [one for one in found if isinstance(one, Candidate)]
            arms: dict[str, Callable[[int], StepTimes]] = {NOW: FitArm(self.training), STEP: StepArm(self.training)}
            times = self.interleave(arms | {one.name: one.arm for one in self.tested})
            paused = list(self._pauses(retraced, times[NOW].median_ms))
            pauses_ms = sum(pause.cost_ms for pause in paused)
            now = _slower(times[NOW], pauses_ms)
            costs = [_compared(one, times, pauses_ms) for one in self.tested if one.name in times] + paused
            causes = [_cause(cost, now.median_ms) for cost in costs]
            counts = {cause.name for cause in causes if cause.counts}
            if INPUT.name in counts:
                causes = [self._explained(cause) if cause.name == INPUT.name else cause for cause in causes]
            floor, together = self._without_all(counts, times)
            floor = _without_communication(floor, causes)
        return Diagnosis(
            now=now,
            floor=floor,
            together=together,
            causes=tuple(sorted(causes, key=lambda cause: -cause.cost_ms)),
            noticed=(*noticed, *tensor_cores(self.training)),
            not_tested=tuple(self._not_tested),
            computation=describe(self.training, floor, self._floor_dtype(counts)),
            environment=environment(),
            date=datetime.date.today().isoformat(),
        )

    def interleave(self, arms: Mapping[str, Callable[[int], StepTimes]]) -> dict[str, StepTimes]:
        """Times all arms in turn; one that fails is listed as not tested."""
        running = {}
        for name, arm in arms.items():
            self._progress.say(f"compiling: {name}")
            try:
                first = arm(2)
            except (tf.errors.OpError, ValueError, TypeError, RuntimeError) as error:
                if name == NOW:
                    raise
                self._not_tested.append(NotTested(name, f"it failed: {summarize_error(error)}"))
            else:
                # More where a step is so short that a block of them would be noise.
                running[name] = partial(arm, max(self._steps // ROUNDS, math.ceil(_LEAST_MS / first.median_ms)))
        return interleave(
            running, ROUNDS, on_progress=lambda name, turn: self._progress.say(f"round {turn + 1} of {ROUNDS}: {name}")
        )

    def _without_all(self, counts: set[str], before: Mapping[str, StepTimes]) -> tuple[StepTimes, Comparison | None]:
        """Times the step alone with all changes that pay, and `fit` without several causes at once beside it as is."""
        training = self.training
        changes = [one.change for one in self.tested if one.name in counts and one.change]
        left_out = [one for one, name in callback_names(training.callbacks).items() if name in counts]
        fed = [name for name in (COPYING.name, INPUT.name, NO_PREFETCH.name) if name in counts]
        taken_away = len(changes) + len(left_out) + len(fed)
        arms: dict[str, Callable[[int], StepTimes]] = {
            _FLOOR: StepArm(training, twice=SMALL_BATCH.name in counts, changes=changes)
        }
        if taken_away > 1:
            arms[NOW] = FitArm(training)
            arms[_TOGETHER] = FitArm(training, dataset=self._fed(fed), without=left_out, changes=changes)
        times = self.interleave(arms)
        floor = times.get(_FLOOR) or before.get(STEP) or before[NOW]  # all changes together may fail
        return floor, compare(times[NOW], times[_TOGETHER]) if _TOGETHER in times else None

    def _floor_dtype(self, counts: set[str]) -> str | None:
        """The dtype that the floor computes in, if it is not the training's own."""
        changed = {FLOAT32.name, SIXTEEN_BITS.name} & counts
        return recommend().policy.removeprefix("mixed_") if changed else None

    def _fed(self, causes: Sequence[str]) -> tf.data.Dataset | None:
        """The data with the first of these causes taken away, and so the others; None for the training's own."""
        training = self.training
        if not causes:
            return None
        if causes[0] == COPYING.name:
            return copied_ahead(training.resident)
        return training.resident if causes[0] == INPUT.name else prefetched(training.data)

    def _explained(self, cause: CauseCost) -> CauseCost:
        """The input, with the stage that limits it where `profile_pipeline` can look inside."""
        data = self.training.data
        if not isinstance(data, PipelinePlan | tf.data.Dataset):
            return cause
        self._progress.say("stages of the input")
        try:
            profile = profile_pipeline(data, _PROFILE_SECONDS)
        except (TfoptError, tf.errors.OpError, ValueError):
            return cause
        said = " ".join(filter(None, [cause.evidence, f"profile_pipeline: {profile.verdict}", profile.remedy]))
        return replace(cause, evidence=said)

    def _pauses(self, retraced: pauses.Retracing | None, step_ms: float) -> Iterator[_Cost]:
        """Times what stops the training between steps, spread over the steps."""
        training, steps = self.training, self.training.steps_per_epoch
        if retraced is not None and retraced.times:
            over = retraced.steps if retraced.goes_on or steps is None else steps * training.epochs
            ms = 1000 * retraced.seconds / over
            yield _Cost(
                NEW_SHAPES.name,
                ms,
                f"Of the first {retraced.steps} steps, {retraced.times} after the first were traced or compiled again, "
                f"which took {retraced.seconds:.2g} s, here spread over {over:,} steps.",
                remedies.shapes(training),
                (ms, ms),
            )
        if steps is None:
            reason = "the number of steps in an epoch is unknown: pass steps_per_epoch to fit"
            self._not_tested.append(NotTested("pauses between epochs", reason))
            return
        self._progress.say("pauses between epochs")
        if training.opened_each_epoch and training.epochs > 1 and steps * step_ms <= _SHORT_EPOCH_MS:
            yield from self._epoch_starts(steps, step_ms)
        if training.validation is not None:
            yield from self._validation(training.validation, steps * training.epochs_per_validation)
        for name, seconds in pauses.hook_seconds(training, callback_names(training.callbacks)).items():
            each = median(seconds)
            if each >= _PAUSE_SECONDS:
                yield _Cost(
                    f"{name}, {BETWEEN_EPOCHS.name}",
                    1000 * each / steps,
                    f"It takes {each:.2g} s at the end of each epoch of {steps:,} steps.",
                    BETWEEN_EPOCHS.code,
                    (1000 * min(seconds) / steps, 1000 * max(seconds) / steps),
                    _FOUR_FIFTHS,
                )

    def _epoch_starts(self, steps: int, step_ms: float) -> Iterator[_Cost]:
        seconds = pauses.epoch_starts(self.training, steps, step_ms / 1000)
        if seconds and (each := median(seconds)) >= _PAUSE_SECONDS:
            yield _Cost(
                EPOCH_STARTS.name,
                1000 * each / steps,
                f"Opening the data again takes {each:.2g} s, after each {steps:,} steps.",
                remedies.opened_each_epoch(self.training),
                (1000 * min(seconds) / steps, 1000 * max(seconds) / steps),
                at_most=True,
            )

    def _validation(self, given: Mapping[str, Any], steps: int) -> Iterator[_Cost]:
        found = pauses.validation(self.training.model, given)
        if found is None:
            reason = "the number of its batches is unknown: pass validation_steps to fit"
            self._not_tested.append(NotTested(VALIDATION.name, reason))
            return
        times, batches = found
        low, high = times.interval_ms
        remedy, saved = remedies.validation(self.training, batches)
        yield _Cost(
            VALIDATION.name,
            times.median_ms * batches / steps,
            f"{batches:,} batches take {times.median_ms * batches / 1000:.2g} s, after {steps:,} steps each time.",
            remedy,
            (low * batches / steps, high * batches / steps),
            saved,
        )


def _compared(one: Candidate, times: Mapping[str, StepTimes], pauses_ms: float) -> _Cost:
    """What a cause costs: the training with it against the training without it."""
    if not one.against:
        alone = times[one.name]
        evidence = f"{one.evidence} It takes {alone.median_ms:.3g} ms."
        return _Cost(one.name, alone.median_ms, evidence, one.lines, alone.interval_ms)
    against = one.against if one.against in times else NOW
    cost, interval = difference_ms(times[against], times[one.name])
    before = times[against].median_ms + (0 if against == STEP else pauses_ms)
    took = f"A step takes {figure(before - cost)} ms instead of {figure(before)}."
    return _Cost(one.name, cost, f"{one.evidence} {took}", one.lines, interval, one.saved, one.at_most)


def _cause(cost: _Cost, now_ms: float) -> CauseCost:
    return CauseCost(
        name=cost.name,
        cost_ms=cost.cost_ms,
        interval_ms=cost.interval_ms,
        share=cost.cost_ms / now_ms,
        evidence=cost.evidence,
        remedy=cost.remedy,
        gain=now_ms / left if (left := now_ms - cost.saved * cost.cost_ms) > 0 else None,
        at_most=cost.at_most,
    )


def _slower(times: StepTimes, ms: float) -> StepTimes:
    """Steps that take so much longer."""
    return replace(times, repeats_ms=tuple(tuple(sample + ms for sample in turn) for turn in times.repeats_ms))


def _without_communication(floor: StepTimes, causes: Sequence[CauseCost]) -> StepTimes:
    """The floor is a step of all replicas: no experiment on it takes their communication away."""
    cost = sum(cause.cost_ms for cause in causes if cause.counts and cause.name == COMMUNICATION.name)
    return _slower(floor, -min(cost, 0.9 * floor.median_ms))


class _Progress:
    """A line on standard error that says what is under way; nothing unless that is a terminal."""

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *exception: object) -> None:
        self._write("")

    def say(self, what: str) -> None:
        """Replaces the line."""
        self._write(f"tfopt.diagnose: {what} …"[:79])

    def _write(self, line: str) -> None:
        if sys.stderr is not None and sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[K{line}")
            sys.stderr.flush()
