"""Two runs side by side: what became faster or slower between them."""

from dataclasses import dataclass
from typing import Any

from tfopt.bench import words
from tfopt.errors import ResultsError
from tfopt.measure import Comparison, StepTimes, compare

_ALIKE = ("python", "packages", "driver", "cuda", "cudnn", "gpus", "host.cpu_model", "host.cpus")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """How one variant did in the second run, against the first."""

    suite: str
    workload: str
    variant: str
    comparison: Comparison
    regressed: bool

    def to_dict(self) -> dict[str, Any]:
        """JSON."""
        names = ("suite", "workload", "variant", "regressed")
        return {name: getattr(self, name) for name in names} | {"comparison": self.comparison.to_dict()}

    def __str__(self) -> str:
        speed = words.ratio(self.comparison.ratio, self.comparison.interval)
        end = "REGRESSION" if self.regressed else self.comparison.verdict
        return f"{self.suite} on {self.workload}, {self.variant}: {speed}, {end}"


def changes(
    before: dict[str, Any], after: dict[str, Any], *, threshold_percent: float = 5.0, force: bool = False
) -> list[Change]:
    """Compares the variants that two results documents share.

    Args:
        before: The first document.
        after: The second.
        threshold_percent: A variant has regressed if it is slower beyond noise and by more than this.
        force: Compare even where device, driver or versions differ.

    Raises:
        tfopt.errors.ResultsError: The runs are of unlike environments, or share no variant.
    """
    unlike = [name for name in _ALIKE if _part(before, name) != _part(after, name)]
    if unlike and not force:
        found = "; ".join(f"{name}: {_part(before, name)} and {_part(after, name)}" for name in unlike)
        raise ResultsError(
            f"Expected two runs on the same device with the same versions. Found {found}. "
            "Use --force to compare anyway."
        )
    firsts, seconds = _times(before), _times(after)
    shared = [key for key in firsts if key in seconds]
    if not shared:
        raise ResultsError("Expected two runs that share a variant. Found none. Run the same suites in both.")
    return [_change(key, compare(firsts[key], seconds[key]), threshold_percent) for key in shared]


def _change(key: tuple[str, str, str], comparison: Comparison, threshold_percent: float) -> Change:
    suite, workload, variant = key
    regressed = comparison.verdict == "slower" and comparison.ratio < 1 - threshold_percent / 100
    return Change(suite=suite, workload=workload, variant=variant, comparison=comparison, regressed=regressed)


def _times(document: dict[str, Any]) -> dict[tuple[str, str, str], StepTimes]:
    return {
        (case["suite"], case["workload"], variant["name"]): StepTimes.from_dict(variant["step_time"])
        for case in document["cases"]
        for variant in case["variants"]
    }


def _part(document: dict[str, Any], name: str) -> Any:
    value = document["environment"]
    for key in name.split("."):
        value = value.get(key)
    return [gpu["name"] for gpu in value] if name == "gpus" else value
