"""Turns of the parts of a mixture, against counting them."""

import numpy as np
import pytest
from quick import first_quick

from tfopt.pipelines.shared.mixture_turns import schedule

TURNS = 2500


def counted(made):
    """How many turns each part has had after each of the first ones; a row is a part."""
    turns = made.turns(np.arange(TURNS)).numpy()
    return np.stack([np.cumsum(np.concatenate([[0], turns == part])) for part in range(len(made.weights))])


@pytest.mark.parametrize("parts", first_quick([2, 3, 5, 12, 40], 3))
def test_each_part_keeps_its_share(parts):
    """By the bounds that `Schedule` and `mix` state: of the first turns, and of those in any window."""
    random = np.random.default_rng(parts)
    for _ in range(12):
        made = schedule([float(f"{weight:.3g}") for weight in random.pareto(0.7, parts) + 0.001])
        shares = np.array(made.weights)[:, np.newaxis] / made.period
        found = counted(made)
        off = found - shares * np.arange(TURNS + 1)
        assert np.abs(off).max() <= (0.5 if parts == 2 else 1.7) + 1e-9
        widest = (off.max(axis=1) - off.min(axis=1)).max()
        assert widest < (1 if parts == 2 else 3.4)
        for turns in (0, 1, 7, TURNS - 1):
            assert made.counts(turns) == found[:, turns].tolist()


@pytest.mark.parametrize("weights", [(0.7, 0.3), (70_000, 30_000), (7e-9, 3e-9), (np.float64(0.7), np.float32(0.3))])
def test_weights_have_any_scale(weights):
    made = schedule([float(f"{float(weight):.6g}") for weight in weights])
    assert made.weights == (7, 3)
    assert made.share(0) == 0.7


def test_weights_that_are_counts_end_together():
    made = schedule([50_000, 1_281_167])
    assert made.counts(1_331_167) == [50_000, 1_281_167]
    assert made.turns_until(1, 1_281_167) <= 1_331_167 <= made.turns_within(1, 1_281_167)


def test_weights_of_many_digits_are_rounded():
    made = schedule([1e-30, 1 / 3, 0.1])
    assert made.period <= 2**30
    assert made.weights[0] == 1
    assert made.share(1) == pytest.approx(10 / 13, abs=1e-8)
    late = np.array([2**40, 2**61])
    assert ((made.turns(late).numpy() >= 0) & (made.turns(late).numpy() < 3)).all()


@pytest.mark.parametrize(
    ("weights", "expected"), [((1, 1), [0, 1, 0, 1]), ((1, 2), [1, 0, 1, 1]), ((2, 1), [0, 1, 0, 0])]
)
def test_the_heavier_part_begins_or_of_equal_ones_the_first(weights, expected):
    assert [int(turn) for turn in schedule(weights).dataset(0, 4)] == expected
