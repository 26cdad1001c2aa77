import math

import pytest

from tfopt.callbacks.alert.bounds import Bound, Episode, Sustained


def told(rule, values, every=1.0):
    """When it tells, and what."""
    found = [(place, rule.take(value, place * every)) for place, value in enumerate(values)]
    return [(place, *episode) for place, episode in found if episode is not None]


def below(bound=50, for_seconds=3):
    return Sustained(Bound("gpu_power_watts", bound, above=False), for_seconds)


def above(bound):
    return Sustained(Bound("gpu_power_watts", bound, above=True), for_seconds=2)


def test_the_mean_is_over_time():
    rule = below(for_seconds=12)
    assert [rule.take(value, at) for value, at in ((10, 0.0), (10, 1.0), (40, 6.0))] == [None] * 3
    assert rule.take(20, 12.0) == Episode(12.0, (2 * 10 + 5 * 40 + 6 * 20) / 13)


def test_above_and_the_bound_itself():
    assert told(above(80), [81, 82, 83]) == [(2, 2.0, 82.0)]
    assert told(above(80), [80] * 9) == []
    assert told(below(50), [50] * 9) == []


@pytest.mark.parametrize("other", [60, None, math.nan, math.inf])
def test_a_break_starts_anew(other):
    assert told(below(), [10, 10, 10, other, 10, 10, 10]) == []
    assert told(below(), [10, 10, 10, other, 10, 10, 10, 10]) == [(7, 3.0, 10.0)]


def test_a_pause_between_readings_proves_nothing():
    """Two readings an hour apart: of the hour, half of the time counts; a third reading is needed."""
    assert [below().take(10, at) for at in (0.0,)] == [None]
    rule = below()
    assert [rule.take(10, at) for at in (0.0, 3600.0, 3601.0)] == [None, None, None]
    assert rule.take(10, 3602.0) == Episode(1.5 + 1 + 1, 10.0)
