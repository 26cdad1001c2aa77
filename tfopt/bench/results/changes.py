"""Two runs side by side: what became faster or slower between them."""

from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import median
from typing import Any

from tfopt.bench.results import CaseResult, Run, VariantResult
from tfopt.errors import ResultsError
from tfopt.measure import Comparison, StepTimes, compare

_ALIKE = ("python", "packages", "driver", "cuda", "cudnn", "gpus", "host.cpu_model", "host.cpus")
# Whose first components name what a machine can do: another patch of the system or the driver is the same machine.
_PATCHED = {"python": 2, "driver": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """How one variant did in the second run, compared with the first."""

    suite: str
    workload: str
    variant: str
    # Of a baseline: how many times as fast the machine was. Of another variant: how its speed over its own baseline
    # changed, since a machine that is slower today slows both. None if there is nothing to compare.
    comparison: Comparison | None
    finding: str
    failed: bool  # whether an acceptance test should fail
    missing: bool = False  # in the second run, which did not try it, or did not get that far

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self) | {"comparison": self.comparison and self.comparison.to_dict()}


def changes(before: Run, after: Run, *, threshold_percent: float = 5.0, force: bool = False) -> list[Change]:
    """Compares two runs, variant by variant of the first.

    Args:
        before: The first run.
        after: The second run.
        threshold_percent: A variant has regressed if it is slower beyond noise and by more than this.
        force: Compare even if device, driver or versions differ.

    Returns:
        A change for each variant measured in the first run. One that fails or is refused in the second run, or changes
        the result there, has failed too. One that the second run did not get to is missing.

    Raises:
        tfopt.errors.ResultsError: If the environments differ, or the runs share no case.
    """
    found = differences(before.environment, after.environment)
    if found and not force:
        raise ResultsError(
            f"Expected two runs on the same device with the same versions. Found {'; '.join(found)}. "
            "Use --force to compare anyway."
        )
    pairs = [(case, after.case(case.address)) for case in before.cases if case.error is None]
    if not any(second for _, second in pairs):
        raise ResultsError("Expected two runs that share a case. Found none. Run the same suites in both.")
    return [
        _of_variant(first, variant, second, threshold_percent) for first, second in pairs for variant in first.measured
    ]


def differences(before: dict[str, Any], after: dict[str, Any], *, patches: bool = True) -> list[str]:
    """Lists the differences of two environments because of which figures of one say nothing about the other.

    Without `patches`, another patch version of the driver or of Python is no difference.
    """
    parts = [part for name in _ALIKE for part in _parts(name, _part(before, name), _part(after, name))]
    return [
        f"{name}: {_shown(one)} and {_shown(other)}"
        for name, one, other in parts
        if one != other and (patches or _release(name, one) != _release(name, other))
    ]


def _parts(name: str, one: Any, other: Any) -> list[tuple[str, Any, Any]]:
    """What is compared of an entry: of packages, each."""
    if isinstance(one, dict) and isinstance(other, dict):
        return [(key, one.get(key), other.get(key)) for key in one | other]
    return [(name, one, other)]


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return ", ".join(value) or "none" if isinstance(value, list) else "none" if value is None else str(value)


def _part(environment: dict[str, Any], name: str) -> Any:
    value: Any = environment
    for key in name.split("."):
        value = value.get(key)
    return [gpu["name"] for gpu in value] if name == "gpus" else value


def _release(name: str, version: Any) -> Any:
    kept = _PATCHED.get(name)
    return version if kept is None or version is None else version.split(".")[:kept]


def _of_variant(
    first: CaseResult, variant: VariantResult, second: CaseResult | None, threshold_percent: float
) -> Change:
    change = partial(Change, suite=first.suite, workload=first.workload, variant=variant.name)
    other = next((v for v in second.variants if v.name == variant.name), None) if second else None
    own, now = variant.times, other.times if other else None
    if second is None or other is None or own is None or now is None:
        failed = bool((other and other.refused) or (second and second.error))
        return change(comparison=None, finding=_absence(second, other), failed=failed, missing=not failed)
    if variant.name == first.baseline:
        comparison: Comparison | None = compare(own, now)
        finding, failed = "the machine's own speed, not judged", False
    else:
        expected, relative = _in_baselines(first, own), _in_baselines(second, now)
        comparison = compare(expected, relative) if expected and relative else None
        if comparison is None:
            finding, failed = "not compared: no baseline", expected is not None
        else:
            failed = comparison.verdict == "slower" and comparison.ratio < 1 - threshold_percent / 100
            finding = "REGRESSION" if failed else comparison.verdict
    if other.verdict == "changes the result" and variant.verdict != "changes the result":
        finding, failed = "CHANGES THE RESULT", True
    return change(comparison=comparison, finding=finding, failed=failed)


def _in_baselines(case: CaseResult, times: StepTimes) -> StepTimes | None:
    """Times in units of the baseline's median in the same turn; None without a baseline."""
    baseline = case.times(case.baseline)
    if baseline is None:
        return None
    turns = zip(times.repeats_ms, baseline.repeats_ms, strict=False)
    return replace(times, repeats_ms=tuple(tuple(ms / median(unit) for ms in turn) for turn, unit in turns))


def _absence(case: CaseResult | None, variant: VariantResult | None) -> str:
    """Why the second run has no times of a variant."""
    if variant is not None and variant.refused:
        return f"refused: {variant.refused}"
    if case is not None and case.error:
        return f"failed: {case.error}"
    if case is not None and case.unfinished:
        return f"not measured: {case.unfinished}"
    return "missing in the second run"
