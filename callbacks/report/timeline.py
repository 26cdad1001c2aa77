"""Readings over time, thinned so that a week of them fits into a few megabytes."""

import copy
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

Item = TypeVar("Item")

# Half as many at least, on a panel some 800 pixels wide.
POINTS = 800
# A pause this many times as long as usual between two points is shown as one: nothing is known of what lay in it.
_PAUSE = 5.0


class Point(NamedTuple):
    """One or more readings that follow each other.

    Attributes:
        begin: When the first was taken, in seconds.
        end: When the last was.
        low: The least known value; None where none is known. A spike of one reading so stays visible.
        mean: The mean of those known.
        high: The greatest.
        known: How many values are known.
    """

    begin: float
    end: float
    low: float | None
    mean: float | None
    high: float | None
    known: int


class Series:
    """One quantity over time, in a bounded number of points.

    When it is full, neighbours become one point, which from then on takes twice as many readings.

    Args:
        points: How many there are at most; an even number.
    """

    def __init__(self, points: int = POINTS):
        # begin, end, low, high, sum and count of a point; of one without a known value inf, -inf, 0 and 0.
        self._table = np.empty((points, 6))
        self._length = 0
        self._last: list[float] = []  # the point that grows, not in the table yet
        self._readings_in_last = 0
        self._readings_in_point = 1

    def __len__(self) -> int:
        return self._length + bool(self._last)

    def add(self, at: float, value: float | None) -> None:
        """Adds a reading.

        Args:
            at: When, in seconds; not before the one before.
            value: None, and what is not finite, is unknown.
        """
        if self._readings_in_last == self._readings_in_point:
            self._table[self._length] = self._last
            self._length += 1
            self._last, self._readings_in_last = [], 0
            if self._length == len(self._table):
                self._halve()
        if not self._last:
            self._last = [at, at, math.inf, -math.inf, 0.0, 0.0]
        last = self._last
        last[1] = at
        if value is not None and math.isfinite(value):
            last[2], last[3] = min(last[2], value), max(last[3], value)
            last[4] += value
            last[5] += 1
        self._readings_in_last += 1

    @property
    def points(self) -> list[Point]:
        """What is kept, in order."""
        return [_point(row) for row in self._rows().tolist()]

    def points_with_pauses(self) -> list[Point]:
        """The points, with an unknown one in each pause that is much longer than usual."""
        found = self.points
        pauses = [after.begin - before.end for before, after in pairwise(found)]
        longest = _PAUSE * float(np.median(pauses)) if pauses else 0.0
        result = found[:1]
        for pause, point in zip(pauses, found[1:], strict=True):
            if pause > longest > 0:
                result.append(Point(point.begin - pause / 2, point.begin - pause / 2, None, None, None, 0))
            result.append(point)
        return result

    def mean(self, since: float = -math.inf) -> float | None:
        """The mean of the readings from then on; None where none is known."""
        rows = self._rows()
        total, count = rows[rows[:, 0] >= since, 4:].sum(0).tolist()
        return total / count if count else None

    @property
    def lowest(self) -> float:
        """The least value; infinite where none is known."""
        return float(self._rows()[:, 2].min(initial=math.inf))

    @property
    def highest(self) -> float:
        """The greatest value; minus infinity where none is known."""
        return float(self._rows()[:, 3].max(initial=-math.inf))

    def copy(self, until: float = math.inf) -> "Series":
        """One that does not grow with this one, of the points that began by then."""
        other = copy.copy(self)
        other._table = self._table.copy()
        other._length = int((self._table[: self._length, 0] <= until).sum())
        other._last = [*self._last] if self._last and self._last[0] <= until else []
        return other

    def _rows(self) -> "np.ndarray[Any, Any]":
        last = [self._last] if self._last else []
        return np.concatenate([self._table[: self._length], np.array(last).reshape(-1, 6)])

    def _halve(self) -> None:
        """Makes one point of each pair."""
        half = self._length // 2
        first, second = self._table[0::2], self._table[1::2]
        self._table[:half] = np.column_stack(
            [
                first[:, 0],
                second[:, 1],
                np.minimum(first[:, 2], second[:, 2]),
                np.maximum(first[:, 3], second[:, 3]),
                first[:, 4:] + second[:, 4:],
            ]
        )
        self._length = half
        self._readings_in_point *= 2


def _point(row: Sequence[float]) -> Point:
    begin, end, low, high, total, count = row
    return Point(begin, end, low, total / count, high, int(count)) if count else Point(begin, end, None, None, None, 0)


class Kept(Generic[Item]):
    """Things in their order, at most a number of them: when it is full, every second one is dropped, and so on.

    Args:
        most: How many are kept, besides the last one; an even number.

    Attributes:
        count: How many were added.
        every: One in how many is kept.
    """

    def __init__(self, most: int = 500):
        self._most = most
        self._items: list[Item] = []
        self._last: list[Item] = []
        self.count = 0
        self.every = 1

    def add(self, item: Item) -> None:
        """Adds one thing."""
        if len(self._items) == self._most:
            self._items = self._items[::2]
            self.every *= 2
        if self.count % self.every == 0:
            self._items.append(item)
        self.count += 1
        self._last = [item]

    def copy(self) -> "Kept[Item]":
        """One that does not grow with this one."""
        other = copy.copy(self)
        other._items = [*self._items]
        return other

    @property
    def items(self) -> list[Item]:
        """Those that are kept, the first and the last among them."""
        return self._items + [item for item in self._last if not self._items or self._items[-1] is not item]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened.

    Attributes:
        at: When, in seconds.
        text: What, in words.
    """

    at: float
    text: str


class Timeline:
    """All that was read during one training: series by quantity and device, and events by kind.

    Attributes:
        series: By quantity, and there by device (None: the whole process or machine).
        events: By kind.
    """

    def __init__(self) -> None:
        self.series: defaultdict[str, dict[int | None, Series]] = defaultdict(dict)
        self.events: defaultdict[str, Kept[Event]] = defaultdict(Kept)

    def add(self, quantity: str, device: int | None, at: float, value: float | None) -> None:
        """Adds a reading. A quantity of which no value is ever known has no series."""
        devices = self.series[quantity]
        if device not in devices:
            if value is None:
                return
            devices[device] = Series()
        devices[device].add(at, value)

    def copy(self, until: float = math.inf) -> "Timeline":
        """One that does not grow with this one, of what began by then."""
        other = Timeline()
        for quantity, devices in self.series.items():
            copies = {device: series.copy(until) for device, series in devices.items()}
            other.series[quantity] = {device: one for device, one in copies.items() if one.mean() is not None}
        for kind, kept in self.events.items():
            other.events[kind] = kept.copy()
        return other
