"""`diagnose`: takes each cause of a slow training away in turn, and times the training without it."""

import datetime
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from tfopt import checks
from tfopt.causes.catalogue import (
    COMMUNICATION,
    COPYING,
    FLOAT32,
    INPUT,
    NO_PREFETCH,
    SIXTEEN_BITS,
    SMALL_BATCH,
)
from tfopt.diagnosis import remedies
from tfopt.diagnosis.arms import FitArm, StepArm
from tfopt.diagnosis.candidates import NOW, STEP, Candidate, callback_names, candidates, copied_ahead, prefetched
from tfopt.diagnosis.findings import CauseCost, Diagnosis, NotTested
from tfopt.diagnosis.pauses import Cost, pause_costs, retracing
from tfopt.diagnosis.readings import describe, readings, tensor_cores
from tfopt.diagnosis.training import Training
from tfopt.errors import TfoptError, summarize_error
from tfopt.measure import Comparison, StepTimes, compare, environment, interleave
from tfopt.measure.times import difference_ms
from tfopt.model.batches import is_endless
from tfopt.model.undoing import only_looks
from tfopt.pipelines import profile_pipeline
from tfopt.pipelines.plan import PipelinePlan
from tfopt.pipelines.profiling.written_stages import stages
from tfopt.precision import recommend
from tfopt.text import figure

ROUNDS = 5
_FLOOR, _TOGETHER = "floor", "without all of them"
_PROFILE_SECONDS = 2.0
_FILLING_SECONDS = 60
_LEAST_MS = 150.0  # of an arm in a round


@only_looks
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


class Experiments:
    """The experiments on one training, and what they found."""

    def __init__(self, training: Training, steps: int, progress: "_Progress"):
        self.training, self._steps, self._progress = training, steps, progress
        self.tested: list[Candidate] = []
        self._not_tested: list[NotTested] = []

    def run(self) -> Diagnosis:
        """Runs them all."""
        self._fill_caches()
        self._progress.say("tracing")
        eager = self.training.model.run_eagerly or tf.config.functions_run_eagerly()
        with readings(self.training) as noticed:
            retraced = None if eager else retracing(self.training, self._steps)
            _sort(candidates(self.training), self.tested, self._not_tested)
            arms: dict[str, Callable[[int], StepTimes]] = {NOW: FitArm(self.training), STEP: StepArm(self.training)}
            arms |= {one.name: one.arm for one in self.tested}
            arms |= {_tried(one.name): one.tried for one in self.tested if one.tried}
            times = self.interleave(arms)
            paused: list[Cost] = []
            found = pause_costs(self.training, retraced, times[NOW].median_ms, self._progress.say)
            _sort(found, paused, self._not_tested)
            pauses_ms = sum(pause.cost_ms for pause in paused)
            now = _slower(times[NOW], pauses_ms)
            costs = [_compared(one, times, pauses_ms) for one in self.tested if one.name in times] + paused
            causes = [_cause(cost, costs, now.median_ms) for cost in costs]
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

    def _fill_caches(self) -> None:
        """Reads the data to their end once if they are cached: only then does a cache serve what it holds."""
        data = self.training.data
        if (
            not isinstance(data, tf.data.Dataset)
            or all(one.kind != "cache" for one in stages(data))
            or is_endless(data)
        ):
            return
        self._progress.say("filling the cache of the data")
        due = time.monotonic() + _FILLING_SECONDS
        for _ in self.training.dataset:
            if time.monotonic() > due:
                reason = (
                    f"its cache is not full after {_FILLING_SECONDS} s; later epochs may be faster than is said here"
                )
                self._not_tested.append(NotTested("the input from its cache", reason))
                return

    def interleave(self, arms: Mapping[str, Callable[[int], StepTimes]]) -> dict[str, StepTimes]:
        """Times all arms in turn; one that fails is listed as not tested."""
        running = {}
        for name, arm in arms.items():
            self._progress.say(f"compiling: {name}")
            try:
                first = arm(2)
            except Exception as error:
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
        changes = [one.technique.during for one in self.tested if one.name in counts and one.technique]
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
        return replace(cause, evidence=said, remedy=remedies.slow_input(self.training, profile.limiting))


def _compared(one: Candidate, times: Mapping[str, StepTimes], pauses_ms: float) -> Cost:
    """What a cause costs: the training with it against the training without it."""
    if not one.against:
        alone = times[one.name]
        evidence = f"{one.evidence} It takes {alone.median_ms:.3g} ms."
        return Cost(one.name, alone.median_ms, evidence, one.lines, alone.spread_ms)
    against = one.against if one.against in times else NOW
    cost, interval = difference_ms(times[against], times[one.name])
    before = times[against].median_ms + (0 if against == STEP else pauses_ms)
    evidence = f"{one.evidence} A step takes {figure(before - cost)} ms instead of {figure(before)}."
    if one.tried is None:
        return Cost(one.name, cost, evidence, one.lines, interval, one.saved, one.at_most)
    if _tried(one.name) not in times:
        return Cost(one.name, cost, evidence, remedies.no_line("what would help failed here"), interval)
    gained, (low, _) = difference_ms(times[NOW], times[_tried(one.name)])
    evidence += f" With the lines below, it takes {figure(before - gained)} ms."
    if low <= 0 or cost <= 0:
        lines = remedies.only_tried(one.lines)
        return Cost(one.name, cost, evidence.replace("the lines below", "what is named below"), lines, interval)
    return Cost(one.name, cost, evidence, one.lines, interval, min(1.0, gained / cost))


def _tried(name: str) -> str:
    """The arm in which the remedy of a cause is carried out."""
    return f"{name}, remedied"


def _cause(cost: Cost, costs: Sequence[Cost], now_ms: float) -> CauseCost:
    only_said = remedies.only_said(cost.remedy)
    # The same lines may take several causes away.
    alike = [one for one in costs if one is cost or (one.remedy == cost.remedy and not only_said)]
    left = now_ms - sum(one.saved * max(0.0, one.cost_ms) for one in alike)
    return CauseCost(
        name=cost.name,
        cost_ms=cost.cost_ms,
        interval_ms=cost.interval_ms,
        share=cost.cost_ms / now_ms,
        evidence=cost.evidence,
        remedy=cost.remedy,
        gain=now_ms / left if cost.saved and left > 0 else None,
        at_most=cost.at_most or only_said or len(alike) > 1,
    )


def _sort(found: Iterable[Any], tested: list[Any], not_tested: list[NotTested]) -> None:
    """Puts each of what was found where it belongs."""
    for one in found:
        (not_tested if isinstance(one, NotTested) else tested).append(one)


def _slower(times: StepTimes, ms: float) -> StepTimes:
    """Steps that take so much longer, or shorter, of which a tenth is left."""
    repeats = tuple(tuple(max(sample + ms, sample / 10) for sample in turn) for turn in times.repeats_ms)
    return replace(times, repeats_ms=repeats)


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
