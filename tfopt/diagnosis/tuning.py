"""`tune`: applies what a diagnosis found to pay, and proves it together against the training as it was."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from tfopt import xla
from tfopt.causes.catalogue import WORTH_SHARE
from tfopt.diagnosis.arms import FitArm
from tfopt.diagnosis.candidates import NOW, Candidate, prefetched
from tfopt.diagnosis.diagnosing import Experiments, as_arguments, experiments
from tfopt.diagnosis.findings import CauseCost, Diagnosis
from tfopt.diagnosis.techniques import LAUNCHES, OVERLAP, against
from tfopt.errors import unknown_name
from tfopt.measure import Comparison, compare
from tfopt.model.undoing import only_looks
from tfopt.text import Shown, figure, listed

ALLOWED = ("precision", "xla", "input", "overlap", "kernels")
"""What `tune` may change."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A change that was not made, and why."""

    cause: str
    reason: str

    def __str__(self) -> str:
        return f"{self.cause}: {self.reason}"


@dataclass(slots=True, kw_only=True, repr=False)
class Tuning(Shown):
    """What `tune` changed, and how much faster the training became."""

    model: keras.Model
    """The model, changed in place."""
    data: Any
    """What to give to `fit`: the data as they were given, or the dataset with its batches made ahead."""
    applied: tuple[str, ...]
    """What was applied, by the cause that it removes."""
    refused: tuple[Refused, ...]
    """What was not, each with the reason."""
    tried: tuple[str, ...]
    """What was tried together, by the cause that it removes; it was applied if that was faster."""
    measured: tuple[CauseCost, ...] = ()
    """Every change that was tried by itself, applied or not, by the cause that it removes, with what that costs."""
    comparison: Comparison | None
    """The training as it was against all that was tried together; None if nothing was."""
    code: str
    """Lines that do the same, to paste before `fit`, so that the script need not tune at each start."""
    diagnosis: Diagnosis
    """What it is based on."""
    _undo: list[Callable[[], object]] = field(default_factory=list)

    @property
    def speedup(self) -> float:
        """How many times as fast a step became; 1 if nothing was applied."""
        return self.comparison.ratio if self.applied and self.comparison else 1.0

    def undo(self) -> None:
        """Takes all changes back from the model; a second call does nothing."""
        while self._undo:
            self._undo.pop()()

    def to_dict(self) -> dict[str, Any]:
        """JSON."""
        return {
            "applied": list(self.applied),
            "tried": list(self.tried),
            "measured": [one.to_dict() for one in self.measured],
            "refused": [{"cause": one.cause, "reason": one.reason} for one in self.refused],
            "speedup": self.speedup,
            "comparison": self.comparison and self.comparison.to_dict(),
            "code": self.code,
            "diagnosis": self.diagnosis.to_dict(),
        }

    def __str__(self) -> str:
        found = self.comparison
        tried = listed([f'"{name}"' for name in self.tried], len(self.tried))
        if found is None:
            why = f"what takes away {tried} failed" if tried else "none of the allowed changes would help"
            lines = [f"Nothing was changed: {why}."]
        elif self.applied:
            code = (f"    {line}" for line in self.code.splitlines())
            lines = [f"A step is now {found}.", "", *code]
        else:
            again = "; a repeat may decide otherwise" if found.verdict != "slower" else ""
            lines = [f"Nothing was changed. Without {tried}, a step is {found}{again}."]
        if self.measured:
            now_ms = self.diagnosis.now.median_ms
            lines += ["", "Tried one by one:", *(f"- {one.name}: {_figures(one, now_ms)}." for one in self.measured)]
        if self.refused:
            lines += ["", "Not changed:", *(f"- {one}" for one in self.refused)]
        return "\n".join(lines)


@only_looks
def tune(
    model: keras.Model,
    data: Any,
    allow: Collection[str] = ALLOWED,
    *,
    callbacks: Collection[keras.callbacks.Callback] = (),
    steps: int = 50,
    tolerance: float | None = None,
) -> Tuning:
    """Diagnoses training, applies what pays, and times all of it together against training as it was.

    Only what computes the same is applied: 16 bits if `tfopt.precision.check` passes them, XLA if `tfopt.xla.explain`
    finds the same results with it, overlap and prefetching, which change no result. If the interval does not show that
    all of it together is faster, nothing is changed. The batch size, the learning rate and the order of the data stay.

    Args:
        model: A compiled model; it is changed in place, and its weights and its training state stay.
        data: As for `tfopt.diagnose`.
        allow: What may be changed: some of "precision", "xla", "input", "overlap", "kernels". Default: all.
        callbacks, steps: As for `tfopt.diagnose`.
        tolerance: The largest `drift` that XLA may have, as in `tfopt.xla.decide`. None: as `tfopt.xla.explain`
            compares, to within 1 %, or 10 % in 16 bits.

    Returns:
        What was applied and what was not, each change that was tried with its figure, the data to give to `fit`, and
        the lines that do the same.

    Raises:
        ValueError: If `allow` names anything else, and as `tfopt.diagnose`.
        TypeError, tfopt.errors.PipelineError, tfopt.errors.UnsupportedError: As `tfopt.diagnose`.

    Example:
        >>> tuning = tfopt.tune(model, dataset)
        >>> print(tuning)
        A step is now 2.31 times as fast (95 %: 2.24–2.37). …
        >>> model.fit(tuning.data, epochs=10)
    """
    arguments = as_arguments(data) | {"callbacks": callbacks}
    tuning = tune_fit(model, arguments, allow, steps=steps, tolerance=tolerance)
    if tuning.data is arguments["x"]:  # of arrays only the first
        tuning.data = data
    return tuning


def tune_fit(
    model: keras.Model,
    arguments: Mapping[str, Any],
    allow: Collection[str] = ALLOWED,
    *,
    steps: int = 50,
    tolerance: float | None = None,
) -> Tuning:
    """Tunes the training that `model.fit(**arguments)` would run; otherwise as `tune`."""
    for name in (allow := (allow,) if isinstance(allow, str) else allow):
        if name not in ALLOWED:
            raise unknown_name("change", name, ALLOWED)
    with experiments(model, arguments, steps) as its:
        diagnosis = its.run()
        changeable = {one.name for one in its.tested if one.kind}
        chosen, refused = _chosen(its, diagnosis, allow, tolerance)
        dataset = prefetched(arguments["x"]) if any(one.kind == "input" for one in chosen) else None
        comparison = _together(its, chosen, dataset) if chosen else None
    tried = tuple(one.name for one in chosen)
    faster = comparison is not None and comparison.verdict == "faster"
    tuning = Tuning(
        model=model,
        data=dataset if faster and dataset is not None else arguments["x"],
        applied=tried if faster else (),
        tried=tried,
        measured=tuple(one for one in diagnosis.causes if one.name in changeable),
        refused=tuple(refused),
        comparison=comparison,
        code=_code(chosen) if faster else "",
        diagnosis=diagnosis,
    )
    if faster:
        apply_changes(model, tuning.applied, tuning._undo)
    return tuning


def _chosen(
    its: Experiments, diagnosis: Diagnosis, allow: Collection[str], tolerance: float | None
) -> tuple[list[Candidate], list[Refused]]:
    """The candidates to apply, the one that pays most first, and why others are not."""
    candidates = {one.name: one for one in its.tested}
    chosen, refused = [], []
    for cause in diagnosis.worth_changing:
        one = candidates.get(cause.name)
        reason = (
            "only you can change this; see the diagnosis"
            if one is None or not one.kind
            else f"allow leaves out {one.kind!r}"
            if one.kind not in allow
            else _reason_against(its, one, tolerance)
        )
        if reason or one is None:
            refused.append(Refused(cause.name, reason))
        else:
            chosen.append(one)
    if any(one.technique is LAUNCHES for one in chosen):
        refused += [Refused(one.name, f"{LAUNCHES.code} includes it") for one in chosen if one.technique is OVERLAP]
        chosen = [one for one in chosen if one.technique is not OVERLAP]
    refused += [Refused(one.name, one.reason) for one in diagnosis.not_tested]
    return chosen, refused


def _reason_against(its: Experiments, one: Candidate, tolerance: float | None) -> str:
    """Why a change that may be made is not; empty if nothing speaks against it."""
    if one.kind == "xla" and tolerance is not None and not its.training.model.jit_compile:
        found = xla.decide(its.training.model, its.training.resident, steps=5, tolerance=tolerance)
        if found.drift is None:
            return f"its drift is unknown: {found.reason}"
        if not found.drift <= tolerance:
            return f"its drift is {found.drift:.2g}, the tolerance {tolerance:g}"
    return ""


def _figures(cause: CauseCost, now_ms: float) -> str:
    """What a change saves or costs by itself, and whether a repeat may decide otherwise on it."""
    slower = cause.cost_ms < 0
    low, high = map(figure, sorted(-ms if slower else ms for ms in cause.interval_ms))
    change = f"{figure(abs(cause.cost_ms))} ms {'slower' if slower else 'less'}"
    saved = f"{change} of {figure(now_ms)} ms a step (95 %: {low} to {high})"
    least_ms = WORTH_SHARE * now_ms
    sure = cause.interval_ms[0] >= least_ms or cause.interval_ms[1] <= least_ms
    return saved if sure else f"{saved}, so a repeat may decide otherwise"


def _together(its: Experiments, chosen: list[Candidate], dataset: tf.data.Dataset | None) -> Comparison | None:
    """Times all changes together against the training as it was; None if together they fail."""
    changes = [one.technique.during for one in chosen if one.technique]
    arms = {NOW: FitArm(its.training), "tuned": FitArm(its.training, dataset=dataset, changes=changes)}
    times = its.interleave(arms)
    return compare(times[NOW], times["tuned"]) if "tuned" in times else None


def apply_changes(model: keras.Model, causes: Collection[str], undo: list[Callable[[], object]]) -> None:
    """Takes causes of these names away from a model for good, and adds to `undo` what gives them back; all or none."""
    before = len(undo)
    try:
        for name in causes:
            undo.append(against(name).apply(model))
    except BaseException:
        while len(undo) > before:
            undo.pop()()
        raise


def _code(chosen: list[Candidate]) -> str:
    lines = [line for one in chosen for line in one.lines.splitlines()]
    return "\n".join(dict.fromkeys(lines))
