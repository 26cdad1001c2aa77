"""When a metric has been beyond its bound for so long that an alert is due."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from tfopt.checks import number

DEFAULT_BELOW = 50.0  # the very object tells whether a caller gave a bound
_WITH_DEFAULT = ("gpu_utilization_percent", "sm_active_percent")


@dataclass(frozen=True, slots=True)
class Bound:
    """A bound of a metric, in the metric's unit."""

    metric: str
    value: float
    above: bool
    """Whether values above are out of bounds; otherwise those below."""

    @property
    def margin(self) -> float:
        """How far within the bound a metric counts as recovered: a tenth of the bound.

        For a percentage at most half of the way to 0 or 100, so that it can be reached.
        """
        tenth = abs(self.value) / 10
        if not self.metric.endswith("_percent"):
            return tenth
        return max(0.0, min(tenth, (self.value if self.above else 100 - self.value) / 2))

    def exceeded_by(self, value: float) -> bool:
        """Whether a value is out of bounds."""
        return value > self.value if self.above else value < self.value

    def __str__(self) -> str:
        return f"at {'most' if self.above else 'least'} {self.value:,.10g}"


def make_bound(metric: str, below: float | None, above: float | None) -> Bound:
    """Returns the bound that a caller gave; raises a ValueError or TypeError unless it is one finite number."""
    if below is DEFAULT_BELOW and (above is not None or metric not in _WITH_DEFAULT):
        below = None
    if (below is None) == (above is None):
        raise ValueError(
            f"Expected one bound for {metric}: below=… or above=…. Received: below={below!r}, above={above!r}. "
            "For two bounds use two alerts."
        )
    name, value = ("below", below) if above is None else ("above", above)
    return Bound(metric, number(name, value, "Give one that readings can reach, such as 50."), above is not None)


class Episode(NamedTuple):
    """A time without a break beyond a bound, and the mean of its readings, weighted by the time between them."""

    seconds: float
    mean: float


class Sustained:
    """Reports once that readings were beyond a bound without a break, and again only after they had recovered.

    Recovered means within the bound by its margin for as long, so that a value swinging about the bound is reported
    once. The time between two readings counts for at most half of `for_seconds`, so that it takes three readings and a
    pause proves nothing. An unknown reading is a break.

    Example:
        >>> low = Sustained(Bound("gpu_power_watts", 50, above=False), for_seconds=2)
        >>> [low.take(value, at) for at, value in enumerate([10, 30, 20, 10])]
        [None, None, Episode(seconds=2.0, mean=20.0), None]
    """

    def __init__(self, bound: Bound, for_seconds: float):
        self._bound = bound
        self._for_seconds = for_seconds
        self.reported = False
        """Whether the last report still stands: the readings have not recovered since."""
        self._last: float | None = None
        self._seconds = self._integral = self._weight = 0.0

    @property
    def counting(self) -> bool:
        """Whether time is being counted: beyond the bound or, after a report, within it."""
        return self._last is not None

    def take(self, value: float | None, at: float) -> Episode | None:
        """Takes the next reading, None if unknown, at a monotonic time in seconds; returns what to report."""
        if value is None or not math.isfinite(value) or not self._awaited(value):
            self._restart()
            return None
        if self._last is None:
            self._first = value
        else:
            seconds = min(at - self._last, self._for_seconds / 2)
            if not self._weight:  # nobody knows how much time the first reading stands for: as much as the second
                self._integral, self._weight = self._first * seconds, seconds
            self._seconds += seconds
            self._integral += value * seconds
            self._weight += seconds
        self._last = at
        if self._seconds < self._for_seconds:
            return None
        episode = Episode(self._seconds, self._integral / self._weight)
        self.reported = not self.reported
        self._restart()
        return episode if self.reported else None

    def _awaited(self, value: float) -> bool:
        sign = 1 if self._bound.above else -1
        value, bound = sign * value, sign * self._bound.value
        return value <= bound - self._bound.margin if self.reported else value > bound

    def _restart(self) -> None:
        self._last = None
        self._seconds = self._integral = self._weight = 0.0
