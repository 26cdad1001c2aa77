"""When a reading has been beyond a bound for so long that it is worth a word."""

import math
from collections.abc import Callable
from typing import NamedTuple


class Episode(NamedTuple):
    """A time without a break beyond a bound: how long, and the mean of its readings."""

    seconds: float
    mean: float


class Sustained:
    """Tells once that readings were beyond a bound without a break, and again only after they had come back.

    Back means beyond the bound by a margin, and for as long: a value that swings about the bound is told once. The time
    between two readings counts for half of `for_seconds` at most, so that there are three readings at least and a pause
    proves nothing. An unknown reading is a break.

    Args:
        bound: In the readings' unit.
        above: Whether readings above the bound are told, or those below it.
        margin: How far within the bound they must have been before they are told again, in the readings' unit.
        for_seconds: How long.

    Example:
        >>> low = Sustained(50, above=False, margin=5, for_seconds=2)
        >>> [low.take(value, at) for at, value in enumerate([10, 30, 20, 10])]
        [None, None, Episode(seconds=2.0, mean=20.0), None]
    """

    def __init__(self, bound: float, *, above: bool, margin: float, for_seconds: float):
        sign = 1 if above else -1
        self._beyond: Callable[[float], bool] = lambda value: sign * value > sign * bound
        self._back: Callable[[float], bool] = lambda value: sign * value <= sign * bound - margin
        self._for_seconds = for_seconds
        self._told = False
        self._last: float | None = None
        self._seconds = self._sum = 0.0
        self._readings = 0

    @property
    def counting(self) -> bool:
        """Whether the time runs: that beyond the bound or, once that is told, that back within it."""
        return self._last is not None

    def take(self, value: float | None, at: float) -> Episode | None:
        """Takes the next reading, and returns what is to be told.

        Args:
            value: None where it is unknown.
            at: Seconds, on a monotonic clock.
        """
        awaited = self._back if self._told else self._beyond
        if value is None or not math.isfinite(value) or not awaited(value):
            self._restart()
            return None
        if self._last is not None:
            self._seconds += min(at - self._last, self._for_seconds / 2)
        self._last = at
        self._sum += value
        self._readings += 1
        if self._seconds < self._for_seconds:
            return None
        episode = Episode(self._seconds, self._sum / self._readings)
        self._told = not self._told
        self._restart()
        return episode if self._told else None

    def _restart(self) -> None:
        self._last = None
        self._seconds = self._sum = 0.0
        self._readings = 0
