"""Whether variants compute the same, judged from what they computed."""

import math
import statistics
from collections.abc import Callable, Sequence

from tfopt.bench.cases import Check


def same_accuracy(examples: int, at_least: float = 0.95) -> Callable[[Sequence[float], Sequence[float]], Check]:
    """Judges test accuracies of several seeds: high enough, and within two standard errors of the baseline's.

    The standard error of a difference adds the spread over the seeds and that of a test set of this size.

    Args:
        examples: Size of the test set.
        at_least: The accuracy to reach.
    """

    def error(values: Sequence[float]) -> float:
        mean = statistics.fmean(values)
        spread = statistics.variance(values) / len(values) if len(values) > 1 else 0.0
        return math.sqrt(spread + mean * (1 - mean) / examples)

    def judge(baseline: Sequence[float], values: Sequence[float]) -> Check:
        mean, expected = statistics.fmean(values), statistics.fmean(baseline)
        allowed = 2 * math.hypot(error(baseline), error(values))
        return Check(
            what=f"test accuracy of {len(values)} seeds: at least {at_least:.0%}, within two standard errors",
            values=tuple(values),
            passed=mean >= at_least and abs(mean - expected) <= allowed,
            text=f"{mean:.1%} accuracy",
        )

    return judge


def same_values(what: str, text: str) -> Callable[[Sequence[float], Sequence[float]], Check]:
    """Judges values that must be the baseline's to the bit: how many differ is said if any does."""

    def judge(baseline: Sequence[float], values: Sequence[float]) -> Check:
        unlike = sum(a != b for a, b in zip(baseline, values, strict=False)) + abs(len(baseline) - len(values))
        passed = not unlike and bool(values)
        found = text if passed else f"{unlike} of {len(baseline)} differ"
        return Check(what=what, values=(float(unlike),), passed=passed, text=found)

    return judge
