import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfopt.page.bars import fit_scale

finite = st.floats(allow_nan=False, allow_infinity=False)


def test_linear_starts_at_zero_so_that_twice_the_value_is_twice_the_length():
    scale = fit_scale([1.0, 2.0], reference=1.0)
    assert not scale.logarithmic
    assert [scale.percent(value) for value in (0.0, 1.0, 2.0)] == [0.0, 50.0, 100.0]


def test_negative_values_put_zero_inside_the_chart():
    scale = fit_scale([-10.0, 30.0], reference=None)
    assert scale.percent(scale.origin) == pytest.approx(25.0)


def test_wide_spread_around_a_reference_is_logarithmic_from_the_reference():
    scale = fit_scale([0.01, 100.0], reference=1.0)
    assert scale.logarithmic
    assert scale.origin == 1.0
    assert [scale.percent(value) for value in (0.01, 0.1, 1.0, 100.0)] == pytest.approx([0.0, 25.0, 50.0, 100.0])


@pytest.mark.parametrize(
    ("values", "reference"),
    [([0.01, 80.0], None), ([0.0, 80.0], 1.0), ([-1.0, 80.0], 1.0), ([1.0, 20.0], 1.0), ([1.0, 80.0], 0.0)],
    ids=["no reference", "a zero", "a negative", "narrow", "reference zero"],
)
def test_stays_linear(values: list[float], reference: float | None):
    assert not fit_scale(values, reference).logarithmic


def test_reference_counts_towards_the_spread_and_stays_in_the_chart():
    assert fit_scale([50.0], reference=1.0).logarithmic
    assert fit_scale([0.5], reference=1.0).percent(1.0) == 100.0


def test_difference_too_large_for_a_float_keeps_its_place():
    scale = fit_scale([-1.7e308, 1.7e308], reference=None)
    assert [scale.percent(value) for value in (-1.7e308, 0.0, 1.7e308)] == [0.0, 50.0, 100.0]


def test_only_zeros_have_a_place():
    assert fit_scale([0.0], reference=None).percent(0.0) == 0.0


@given(st.lists(finite, min_size=1), st.none() | finite)
def test_every_value_lies_in_the_chart_in_order(values: list[float], reference: float | None):
    scale = fit_scale(values, reference)
    places = [scale.percent(value) for value in sorted(values)]
    assert all(0 <= place <= 100 for place in places)
    assert places == sorted(places)
