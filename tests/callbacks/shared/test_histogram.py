import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfopt.callbacks.shared.histogram import Histogram

PERCENTS = (0, 1, 50, 95, 99, 99.9, 100)


def filled(values):
    found = Histogram()
    for part in np.array_split(values, 3):
        found.add(part)
    return found


@pytest.mark.parametrize(
    "values",
    [
        np.random.default_rng(0).lognormal(-4, 1, 20_000),
        np.concatenate([np.random.default_rng(1).normal(0.02, 0.001, 5_000), np.full(300, 6.0)]),
        [0.01, 0.01, 0.01, 0.05],
        np.geomspace(2e-6, 5e5, 5_000),
    ],
    ids=["lognormal", "stalls", "few", "wide"],
)
def test_percentiles_are_within_one_percent_of_all_values(values):
    assert filled(values).percentiles(*PERCENTS) == pytest.approx(np.percentile(values, PERCENTS), rel=0.01)


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=50), st.floats(0, 100))
def test_a_percentile_of_any_values(values, percent):
    (found,) = filled(values).percentiles(percent)
    assert found == pytest.approx(np.percentile(values, percent), rel=0.01)


def test_equal_values_are_exact_and_a_value_may_occur_many_times():
    found = Histogram()
    found.add([0.25, 8.0], times=[3, 1])
    assert (found.count, found.total) == (4, 8.75)
    assert found.percentiles(0, 50, 100) == [0.25, 0.25, 8.0]


def test_counts_up_to_bounds():
    values = np.random.default_rng(0).lognormal(-4, 1, 20_000)
    bounds = (0.001, 0.01, 0.1, 1.0, 10.0)
    found = filled(values).counts_up_to(bounds)
    lowest, highest = ([(values <= bound * part).sum() for bound in bounds] for part in (0.99, 1.01))
    assert all(low <= count <= high for low, count, high in zip(lowest, found, highest, strict=True))
    assert found[-1] == 20_000
    assert Histogram().counts_up_to(bounds) == [0] * 5


def test_a_count_up_to_a_bound_never_decreases():
    """Though later values of the same bucket lie above the bound."""
    found, counts = Histogram(), []
    for value in [0.00999, *np.linspace(0.00999, 0.0102, 40)]:
        found.add([value])
        counts += found.counts_up_to([0.01])
    assert counts == sorted(counts)
    assert counts[0] == 1


def test_memory_is_bounded_and_no_value_is_lost():
    found = filled(np.geomspace(1e-12, 1e12, 100_000))
    found.add([0.0])
    assert found._counts.nbytes + found._sums.nbytes < 45_000
    assert found.count == 100_001
    assert found.total == pytest.approx(np.geomspace(1e-12, 1e12, 100_000).sum())


def test_none_has_no_percentile():
    with pytest.raises(ValueError, match="Expected values"):
        Histogram().percentiles(50)
