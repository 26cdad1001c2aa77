"""Readings over time, thinned so that a week of them fits into a few megabytes."""

import copy
import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

Item = TypeVar("Item")

# A full series has at least half as many points, on a panel some 800 pixels wide.
POINTS = 800
# A pause this many times longer than the median reading is apart from the next one is drawn as a gap.
_PAUSE = 5.0


class Point(NamedTuple):
    """One or more consecutive readings. `low`, `mean` and `high` are None if no value is known."""

    begin: float  # when the first reading was taken, or began, in seconds
    end: float  # when the last one was taken
    low: float | None  # with `high`, keeps the spike of a single reading visible
    mean: float | None
    high: float | None
    known: int  # number of known values


class Series:
    """One quantity over time, in a bounded number of points.

    When it is full, neighbours are merged, and from then on each point takes twice as many readings. `points`, the
    maximum, must be even.
    """

    def __init__(self, points: int = POINTS):
        # begin, end, low, high, weighted sum, weight and count of each point; inf, -inf and zeros if no value is known.
        self._table = np.empty((points, 7))
        self._length = 0
        self._last: list[float] = []  # the growing point, not in the table yet
        self._readings_in_last = 0
        self._readings_in_point = 1

    def __len__(self) -> int:
        return self._length + bool(self._last)

    def add(self, at: float, value: float | None, *, weight: float = 1.0, begin: float | None = None) -> None:
        """Adds a reading, not before the previous one.

        Args:
            at: When it was taken, in seconds.
            value: None or not finite: unknown.
            weight: How much it counts in means: usually the seconds that it stands for.
            begin: When what it says began; None: it says something of the moment.
        """
        if self._readings_in_last == self._readings_in_point:
            self._table[self._length] = self._last
            self._length += 1
            self._last, self._readings_in_last = [], 0
            if self._length == len(self._table):
                self._halve()
        if not self._last:
            self._last = [at if begin is None else begin, at, math.inf, -math.inf, 0.0, 0.0, 0.0]
        last = self._last
        last[1] = at
        if value is not None and math.isfinite(value):
            last[2], last[3] = min(last[2], value), max(last[3], value)
            last[4] += value * weight
            last[5] += weight
            last[6] += 1
        self._readings_in_last += 1

    @property
    def points(self) -> list[Point]:
        """The points in order."""
        return [_point(row) for row in self._rows().tolist()]

    @property
    def merged(self) -> bool:
        """Whether a point may hold several readings."""
        return self._readings_in_point > 1

    def curve(self) -> "np.ndarray[Any, Any]":
        """Returns rows to draw: the points' middles, lowest, mean and highest values, NaN where unknown.

        In each unusually long pause stands an unknown point.
        """
        begin, end, low, high, total, weight, known = self._rows().T
        with np.errstate(invalid="ignore"):
            values = np.where(known, (low, total / weight, high), np.nan)
        pauses, apart = begin[1:] - end[:-1], np.diff(begin)
        longest = _PAUSE * float(np.median(apart)) / self._readings_in_point if len(apart) else 0.0
        after = np.flatnonzero(pauses > (longest or math.inf)) + 1
        at = np.insert((begin + end) / 2, after, begin[after] - pauses[after - 1] / 2)
        return np.vstack([at, np.insert(values, after, np.nan, axis=1)])

    def mean(self, since: float = -math.inf) -> float | None:
        """Returns the weighted mean of the readings from then on; None if none is known."""
        rows = self._rows()
        total, weight, _ = rows[rows[:, :2].mean(1) >= since, 4:].sum(0).tolist()
        return total / weight if weight else None

    @property
    def lowest(self) -> float:
        """The smallest value; infinity if none is known."""
        return float(self._rows()[:, 2].min(initial=math.inf))

    @property
    def highest(self) -> float:
        """The largest value; minus infinity if none is known."""
        return float(self._rows()[:, 3].max(initial=-math.inf))

    def copy(self, until: float = math.inf) -> "Series":
        """Returns an independent copy of the points that began by then."""
        other = copy.copy(self)
        other._table = self._table.copy()
        other._length = int((self._table[: self._length, 0] <= until).sum())
        other._last = [*self._last] if self._last and self._last[0] <= until else []
        return other

    def _rows(self) -> "np.ndarray[Any, Any]":
        last = [self._last] if self._last else []
        return np.concatenate([self._table[: self._length], np.array(last).reshape(-1, 7)])

    def _halve(self) -> None:
        """Merges each pair of points."""
        begin, end, low, high, *sums = self._table.reshape(-1, 2, 7).T
        self._length //= 2
        self._table[: self._length] = np.column_stack(
            [begin[0], end[1], low.min(0), high.max(0), *(both.sum(0) for both in sums)]
        )
        self._readings_in_point *= 2


def _point(row: Sequence[float]) -> Point:
    begin, end, low, high, total, weight, count = row
    return Point(begin, end, low, total / weight, high, int(count)) if count else Point(begin, end, None, None, None, 0)


class BoundedList(Generic[Item]):
    """A bounded list: when it is full, every second item is dropped, and half as many of the next ones are kept.

    It holds `most` items, an even number, besides the last one.
    """

    def __init__(self, most: int = 500):
        self._most = most
        self._items: list[Item] = []
        self._last: list[Item] = []
        self.count = 0
        """How many items were added."""
        self.every = 1
        """One in how many is kept."""

    def add(self, item: Item) -> None:
        """Adds an item."""
        if len(self._items) == self._most:
            self._items = self._items[::2]
            self.every *= 2
        if self.count % self.every == 0:
            self._items.append(item)
        self.count += 1
        self._last = [item]

    def copy(self) -> "BoundedList[Item]":
        """Returns an independent copy."""
        other = copy.copy(self)
        other._items = [*self._items]
        return other

    @property
    def items(self) -> list[Item]:
        """The kept items, including the first and the last."""
        return self._items + [item for item in self._last if not self._items or self._items[-1] is not item]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened, `at` seconds after the training began."""

    at: float
    text: str


class Timeline:
    """All readings and events of one training."""

    def __init__(self) -> None:
        self.series: defaultdict[str, dict[int | None, Series]] = defaultdict(dict)
        """By quantity and GPU index; None for the process or the host."""
        self.events: defaultdict[str, BoundedList[Event]] = defaultdict(BoundedList)
        """By kind."""

    def add(
        self,
        quantity: str,
        device: int | None,
        at: float,
        value: float | None,
        *,
        weight: float = 1.0,
        begin: float | None = None,
    ) -> None:
        """Adds a reading, as `Series.add` takes it. A quantity without any known value has no series."""
        devices = self.series[quantity]
        if device not in devices:
            if value is None:
                return
            devices[device] = Series()
        devices[device].add(at, value, weight=weight, begin=begin)

    def without(self, devices: Collection[int]) -> "Timeline":
        """Returns the timeline without some GPUs; it shares the series of the others."""
        other = Timeline()
        other.events = self.events
        for quantity, every in self.series.items():
            other.series[quantity] = {device: series for device, series in every.items() if device not in devices}
        return other

    def copy(self, until: float = math.inf) -> "Timeline":
        """Returns an independent copy of what began by then."""
        other = Timeline()
        for quantity, devices in self.series.items():
            copies = {device: series.copy(until) for device, series in devices.items()}
            other.series[quantity] = {device: one for device, one in copies.items() if one.mean() is not None}
        for kind, kept in self.events.items():
            other.events[kind] = kept.copy()
        return other
