import json

import numpy as np
import pytest

from tfopt.measure import StepTimes, compare, interleave


def times(*repeats, **fields):
    raw = tuple(tuple(map(float, repeat)) for repeat in repeats)
    return StepTimes(**{"repeats_ms": raw, "steps_per_sample": 5, "first_step_seconds": 1.0} | fields)


def test_median_interval_and_throughput():
    measured = times((4.0, 5.0, 6.0), (5.0, 5.0, 8.0), (1.0, 6.0, 7.0), examples_per_step=32)
    assert measured.median_ms == 5.0
    low, high = measured.interval_ms
    assert 1.0 <= low <= 5.0 <= high <= 8.0
    assert measured.examples_per_second == 6400.0
    assert times((2.0,)).examples_per_second is None


def test_raw_samples_survive_json():
    measured = times((1.0, 2.0), (3.0, 4.0), examples_per_step=8)
    values = json.loads(json.dumps(measured.to_dict()))
    assert StepTimes.from_dict(values) == measured
    assert values["median_ms"] == measured.median_ms
    assert tuple(values["interval_ms"]) == measured.interval_ms


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
    assert 1.97 < comparison.interval[0] < comparison.interval[1] < 2.03
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


@pytest.mark.slow
@pytest.mark.parametrize("repeats", [(6, 6), (6, 4)])
def test_the_interval_covers_the_truth(repeats):
    """With noise between repeats and within them, the interval holds the true ratio nine times in ten."""
    random = np.random.default_rng(1)
    hits = 0
    for _ in range(200):
        a, b = (
            times(*(scale * np.exp(random.normal(0, 0.05, (count, 1)) + random.normal(0, 0.05, (count, 10)))))
            for count, scale in zip(repeats, (3.0, 2.0), strict=True)
        )
        low, high = compare(a, b).interval
        hits += low <= 1.5 <= high
    assert hits >= 180


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
    found = str(times((2.0, 2.0), examples_per_step=10))
    assert found == "2 ms a step of 10 examples (95 %: 2–2, 5,000 examples/s; first 1 s)"
    assert str(times((2.0, 2.0))) == "2 ms a step (95 %: 2–2; first 1 s)"
    assert str(compare(times((4.0,)), times((2.0,)))) == "2 times as fast (95 %: 2–2)"
