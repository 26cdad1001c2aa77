"""Step times as raw samples, several variants measured in turn, and two compared by a ratio with its interval.

The samples of a repeat share what the machine was doing then: only repeats say how much a measurement varies.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, median, stdev
from typing import Any, Self

from tfopt.text import Shown

Interval = tuple[float, float] | None
"""The ends of a 95 % interval; None if there are fewer than three repeats, too few to tell."""
# Student's t at 97.5 %, by the number of values. Ranks, which tolerate outliers, need six.
_STUDENT = {3: 4.303, 4: 3.182, 5: 2.776}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class StepTimes(Shown):
    """The time of a training step, as raw samples."""

    repeats_ms: tuple[tuple[float, ...], ...]
    """Milliseconds per step: a tuple per run of the measurement, a value per block of steps, waited for at its end."""
    steps_per_sample: int
    """How many steps a block has."""
    first_step_seconds: float
    """The first step, with tracing, compilation and autotuning."""
    examples_per_step: int | None = None
    """The batch size, if known."""

    def __post_init__(self) -> None:
        if not self.repeats_ms or not all(self.repeats_ms):
            raise ValueError(f"Expected at least one sample in each repeat. Received: repeats_ms={self.repeats_ms!r}.")
        if not all(0 < sample < math.inf for sample in self.samples_ms):
            raise ValueError(f"Expected finite samples above 0 ms. Received: repeats_ms={self.repeats_ms!r}.")

    @property
    def samples_ms(self) -> tuple[float, ...]:
        """All samples, in the order they were taken."""
        return tuple(sample for repeat in self.repeats_ms for sample in repeat)

    @property
    def median_ms(self) -> float:
        """The median over the repeats of each repeat's median."""
        return median(map(median, self.repeats_ms))

    @property
    def interval_ms(self) -> Interval:
        """The 95 % interval of `median_ms` from repeat to repeat; None for fewer than three repeats."""
        return _factors([median(repeat) for repeat in self.repeats_ms])

    @property
    def spread_ms(self) -> tuple[float, float]:
        """`interval_ms`, or for fewer than three repeats the least and the greatest sample."""
        return self.interval_ms or (min(self.samples_ms), max(self.samples_ms))

    @property
    def a_step(self) -> str:
        """A step in words, with its batch size if that is known: "a step of 32 examples"."""
        size = self.examples_per_step
        return "a step" if size is None else f"a step of {size:,} example{'s' * (size != 1)}"

    @property
    def examples_per_second(self) -> float | None:
        """Throughput at the median; None if the batch size is unknown."""
        return None if self.examples_per_step is None else self.examples_per_step * 1000 / self.median_ms

    def to_dict(self) -> dict[str, Any]:
        """JSON: the raw samples and the figures derived from them."""
        return asdict(self) | {
            "median_ms": self.median_ms,
            "interval_ms": self.interval_ms,
            "examples_per_second": self.examples_per_second,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Restores the result of `to_dict` from its raw samples, ignoring the derived figures."""
        return cls(
            repeats_ms=tuple(tuple(repeat) for repeat in values["repeats_ms"]),
            steps_per_sample=values["steps_per_sample"],
            first_step_seconds=values["first_step_seconds"],
            examples_per_step=values["examples_per_step"],
        )

    def __str__(self) -> str:
        low, high = self.spread_ms
        rate = "" if self.examples_per_second is None else f", {self.examples_per_second:,.0f} examples/s"
        what = "95 %" if self.interval_ms else "samples"
        return (
            f"{self.median_ms:.3g} ms {self.a_step} ({what}: {low:.3g}–{high:.3g}{rate}; "
            f"first {self.first_step_seconds:.2g} s)"
        )


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Comparison(Shown):
    """How many times as fast the second of two measurements ran as the first."""

    ratio: float
    """Time of the first over time of the second: above 1, the second is faster."""
    interval: Interval
    """The 95 % interval of `ratio`; None for fewer than three repeats."""

    @property
    def verdict(self) -> str:
        """ "faster", "slower", "no difference" (the whole interval within 5 %), "too noisy to tell", or "too few
        repeats to tell" for fewer than three."""
        if self.interval is None:
            return "too few repeats to tell"
        low, high = self.interval
        if low > 1 and self.ratio >= 1.02:
            return "faster"
        if high < 1 and self.ratio <= 0.98:
            return "slower"
        return "no difference" if low >= 0.95 and high <= 1.05 else "too noisy to tell"

    def to_dict(self) -> dict[str, Any]:
        """JSON: ratio, interval and verdict."""
        return asdict(self) | {"verdict": self.verdict}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Restores the result of `to_dict`."""
        return cls(ratio=values["ratio"], interval=values["interval"] and tuple(values["interval"]))

    def __str__(self) -> str:
        found = f"{self.ratio:.3g} times as fast"
        if self.interval is not None:
            found += f" (95 %: {self.interval[0]:.3g}–{self.interval[1]:.3g})"
        return found if self.verdict == "faster" else f"{found}, {self.verdict}"


def compare(a: StepTimes, b: StepTimes) -> Comparison:
    """Compares two measurements.

    They are compared repeat by repeat, as far as both have one, so that drift in the machine's speed does not distort
    the ratio of measurements from `interleave`. The point estimate is the median of those ratios. Identical code is
    called faster or slower in about 5 % of all comparisons, however few repeats there are: three make a wide interval,
    and fewer decide nothing.

    Args:
        a: The baseline.
        b: The other measurement.

    Returns:
        The ratio a/b with its 95 % interval: 2.0 means that b takes half the time.

    Example:
        >>> slow = StepTimes(repeats_ms=((4.0, 4.1), (4.2,), (4.0,)), steps_per_sample=5, first_step_seconds=1.0)
        >>> fast = StepTimes(repeats_ms=((2.0, 2.0), (2.1,), (2.0,)), steps_per_sample=5, first_step_seconds=1.0)
        >>> print(compare(slow, fast))
        2 times as fast (95 %: 1.97–2.04)
    """
    ratios = [median(x) / median(y) for x, y in zip(a.repeats_ms, b.repeats_ms, strict=False)]
    return Comparison(ratio=median(ratios), interval=_factors(ratios))


def difference_ms(a: StepTimes, b: StepTimes) -> tuple[float, tuple[float, float]]:
    """Returns how many milliseconds a step of `a` takes longer than one of `b`, with its 95 % interval.

    The measurements come from one `interleave` of at least three repeats and are compared turn by turn, as in
    `compare`.

    Raises:
        ValueError: If there are fewer repeats.

    Example:
        >>> slow = StepTimes(repeats_ms=((4.0, 4.2),) * 3, steps_per_sample=5, first_step_seconds=1.0)
        >>> fast = StepTimes(repeats_ms=((2.0, 2.0),) * 3, steps_per_sample=5, first_step_seconds=1.0)
        >>> round(difference_ms(slow, fast)[0], 3)
        2.1
    """
    turns = [median(x) - median(y) for x, y in zip(a.repeats_ms, b.repeats_ms, strict=True)]
    interval = _interval(turns)
    if interval is None:
        raise ValueError(f"Expected at least three repeats to compare. Found {len(turns)}. Measure more turns.")
    return median(turns), interval


def interleave(
    variants: Mapping[str, Callable[[], StepTimes]],
    repeats: int = 5,
    *,
    on_progress: Callable[[str, int], None] | None = None,
) -> dict[str, StepTimes]:
    """Measures variants in turn, A B A B …, so that drift in the machine's speed affects them equally.

    Args:
        variants: A callable per name that measures once, such as a `StepTimer` or `FitTimer`, which compile only once.
        repeats: Turns. `compare` needs at least three; nine make its interval a fifth narrower than five.
        on_progress: Called after each measurement with the variant's name and the turn (0, 1, …).

    Returns:
        The samples of all turns by name, with one repeat per turn.

    Raises:
        ValueError: If there are no variants or `repeats` is below 1.

    Example:
        >>> times = tfopt.measure.interleave({"off": StepTimer(plain, data), "on": StepTimer(jitted, data)})
        >>> print(tfopt.measure.compare(times["off"], times["on"]))
        1.83 times as fast (95 %: 1.79–1.88)
    """
    if not variants or repeats < 1:
        raise ValueError(
            f"Expected at least one variant and one repeat. Received: {len(variants)} variants, repeats={repeats}."
        )
    turns: dict[str, list[StepTimes]] = {name: [] for name in variants}
    for turn in range(repeats):
        for name, measure in variants.items():
            turns[name].append(measure())
            if on_progress:
                on_progress(name, turn)
    return {
        name: replace(times[0], repeats_ms=tuple(repeat for part in times for repeat in part.repeats_ms))
        for name, times in turns.items()
    }


def _factors(values: Sequence[float]) -> Interval:
    """The interval of ratios or times, which vary by a factor."""
    found = _interval([math.log(value) for value in values])
    return found and (math.exp(found[0]), math.exp(found[1]))


def _interval(values: Sequence[float]) -> Interval:
    """The 95 % interval of the middle of independent values: Student's for few, by ranks for many, of any spread."""
    count = len(values)
    if count < min(_STUDENT):
        return None
    if count in _STUDENT:
        middle, wide = fmean(values), _STUDENT[count] * stdev(values) / math.sqrt(count)
        return middle - wide, middle + wide
    ordered, rank, below = sorted(values), 0, 1
    while 40 * below <= 2**count:  # of the ways in which values lie below or above the median, all equally likely
        rank += 1
        below += math.comb(count, rank)
    return ordered[rank - 1], ordered[-rank]
