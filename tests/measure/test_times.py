import json

import numpy as np
import pytest

from tfopt.measure import Comparison, StepTimes, compare, difference_ms, interleave


def times(*repeats, **fields):
    raw = tuple(tuple(map(float, repeat)) for repeat in repeats)
    return StepTimes(**{"repeats_ms": raw, "steps_per_sample": 5, "first_step_seconds": 1.0} | fields)


def test_median_interval_and_throughput():
    measured = times((4.0, 5.0, 6.0), (5.0, 5.0, 8.0), (1.0, 6.0, 7.0), examples_per_step=32)
    assert measured.median_ms == 5.0
    low, high = measured.interval_ms
    assert 0 < low <= 5.0 <= high
    assert measured.examples_per_second == 6400.0
    assert times((2.0,)).examples_per_second is None


def test_raw_samples_survive_json():
    measured = times((1.0, 2.0), (3.0, 4.0), examples_per_step=8)
    values = json.loads(json.dumps(measured.to_dict()))
    assert StepTimes.from_dict(values) == measured
    assert values["median_ms"] == measured.median_ms
    assert values["interval_ms"] == measured.interval_ms


def test_derived_values_in_json_are_not_believed():
    values = times((1.0, 2.0)).to_dict() | {"median_ms": 0.001}
    assert StepTimes.from_dict(values).median_ms == 1.5


def test_no_samples():
    with pytest.raises(ValueError, match="at least one sample"):
        times(())


def test_ratio_of_interleaved_runs_ignores_drift():
    # The machine becomes five times slower during the run; the second variant always takes half the time.
    drift = (1, 2, 3, 4, 5)
    a = times(*[(10.0 * d, 10.1 * d) for d in drift])
    b = times(*[(5.0 * d, 5.05 * d) for d in drift])
    comparison = compare(a, b)
    assert comparison.ratio == pytest.approx(2.0)
    assert comparison.interval == pytest.approx((2, 2))
    assert comparison.verdict == "faster"
    assert compare(b, a).verdict == "slower"


@pytest.mark.parametrize(
    ("spread", "factor", "verdict"),
    [(0.001, 1.0, "no difference"), (0.5, 1.0, "too noisy to tell"), (0.01, 0.8, "faster"), (0.01, 1.3, "slower")],
)
def test_verdicts(spread, factor, verdict):
    random = np.random.default_rng(0)
    noisy = [times(*np.exp(random.normal(0, spread, (5, 10))) * scale) for scale in (1.0, factor)]
    assert compare(*noisy).verdict == verdict


def called_different(repeats, noise, trials=400):
    """How often identical code is called faster or slower, and how often the interval misses 1."""
    random = np.random.default_rng(repeats)
    missed = different = 0
    for _ in range(trials):
        drift, (one, other) = random.normal(0, 0.1, (repeats, 1)), noise(random, (2, repeats, 1))
        pair = [times(*np.exp(drift + own + random.normal(0, 0.02, (repeats, 5)))) for own in (one, other)]
        found = compare(*pair)
        different += found.verdict in ("faster", "slower")
        missed += not found.interval[0] <= 1 <= found.interval[1]
    return different / trials, missed / trials


def normal(random, size):
    return random.normal(0, 0.05, size)


def with_pauses(random, size):
    return random.normal(0, 0.02, size) + random.exponential(0.5, size) * (random.random(size) < 0.2)


@pytest.mark.parametrize("repeats", [3, 4, 5, 6, 7, 8, 9, 10, 12, 20])
@pytest.mark.parametrize("noise", [normal, with_pauses])
def test_identical_code_is_seldom_called_different(repeats, noise):
    """With noise between repeats, such as a pause in one of five, the interval holds the truth 19 times in 20."""
    different, missed = called_different(repeats, noise)
    assert different <= missed <= 0.07


@pytest.mark.parametrize("repeats", [1, 2])
def test_fewer_than_three_repeats_decide_nothing(repeats):
    slow, fast = (times(*[(ms, ms)] * repeats) for ms in (4.0, 2.0))
    found = compare(slow, fast)
    assert (found.ratio, found.interval, found.verdict) == (2.0, None, "too few repeats to tell")
    assert str(found) == "2 times as fast, too few repeats to tell"
    assert Comparison.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    assert slow.interval_ms is None
    with pytest.raises(ValueError, match=f"at least three repeats to compare. Found {repeats}"):
        difference_ms(slow, fast)


def test_a_turn_more_of_one_measurement_is_left_out():
    drift = (1, 2, 3, 4)
    a, b = times(*[(4.0 * d,) for d in drift]), times(*[(2.0 * d,) for d in drift[:3]])
    assert compare(a, b) == compare(times(*a.repeats_ms[:3]), b)
    assert compare(b, a).ratio == 0.5


def test_intervals_by_hand():
    # Student's t of two degrees of freedom at 97.5 % is 4.303.
    cost, (low, high) = difference_ms(times((3.0,), (4.0,), (5.0,)), times((1.0,), (1.0,), (1.0,)))
    assert (cost, low, high) == (3.0, pytest.approx(3 - 4.303 / 3**0.5), pytest.approx(3 + 4.303 / 3**0.5))
    # 2 * (1 + 12 + 66) / 2 ** 12 is 3.9 %: the third of twelve values and the third last.
    assert times(*[(float(ms),) for ms in range(1, 13)]).interval_ms == pytest.approx((3, 10))


def test_interleave_takes_turns_and_keeps_them_apart():
    order = []

    def variant(name, values):
        remaining = iter(values)

        def measure():
            order.append(name)
            value = next(remaining)
            return times((value, value), first_step_seconds=value)

        return measure

    seen = []
    result = interleave(
        {"a": variant("a", [1.0, 2.0, 3.0]), "b": variant("b", [4.0, 5.0, 6.0])},
        repeats=3,
        on_progress=lambda name, turn: seen.append((name, turn)),
    )
    assert order == ["a", "b"] * 3
    assert seen == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert result["a"].repeats_ms == ((1.0, 1.0), (2.0, 2.0), (3.0, 3.0))
    assert result["b"].first_step_seconds == 4.0


def test_interleave_refuses_nothing_to_do():
    with pytest.raises(ValueError, match="at least one variant"):
        interleave({})
    with pytest.raises(ValueError, match="repeats=0"):
        interleave({"a": lambda: times((1.0,))}, repeats=0)


def test_reads_well():
    found = str(times(*[(2.0, 2.0)] * 3, examples_per_step=10))
    assert found == "2 ms a step of 10 examples (95 %: 2–2, 5,000 examples/s; first 1 s)"
    assert str(times((2.0, 2.5))) == "2.25 ms a step (samples: 2–2.5; first 1 s)"
    assert str(compare(times(*[(4.0,)] * 3), times(*[(2.0,)] * 3))) == "2 times as fast (95 %: 2–2)"


def test_nine_turns_make_the_interval_a_fifth_narrower_than_five():
    """As `interleave` says, over 400 simulated pairs with 5 % of noise."""
    rng = np.random.default_rng(0)

    def width(turns):
        one, other = (times(*np.exp(rng.normal(0, 0.05, (turns, 1)))) for _ in range(2))
        low, high = compare(one, other).interval
        return high - low

    nine, five = (np.mean([width(turns) for _ in range(400)]) for turns in (9, 5))
    assert nine / five == pytest.approx(0.8, abs=0.05)
