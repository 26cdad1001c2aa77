"""What follows from the samples: speeds in times of that by hand, with intervals, and whether goals are met."""

import statistics
from typing import Any

import harness

from pipeline_cases import CLOCKS, GRAIN, HAND, TFOPT, Goal
from tfopt.bench.report import formatting
from tfopt.bench.report.formatting import number
from tfopt.measure import Comparison, compare

JUDGED_BY = "wall_ms"
"""The clock whose figure is held against the goal; the other stands beside it."""


def verdict(case: dict[str, Any]) -> str:
    """Returns "met", "missed", "no goal", or what went wrong with a case."""
    goal, judged = case.get("goal"), speed(case, HAND, JUDGED_BY)
    if case.get("error"):
        return f"failed: {case['error']}"
    if judged is None:
        return "not measured"
    if goal is None:
        return "no goal"
    return "met" if Goal(**goal).met(judged.ratio) else "missed"


def samples_of(case: dict[str, Any], clock: str) -> dict[str, list[float | None]]:
    """Returns the milliseconds of each turn by way, None for one that it left out."""
    return {way["name"]: way.get(clock, []) for way in case.get("ways", ())}


def speed(case: dict[str, Any], other: str, clock: str) -> Comparison | None:
    """Returns the speed of tfopt in times of another way's, turn by turn; None if one of them has no samples."""
    samples = samples_of(case, clock)
    turns = zip(samples.get(other, ()), samples.get(TFOPT, ()), strict=False)  # the last round may be cut short
    both = [turn for turn in turns if None not in turn]
    if not both:
        return None
    return compare(*(harness.one_sample(*way) for way in zip(*both, strict=True)))


def _text(comparison: Comparison | None, of_time: bool, interval: bool = True) -> str:
    if comparison is None:
        return "–"
    ratio, ends = comparison.ratio, comparison.interval
    if of_time:
        ratio, ends = 1 / ratio, ends and (1 / ends[1], 1 / ends[0])
    return formatting.ratio(ratio, ends) if interval else f"{number(ratio)}×"


def _median(case: dict[str, Any], name: str) -> str:
    turns = [ms for ms in samples_of(case, JUDGED_BY).get(name, ()) if ms is not None]
    return number(statistics.median(turns)) if turns else "–"


def cells(case: dict[str, Any]) -> list[str]:
    """Returns a case's line of the table."""
    goal = case.get("goal")
    of_time = bool(goal and goal["of_time"])
    return [
        case["question"],
        goal["text"] if goal else "–",
        _median(case, HAND),
        _median(case, TFOPT),
        *(_text(speed(case, HAND, clock), of_time) for clock in CLOCKS),
        _text(speed(case, GRAIN, JUDGED_BY), False, interval=False),
        verdict(case),
    ]


_FIGURES = ("ms by hand", "ms", "By the wall", "By CPU time", "Of Grain's speed")


def markdown(document: dict[str, Any]) -> str:
    """Returns the table of all cases as GitHub's Markdown."""
    heads = ("What", "Goal", *_FIGURES, "")
    return harness.table(heads, map(cells, document["cases"]), right=_FIGURES) + "\n"
