"""What a suite is made of: cases, each a baseline and its variants, measured in turn and checked for their result."""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from tfopt.bench.results import CaseResult, Check, CommunicationResult
from tfopt.measure import StepTimes
from tfopt.measure.timers import wait
from tfopt.text import percent

REPEATS = 6
"""Turns of each variant: with six the interval covers 95 %."""

Timer = Callable[[], StepTimes]
Judge = Callable[[Sequence[float], Sequence[float]], Check]
"""From the baseline's values and a variant's, whether their results agree."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How large the workloads are."""

    batch_size: int  # of the `digits` net
    width: int  # factor on the `digits` net's channels
    steps: int  # timed in each turn
    photos: int  # JPEG files
    resnet: int | None  # batch size for ResNet-50; None leaves it out
    seeds: tuple[int, ...]  # of the training runs of each variant whose accuracy is compared
    repeats: int = 2 * REPEATS  # turns of each variant at most


# All suites together in five minutes on two cores.
CPU = Scale(batch_size=64, width=1, steps=30, photos=192, resnet=None, seeds=(0,))
GPU = Scale(batch_size=256, width=4, steps=200, photos=4096, resnet=256, seeds=(0, 1, 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to train."""

    name: str
    note: str  # what it is, in a few words
    techniques: tuple[str, ...] = ()  # that it contains, by the names that advice knows
    # Builds what measures it, in the variant's first turn; what must be cleaned up afterwards goes on the stack.
    timer: Callable[[ExitStack], Timer]
    values: Callable[[], Sequence[float]] | None = None  # for `Case.judge`; None: its result is not checked
    recommended: bool = False  # by tfopt for this device
    ceiling: bool = False  # no way to train, but what the others can reach at most; of several the slowest counts
    gpus: int = 1  # how many it trains on, whose clocks and energy are read; 0: reading would disturb
    dtype: str | None = None  # of its matrix products, as for `measure.matmul_tflops`


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A question put to this machine. The first variant is the baseline."""

    suite: str
    workload: str
    question: str
    unit: str  # what one sample times
    variants: Sequence[Variant]  # at least two
    judge: Judge | None = None  # None: results are not checked
    repeats: int = REPEATS  # turns of each variant
    profile: Callable[[], dict[str, Any]] | None = None  # of the input, as `PipelineProfile.to_dict()`
    gate: Callable[[], list[dict[str, Any]]] | None = None  # as `PrecisionReport.to_dict()` for each policy
    communication: Callable[[Mapping[str, StepTimes]], CommunicationResult] | None = None  # from the times by variant
    model: Callable[[], keras.Model] | None = None  # whose operations are set against the device's rates
    limit_seconds: float = 900.0  # after which it counts as hung

    def keeps(self, earlier: CaseResult | None) -> bool:
        """Whether the turns of an unfinished attempt, in another process, count."""
        if earlier is None or not earlier.unfinished:
            return False
        names = [variant.name for variant in self.variants]
        return self.repeats == earlier.planned_turns and names == [variant.name for variant in earlier.variants]

    @property
    def planned(self) -> CaseResult:
        """The result before anything is measured."""
        return CaseResult(
            suite=self.suite,
            workload=self.workload,
            question=self.question,
            unit=self.unit,
            baseline=self.variants[0].name,
            planned_turns=self.repeats,
        )


def same_accuracy(examples: int, at_least: float = 0.95) -> Judge:
    """Judges test accuracies of several seeds: high enough, and within two standard errors of the baseline's.

    The standard error of a difference adds the spread over the seeds and that of a test set of so many examples.
    """

    def error(values: Sequence[float]) -> float:
        mean = statistics.fmean(values)
        spread = statistics.variance(values) / len(values) if len(values) > 1 else 0.0
        return math.sqrt(spread + mean * (1 - mean) / examples)

    def judge(baseline: Sequence[float], values: Sequence[float]) -> Check:
        mean, expected = statistics.fmean(values), statistics.fmean(baseline)
        allowed = 2 * math.hypot(error(baseline), error(values))
        return Check(
            what=f"test accuracy of {len(values)} seeds: at least {percent(at_least)}, within two standard errors",
            values=tuple(values),
            passed=mean >= at_least and abs(mean - expected) <= allowed,
            text=f"{percent(mean)} accuracy",
        )

    return judge


def same_values(what: str, text: str) -> Judge:
    """Judges values that must equal the baseline's to the bit; the check says how many differ."""

    def judge(baseline: Sequence[float], values: Sequence[float]) -> Check:
        unequal = sum(a != b for a, b in zip(baseline, values, strict=False)) + abs(len(baseline) - len(values))
        passed = not unequal and bool(values)
        found = text if passed else f"{unequal} of {len(baseline)} differ"
        return Check(what=what, values=(float(unequal),), passed=passed, text=found)

    return judge


def flat_weights(net: keras.Model) -> list[float]:
    """Every weight of a net, one after the other, for a comparison bit by bit."""
    return [float(value) for weights in net.get_weights() for value in np.ravel(weights)]


class DrawTimer:
    """Times how long it takes to draw a batch, or the next result of a function.

    Args:
        make: Returns new input, or a list of the function's next result; called again when that runs out. The device
            is waited for at the end of each sample.
        batch_size: Examples in a batch.
        clock: Seconds, monotonic.
    """

    def __init__(
        self, make: Callable[[], Iterable[Any]], batch_size: int, *, clock: Callable[[], float] = time.perf_counter
    ):
        self._make, self._batch_size, self._clock = make, batch_size, clock
        self._first_step_seconds: float | None = None

    def __call__(self, steps: int, *, warmup: int, samples: int) -> StepTimes:
        """Draws `steps` batches of new input in that many samples, once the warm-up has used up what lay ready."""
        block = -(-steps // samples)
        started = self._clock()
        batches = self._batches()
        _draw(batches, 1)
        if self._first_step_seconds is None:
            self._first_step_seconds = self._clock() - started
        _draw(batches, warmup)
        marks = [self._clock()]
        for _ in range(samples):
            _draw(batches, block)
            marks.append(self._clock())
        return StepTimes(
            repeats_ms=(tuple((end - start) * 1000 / block for start, end in itertools.pairwise(marks)),),
            steps_per_sample=block,
            first_step_seconds=self._first_step_seconds,
            examples_per_step=self._batch_size,
        )

    def _batches(self) -> Iterator[Any]:
        while True:
            batches = iter(self._make())
            yield next(batches)  # an error for empty input, in place of an endless search
            yield from batches


def _draw(batches: Iterator[Any], number: int) -> None:
    for _ in range(number):
        next(batches)
    wait()
