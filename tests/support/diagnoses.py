"""Diagnoses that nobody measured."""

from tfopt.diagnosis import CauseCost, Diagnosis
from tfopt.measure import StepTimes

NOW_MS = 100.0


def times(ms: float, examples: int | None = 32) -> StepTimes:
    """Two turns that took the same."""
    return StepTimes(repeats_ms=((ms,), (ms,)), steps_per_sample=5, first_step_seconds=1.0, examples_per_step=examples)


def cause(name, cost_ms, interval_ms=None, evidence="Measured.", remedy="change()", gain=None) -> CauseCost:
    """A cause of a step of 100 ms, by default known to 1 ms."""
    return CauseCost(
        name=name,
        cost_ms=cost_ms,
        interval_ms=interval_ms or (cost_ms - 1, cost_ms + 1),
        share=cost_ms / NOW_MS,
        evidence=evidence,
        remedy=remedy,
        gain=gain,
    )


def diagnosis(*causes: CauseCost, floor: float = 50.0, examples: int | None = 32, **fields) -> Diagnosis:
    """A step of 100 ms with these causes."""
    values = {"not_tested": (), "computation": "It computes.", "environment": {"tfopt": "0.1.0"}, **fields}
    return Diagnosis(now=times(NOW_MS, examples), floor=times(floor), causes=causes, **values)
