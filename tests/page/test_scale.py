import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfopt.page.bars import fit_scale

finite = st.floats(allow_nan=False, allow_infinity=False)


def test_linear_starts_at_zero_so_that_twice_the_value_is_twice_the_length():
    scale = fit_scale([1.0, 2.0], reference=1.0)
    assert [scale.percent(value) for value in (0.0, 1.0, 2.0)] == [0.0, 50.0, 100.0]


def test_negative_values_put_zero_inside_the_chart():
    scale = fit_scale([-10.0, 30.0], reference=None)
    assert scale.percent(0.0) == pytest.approx(25.0)


@pytest.mark.parametrize("values", [[0.01, 100.0], [1.0, 20.0], [0.001, 0.01]])
def test_the_longer_bar_is_the_greater_value(values: list[float]):
    scale = fit_scale(values, reference=1.0)
    lengths = [scale.percent(value) for value in values]
    assert lengths[1] / lengths[0] == pytest.approx(values[1] / values[0])


def test_the_reference_stays_in_the_chart():
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
