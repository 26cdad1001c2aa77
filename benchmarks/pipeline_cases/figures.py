"""What follows from the samples: speeds in times of that by hand, with intervals, and whether goals are met."""

import statistics
from dataclasses import dataclass
from typing import Any

import harness

from pipeline_cases import CLOCKS, GRAIN, HAND, TFOPT, Goal
from tfopt.bench.report import formatting
from tfopt.bench.report.formatting import number
from tfopt.measure import Comparison, compare

JUDGED_BY = "wall_ms"
"""The clock whose figure is held against the goal; the other stands beside it."""


@dataclass(frozen=True, slots=True)
class Row:
    """A case, as the table shows it."""

    question: str
    goal: str
    wall: Comparison | None  # tfopt against tf.data by hand; None before both have samples
    cpu: Comparison | None
    grain: Comparison | None  # tfopt against Grain, by the wall
    verdict: str  # "met", "missed", "no goal", or what went wrong


def row(case: dict[str, Any]) -> Row:
    """Returns the figures of a case's JSON."""
    goal = case.get("goal")
    wall, cpu = (speed(case, HAND, clock) for clock in CLOCKS)
    judged = {"wall_ms": wall, "cpu_ms": cpu}[JUDGED_BY]
    if case.get("error"):
        verdict = f"failed: {case['error']}"
    elif judged is None:
        verdict = "not measured"
    elif goal is None:
        verdict = "no goal"
    else:
        verdict = "met" if Goal(**goal).met(judged.ratio) else "missed"
    return Row(
        question=case["question"],
        goal=goal["text"] if goal else "–",
        wall=wall,
        cpu=cpu,
        grain=speed(case, GRAIN, JUDGED_BY),
        verdict=verdict,
    )


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
    found, of_time = row(case), bool(case.get("goal") and case["goal"]["of_time"])
    return [
        found.question,
        found.goal,
        _median(case, HAND),
        _median(case, TFOPT),
        _text(found.wall, of_time),
        _text(found.cpu, of_time),
        _text(found.grain, False, interval=False),
        found.verdict,
    ]


_FIGURES = ("ms by hand", "ms", "By the wall", "By CPU time", "Of Grain's speed")


def markdown(document: dict[str, Any]) -> str:
    """Returns the table of all cases as GitHub's Markdown."""
    heads = ("What", "Goal", *_FIGURES, "")
    return harness.table(heads, map(cells, document["cases"]), right=_FIGURES) + "\n"
