"""Step times as raw samples, several variants measured in turn, and two compared by a ratio with its interval."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import numpy as np

from tfopt.text import Shown

_RESAMPLES = 2000
_ENDS = (2.5, 97.5)  # percentiles: 95 % lie between


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
        return float(np.median([np.median(repeat) for repeat in self.repeats_ms]))

    @property
    def interval_ms(self) -> tuple[float, float]:
        """The 95 % bootstrap interval of `median_ms`."""
        return _interval([self.repeats_ms], lambda medians: medians[0])

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
        low, high = self.interval_ms
        rate = "" if self.examples_per_second is None else f", {self.examples_per_second:,.0f} examples/s"
        return (
            f"{self.median_ms:.3g} ms {self.a_step} (95 %: {low:.3g}–{high:.3g}{rate}; "
            f"first {self.first_step_seconds:.2g} s)"
        )


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Comparison(Shown):
    """How many times as fast the second of two measurements ran as the first."""

    ratio: float
    """Time of the first over time of the second: above 1, the second is faster."""
    interval: tuple[float, float]
    """The 95 % bootstrap interval of `ratio`."""

    @property
    def verdict(self) -> str:
        """ "faster", "slower", "no difference" (the whole interval within 5 %) or "too noisy to tell"."""
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
        return cls(ratio=values["ratio"], interval=tuple(values["interval"]))

    def __str__(self) -> str:
        found = f"{self.ratio:.3g} times as fast (95 %: {self.interval[0]:.3g}–{self.interval[1]:.3g})"
        return found if self.verdict == "faster" else f"{found}, {self.verdict}"


def compare(a: StepTimes, b: StepTimes) -> Comparison:
    """Compares two measurements.

    With the same number of repeats they are compared repeat by repeat, so that drift in the machine's speed does not
    distort the ratio of measurements from `interleave`. The point estimate is the median of those ratios.

    Args:
        a: The baseline.
        b: The other measurement.

    Returns:
        The ratio a/b with its 95 % interval: 2.0 means that b takes half the time.

    Example:
        >>> slow = StepTimes(repeats_ms=((4.0, 4.1),), steps_per_sample=5, first_step_seconds=1.0)
        >>> fast = StepTimes(repeats_ms=((2.0, 2.0),), steps_per_sample=5, first_step_seconds=1.0)
        >>> round(compare(slow, fast).ratio, 3)
        2.025
    """
    if len(a.repeats_ms) == len(b.repeats_ms):
        ratios = [np.median(x) / np.median(y) for x, y in zip(a.repeats_ms, b.repeats_ms, strict=True)]
        interval = _interval([a.repeats_ms, b.repeats_ms], lambda medians: medians[0] / medians[1])
        return Comparison(ratio=float(np.median(ratios)), interval=interval)
    # With different numbers of repeats, each side is resampled separately.
    medians = [
        _resampled(np.random.default_rng(seed), _pools(seed, times.repeats_ms)) for seed, times in enumerate([a, b])
    ]
    low, high = np.percentile(medians[0] / medians[1], _ENDS)
    return Comparison(ratio=a.median_ms / b.median_ms, interval=(float(low), float(high)))


def difference_ms(a: StepTimes, b: StepTimes) -> tuple[float, tuple[float, float]]:
    """Returns how many milliseconds a step of `a` takes longer than one of `b`, with the 95 % bootstrap interval.

    The measurements come from one `interleave` and are compared turn by turn, as in `compare`.

    Example:
        >>> slow = StepTimes(repeats_ms=((4.0, 4.2),), steps_per_sample=5, first_step_seconds=1.0)
        >>> fast = StepTimes(repeats_ms=((2.0, 2.0),), steps_per_sample=5, first_step_seconds=1.0)
        >>> round(difference_ms(slow, fast)[0], 3)
        2.1
    """
    turns = [float(np.median(x) - np.median(y)) for x, y in zip(a.repeats_ms, b.repeats_ms, strict=True)]
    return float(np.median(turns)), _interval([a.repeats_ms, b.repeats_ms], lambda medians: medians[0] - medians[1])


def interleave(
    variants: Mapping[str, Callable[[], StepTimes]],
    repeats: int = 5,
    *,
    on_progress: Callable[[str, int], None] | None = None,
) -> dict[str, StepTimes]:
    """Measures variants in turn, A B A B …, so that drift in the machine's speed affects them equally.

    Args:
        variants: A callable per name that measures once, such as a `StepTimer` or `FitTimer`, which compile only once.
        repeats: Turns. Six or more make the interval of `compare` a full 95 % one; five cover 94 %.
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


_Repeats = Sequence[Sequence[float]]


def _interval(measurements: Sequence[_Repeats], statistic: Callable[[Sequence[Any]], Any]) -> tuple[float, float]:
    """The bootstrap interval of a statistic of medians, resampling repeats and the samples within each.

    With five repeats this is about the range of the five, which covers the true median 94 times in 100.
    """
    pools = [_pools(seed, repeats) for seed, repeats in enumerate(measurements)]
    low, high = np.percentile(_resampled(np.random.default_rng(len(measurements)), statistic(pools)), _ENDS)
    return float(low), float(high)


def _pools(seed: int, repeats: _Repeats) -> Any:
    """Medians of many resamples of each repeat's samples: shape (repeats, resamples)."""
    random = np.random.default_rng(seed)
    return np.array([np.median(random.choice(np.asarray(r), size=(_RESAMPLES, len(r))), axis=1) for r in repeats])


def _resampled(random: np.random.Generator, pools: Any) -> Any:
    """Medians over repeats drawn with replacement: shape (resamples,)."""
    rows = random.integers(len(pools), size=(_RESAMPLES, len(pools)))
    columns = random.integers(_RESAMPLES, size=rows.shape)
    return np.median(pools[rows, columns], axis=1)
