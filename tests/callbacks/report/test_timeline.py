import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfopt.callbacks.report.timeline import POINTS, BoundedList, Point, Series


def series(values, points=POINTS, every=1.0):
    found = Series(points)
    for number, value in enumerate(values):
        found.add(number * every, value)
    return found


def test_a_full_series_joins_neighbours_and_keeps_their_extremes():
    found = series([1.0, 3.0, 5.0, 5.0, 9.0], points=4)
    assert found.points == [Point(0, 1, 1, 2, 3, 2), Point(2, 3, 5, 5, 5, 2), Point(4, 4, 9, 9, 9, 1)]
    found.add(5.0, 7.0)
    assert found.points[-1] == Point(4, 5, 7, 8, 9, 2)


def test_an_unknown_reading_lowers_no_mean_and_only_unknown_ones_are_a_gap():
    found = series([4.0, None, None, None, 8.0], points=4)
    assert found.points == [Point(0, 1, 4, 4, 4, 1), Point(2, 3, None, None, None, 0), Point(4, 4, 8, 8, 8, 1)]
    assert found.mean() == 6.0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_unknown(value):
    assert series([value]).points == [Point(0, 0, None, None, None, 0)]


def test_a_week_at_one_hertz():
    found = Series()
    spikes = {123_456: 99.0, 600_001: -7.0}
    for second in range(700_000):
        found.add(second, spikes.get(second, 50.0))
    assert POINTS / 2 <= len(found) <= POINTS
    assert len(found.points) == len(found)
    assert (found.highest, found.lowest) == (99.0, -7.0)
    assert [point.high for point in found.points if point.begin <= 123_456 <= point.end] == [99.0]
    assert sum(point.known for point in found.points) == 700_000
    assert found.mean() == pytest.approx((50.0 * 699_998 + 92) / 700_000)
    assert found._table.nbytes < 50_000


@given(st.lists(st.none() | st.floats(-1e9, 1e9), min_size=1, max_size=200), st.sampled_from([2, 4, 10]))
def test_nothing_is_lost_by_joining(values, points):
    found, known = series(values, points), [value for value in values if value is not None]
    assert len(found) <= points
    assert (found.points[0].begin, found.points[-1].end) == (0, len(values) - 1)
    assert sum(point.known for point in found.points) == len(known)
    if known:
        assert (found.lowest, found.highest) == (min(known), max(known))
        assert found.mean() == pytest.approx(np.mean(known), abs=1e-3)
    else:
        assert found.mean() is None


def test_the_mean_of_later_readings():
    assert series([0.0, 0.0, 50.0, 70.0]).mean(since=2.0) == 60.0
    assert series([1.0]).mean(since=5.0) is None


def test_readings_count_in_means_for_the_time_they_stand_for():
    # A window of six seconds between seconds: 20 % of one, all of the six, nothing of the last.
    found = Series(points=4)
    for begin, seconds, percent in ((0.0, 1.0, 20.0), (1.0, 6.0, 100.0), (7.0, 1.0, None), (8.0, 2.0, 0.0)):
        found.add(begin + seconds, percent, weight=seconds, begin=begin)
    assert found.mean() == 620 / 9
    assert found.mean(since=1.5) == 600 / 8, "more than half of the six seconds"
    found.add(11.0, 50.0, weight=1.0, begin=10.0)  # now neighbours are merged
    assert found.points[0] == Point(0, 7, 20, 620 / 7, 100, 2)
    assert found.mean() == 670 / 10
    assert found.copy().mean() == found.mean()


def test_a_pause_is_unknown():
    found = series([1.0, 2.0, 3.0, 4.0])
    found.add(60.0, 5.0)
    assert found.curve()[::2].tolist() == [
        [0, 1, 2, 3, 31.5, 60],
        [1, 2, 3, 4, pytest.approx(math.nan, nan_ok=True), 5],
    ]
    assert series([1.0, 2.0, 3.0]).curve().shape == (4, 3)
    assert series([]).curve().shape == (4, 0)


def test_a_long_reading_is_no_pause_but_a_validation_after_it_is():
    found = Series()
    ends = [1.0, 2.0, 3.0, 4.0, 12.0, 13.0, 14.0, 15.0]
    for begin, end in [*pairwise(ends), (30.0, 31.0)]:
        found.add(end, 1.0, weight=end - begin, begin=begin)
    at, _, mean, _ = found.curve()
    assert at[np.isnan(mean)].tolist() == [22.5]


def test_a_copy_does_not_grow_and_may_end_earlier():
    found = series([1.0, 2.0, 3.0], points=4)
    copied, earlier = found.copy(), found.copy(until=1.0)
    for number in (3.0, 4.0, 5.0):
        found.add(number, 10 * number)
    assert [point.mean for point in found.points] == [1.5, 16.5, 45]
    assert [point.mean for point in copied.points] == [1, 2, 3]
    assert [point.mean for point in earlier.points] == [1, 2]


def test_kept_things_lie_evenly_with_the_first_and_the_last():
    kept = BoundedList(most=4)
    for number in range(21):
        kept.add(number)
    assert (kept.items, kept.count, kept.every) == ([0, 8, 16, 20], 21, 8)
    few = BoundedList()
    few.add("a")
    assert (few.items, few.every) == (["a"], 1)
    assert BoundedList().items == []
