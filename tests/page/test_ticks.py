import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfopt.page import duration
from tfopt.page.ticks import epoch_ticks, logarithmic_ticks, nice_step, ticks, time_ticks


def texts(pairs):
    return [text for _, text in pairs]


@pytest.mark.parametrize(
    ("high", "expected"),
    [
        (100, ["0", "50", "100"]),
        (700, ["0", "200", "400", "600"]),
        (60_000, ["0", "20,000", "40,000", "60,000"]),
        (0.8, ["0.0", "0.2", "0.4", "0.6", "0.8"]),
        (0.03, ["0.00", "0.01", "0.02", "0.03"]),
        (3e-7, ["0", "1e−7", "2e−7", "3e−7"]),
        (2e12, ["0", "5e11", "1e12", "1.5e12", "2e12"]),
    ],
)
def test_values_are_round_and_few(high, expected):
    assert texts(ticks(0, high)) == expected


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [
        (1, 2, ["epoch 1", "2"]),
        (1, 20, ["epoch 5", "10", "15", "20"]),
        (37, 41, ["epoch 37", "38", "39", "40", "41"]),
        (1, 3000, ["epoch 1,000", "2,000", "3,000"]),
    ],
)
def test_epochs_are_whole_numbers(first, last, expected):
    assert [text.replace("\u00a0", " ") for text in texts(epoch_ticks(first, last))] == expected


def test_powers_of_ten():
    assert logarithmic_ticks(-2, 1) == [(0.01, "0.01"), (0.1, "0.1"), (1.0, "1"), (10.0, "10")]
    assert texts(logarithmic_ticks(-8, 2)) == ["1e−8", "1e−5", "0.01", "10"]


def test_values_below_zero():
    assert texts(ticks(-3, 5)) == ["−2", "0", "2", "4"]


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.004, ["0", "0.001", "0.002", "0.003", "0.004 s"]),
        (3, ["0", "1", "2", "3 s"]),
        (59, ["0", "15", "30", "45 s"]),
        (119, ["0", "30", "60", "90 s"]),
        (600, ["0", "2", "4", "6", "8", "10 min"]),
        (5400, ["0", "20", "40", "60", "80 min"]),
        (3.2 * 3600, ["0", "1", "2", "3 h"]),
        (30 * 3600, ["0", "6", "12", "18", "24", "30 h"]),
        (7 * 86400, ["0", "2", "4", "6 d"]),
    ],
)
def test_times_are_in_one_unit(seconds, expected):
    assert [text.replace("\u00a0", " ") for text in texts(time_ticks(seconds))] == expected


@given(st.floats(1e-6, 1e9))
def test_times_lie_on_the_axis_in_order(seconds):
    places = [at for at, _ in time_ticks(seconds)]
    assert places[0] == 0
    assert 2 <= len(places) <= 6
    assert places == sorted(set(places))
    assert places[-1] <= seconds * 1.000001


@given(st.floats(1e-300, 1e300), st.integers(1, 10))
def test_a_step_divides_the_span_into_few_parts(span, most):
    step = nice_step(span, most)
    assert 0 < span / step <= most * 1.000001
    assert span / step > most / 5.000001 - 1e-9  # and into no fewer than need be


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.04, "0.0 s"),
        (5.26, "5.3 s"),
        (9.96, "10 s"),
        (42.4, "42 s"),
        (59.9, "1 min"),
        (60, "1 min"),
        (119.7, "2 min"),
        (125, "2 min 5 s"),
        (3599.8, "1 h"),
        (3600, "1 h"),
        (11_580, "3 h 13 min"),
        (7199, "2 h"),
        (86_399, "1 d"),
        (90_000, "1 d 1 h"),
        (864_000, "10 d"),
    ],
)
def test_a_duration_in_two_units(seconds, expected):
    assert duration(seconds).replace("\u00a0", " ") == expected
