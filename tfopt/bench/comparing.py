"""Two runs side by side: what became faster or slower between them."""

from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

from tfopt.bench import words
from tfopt.bench.results import differences
from tfopt.errors import ResultsError
from tfopt.measure import Comparison, StepTimes, compare


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """How one variant did in the second run, against the first.

    Attributes:
        suite, workload, variant: Which.
        comparison: For a baseline, how many times as fast the machine was. For another variant, by how much its speed
            against its own baseline changed: a machine that is slower today slows both. None if there is nothing to
            compare.
        finding: In words.
        failed: Whether an acceptance test should fail.
    """

    suite: str
    workload: str
    variant: str
    comparison: Comparison | None
    finding: str
    failed: bool

    def to_dict(self) -> dict[str, Any]:
        """JSON."""
        names = ("suite", "workload", "variant", "finding", "failed")
        return {name: getattr(self, name) for name in names} | {
            "comparison": self.comparison and self.comparison.to_dict()
        }

    def __str__(self) -> str:
        speed = f" {words.ratio(self.comparison.ratio, self.comparison.interval)}," if self.comparison else ""
        return f"{self.suite} on {self.workload}, {self.variant}:{speed} {self.finding}"


def changes(
    before: dict[str, Any], after: dict[str, Any], *, threshold_percent: float = 5.0, force: bool = False
) -> list[Change]:
    """Compares two results documents, variant by variant of the first.

    Args:
        before: The first document.
        after: The second.
        threshold_percent: A variant has regressed if it is slower beyond noise and by more than this.
        force: Compare even where device, driver or versions differ.

    Returns:
        A change for each variant of the first document; those that the second lacks or in which it changes the result
        have failed too.

    Raises:
        tfopt.errors.ResultsError: The runs are of unlike environments, or share no case.
    """
    unlike = differences(before["environment"], after["environment"])
    if unlike and not force:
        raise ResultsError(
            f"Expected two runs on the same device with the same versions. Found {'; '.join(unlike)}. "
            "Use --force to compare anyway."
        )
    cases = {(case["suite"], case["workload"]): case for case in after["cases"]}
    pairs = [(case, cases.get((case["suite"], case["workload"]))) for case in before["cases"] if not case["error"]]
    if not any(second for _, second in pairs):
        raise ResultsError("Expected two runs that share a case. Found none. Run the same suites in both.")
    return [change for first, second in pairs for change in _in_case(first, second, threshold_percent)]


def _in_case(first: dict[str, Any], second: dict[str, Any] | None, threshold_percent: float) -> list[Change]:
    seconds = {variant["name"]: variant for variant in second["variants"]} if second else {}
    found = []
    for variant in first["variants"]:
        name, other = variant["name"], seconds.get(variant["name"])
        is_baseline = name == first["baseline"]
        change = partial(Change, suite=first["suite"], workload=first["workload"], variant=name)
        if second is None or other is None or second["baseline"] not in seconds:
            why = f"failed: {second['error']}" if second and second["error"] else "missing in the second run"
            found.append(change(comparison=None, finding=why, failed=True))
            continue
        sides = [(first, variant), (second, other)]
        if is_baseline:
            comparison = compare(*(StepTimes.from_dict(side["step_time"]) for _, side in sides))
            finding, failed = "the machine's own speed, not judged", False
        else:
            comparison = compare(*(_in_baselines(case, side) for case, side in sides))
            failed = comparison.verdict == "slower" and comparison.ratio < 1 - threshold_percent / 100
            finding = "REGRESSION" if failed else comparison.verdict
        if other["verdict"] == "changes the result" != variant["verdict"]:
            finding, failed = "CHANGES THE RESULT", True
        found.append(change(comparison=comparison, finding=finding, failed=failed))
    return found


def _in_baselines(case: dict[str, Any], variant: dict[str, Any]) -> StepTimes:
    """A variant's times in units of its baseline's median in the same turn."""
    baseline = next(other for other in case["variants"] if other["name"] == case["baseline"])
    turns = zip(variant["step_time"]["repeats_ms"], baseline["step_time"]["repeats_ms"], strict=True)
    repeats = tuple(tuple(ms / median(unit) for ms in turn) for turn, unit in turns)
    return replace(StepTimes.from_dict(variant["step_time"]), repeats_ms=repeats)
