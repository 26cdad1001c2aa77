"""What a suite is made of: cases, each a baseline and its variants, measured in turn and checked for their result."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from tfopt.bench.memory import MemoryMeter
from tfopt.measure import StepTimes, compare, interleave

REPEATS = 6
"""Turns of each variant: with six the interval covers 95 %."""

Timer = Callable[[], StepTimes]


@dataclass(frozen=True, slots=True)
class Scale:
    """How large the workloads are.

    Attributes:
        batch_size: Examples a step, for the `digits` net.
        width: Factor on the `digits` net's channels.
        steps: Steps to time in each turn.
        photos: How many JPEG files.
        resnet: Batch size for ResNet-50; None leaves it out.
        seeds: Trainings of each variant whose accuracy is compared.
    """

    batch_size: int
    width: int
    steps: int
    photos: int
    resnet: int | None
    seeds: tuple[int, ...] = (0, 1, 2)


CPU = Scale(batch_size=64, width=1, steps=40, photos=256, resnet=None)
GPU = Scale(batch_size=256, width=4, steps=200, photos=4096, resnet=256)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Whether a variant computes what the baseline computes.

    Attributes:
        what: What was compared.
        values: What was compared: an accuracy for each training, or how many values differ.
        passed: Whether they agree.
        text: In a few words, for the table.
    """

    what: str
    values: tuple[float, ...]
    passed: bool
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to train.

    Attributes:
        name: For the table.
        note: What it is, in a few words.
        timer: Makes what measures it; what must be cleaned up afterwards goes on the stack.
        values: Makes what `Case.judge` compares with the baseline's.
        recommended: Whether it is what tfopt recommends for this device.
        ceiling: Whether it is no way to train, but what the others can reach at most.
    """

    name: str
    note: str
    timer: Callable[[ExitStack], Timer]
    values: Callable[[], Sequence[float]] | None = None
    recommended: bool = False
    ceiling: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A question put to this machine. The first variant is the baseline.

    Attributes:
        suite: The suite's name.
        workload: What is trained.
        question: In words.
        unit: What one sample times.
        variants: At least two; the first is the baseline.
        judge: From the baseline's values and a variant's, whether their results agree. None: not checked.
        repeats: Turns of each variant.
        profile: Makes a profile of the input as JSON values, as `PipelineProfile.to_dict` does. None: there is none.
        gate: Checks the model in other dtype policies, as `PrecisionReport.to_dict` does. None: it is not checked.
        communication: From the times by variant, what the replicas send each other, and what the step would take on
            more of them, as JSON values. None: there is one replica.
        limit_seconds: After this time it is ended: it hangs.
    """

    suite: str
    workload: str
    question: str
    unit: str
    variants: Sequence[Variant]
    judge: Callable[[Sequence[float], Sequence[float]], Check] | None = None
    repeats: int = REPEATS
    profile: Callable[[], dict[str, Any]] | None = None
    gate: Callable[[], list[dict[str, Any]]] | None = None
    communication: Callable[[Mapping[str, StepTimes]], dict[str, Any]] | None = None
    limit_seconds: float = 900.0

    @property
    def ticks(self) -> int:
        """How many times `run` reports progress."""
        return len(self.variants) * (self.repeats + (self.judge is not None))

    def run(self, on_tick: Callable[[str], None]) -> dict[str, Any]:
        """Measures and checks every variant; returns the case's part of the results document."""
        with ExitStack() as stack:
            timers = {variant.name: MemoryMeter(partial(variant.timer, stack)) for variant in self.variants}
            times = interleave(timers, self.repeats, on_progress=lambda name, turn: on_tick(name))
        peaks = {name: timer.peak_mib for name, timer in timers.items()}
        del timers  # and with them the models, before others are trained
        checks = self._checks(on_tick)
        baseline = self.variants[0].name
        ceiling = next((times[variant.name] for variant in self.variants if variant.ceiling), None)
        return {
            "suite": self.suite,
            "workload": self.workload,
            "question": self.question,
            "unit": self.unit,
            "baseline": baseline,
            "variants": [
                _outcome(variant, variant.name == baseline, times[baseline], times[variant.name], checks)
                | {"peak_memory_mib": peaks[variant.name]}
                | {"recommended": variant.recommended, "ceiling": variant.ceiling}
                | {"of_ceiling": _of_ceiling(variant, ceiling, times[variant.name])}
                for variant in self.variants
            ],
            "profile": self.profile and self.profile(),
            "gate": self.gate and self.gate(),
            "communication": self.communication and self.communication(times),
        }

    def _checks(self, on_tick: Callable[[str], None]) -> dict[str, Check]:
        checks: dict[str, Check] = {}
        expected: Sequence[float] = ()
        if self.judge is None:
            return checks
        for variant in self.variants:
            values = variant.values() if variant.values else ()
            if variant is self.variants[0]:
                expected = values
            checks[variant.name] = self.judge(expected, values)
            on_tick(variant.name)
        return checks


def _outcome(
    variant: Variant, is_baseline: bool, baseline: StepTimes, times: StepTimes, checks: Mapping[str, Check]
) -> dict[str, Any]:
    comparison = None if is_baseline else compare(baseline, times)
    check = checks.get(variant.name)
    if check is not None and not check.passed:
        verdict = "changes the result"
    else:
        verdict = "baseline" if comparison is None else comparison.verdict
    return {
        "name": variant.name,
        "note": variant.note,
        "step_time": times.to_dict(),
        "comparison": comparison and comparison.to_dict(),
        "check": check and asdict(check),
        "verdict": verdict,
    }


def _of_ceiling(variant: Variant, ceiling: StepTimes | None, times: StepTimes) -> dict[str, Any] | None:
    """The share of the ceiling's speed that a variant reaches."""
    return None if ceiling is None or variant.ceiling else compare(ceiling, times).to_dict()


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
