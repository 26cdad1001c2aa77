import pytest

from tfopt.bench.cases import Case, Variant
from tfopt.bench.judging import same_accuracy, same_values
from tfopt.measure import StepTimes


def variant(name, ms, values=(), closed=None):
    def timer(stack):
        if closed is not None:
            stack.callback(closed.append, name)
        return lambda: StepTimes(repeats_ms=((ms, ms),), steps_per_sample=1, first_step_seconds=1.0)

    return Variant(name=name, note=f"{name}'s note", timer=timer, values=lambda: values)


def case(*variants, judge=None):
    return Case(suite="s", workload="w", question="?", unit="step", variants=variants, judge=judge, repeats=3)


def test_a_case_measures_compares_and_checks():
    ticks, closed = [], []
    subject = case(
        variant("slow", 10.0, [1.0], closed),
        variant("fast", 5.0, [1.0], closed),
        variant("slower", 20.0, [1.0], closed),
        variant("wrong", 1.0, [2.0], closed),
        judge=same_values("values", "same"),
    )
    outcome = subject.run(ticks.append)
    assert len(ticks) == subject.ticks == 4 * 4
    assert sorted(closed) == ["fast", "slow", "slower", "wrong"]
    assert outcome["baseline"] == "slow"
    found = {v["name"]: (v["comparison"] and v["comparison"]["ratio"], v["verdict"]) for v in outcome["variants"]}
    assert found == {
        "slow": (None, "baseline"),
        "fast": (2.0, "faster"),
        "slower": (0.5, "slower"),
        "wrong": (10.0, "changes the result"),
    }
    assert outcome["variants"][1]["step_time"]["repeats_ms"] == ((5.0, 5.0),) * 3
    assert outcome["variants"][3]["check"]["text"] == "1 of 1 differ"


def test_a_baseline_that_fails_its_own_check_says_so():
    outcome = case(variant("a", 1.0, [0.5]), variant("b", 1.0, [0.5]), judge=same_accuracy(360)).run(lambda name: None)
    assert [v["verdict"] for v in outcome["variants"]] == ["changes the result"] * 2


def test_resources_are_released_when_a_timer_fails():
    closed = []

    def failing(stack):
        raise RuntimeError("no")

    broken = Variant(name="b", note="", timer=failing)
    with pytest.raises(RuntimeError):
        case(variant("a", 1.0, closed=closed), broken).run(lambda name: None)
    assert closed == ["a"]


@pytest.mark.parametrize(
    ("values", "passed"),
    [
        ([0.98, 0.98, 0.98], True),
        ([0.97, 0.975, 0.98], True),  # the two standard errors, 0.005 and 0.008, allow for 0.0197
        ([0.952, 0.953, 0.954], False),  # high enough, and too far from the baseline
        ([0.94, 0.95, 0.945], False),  # too low
        ([1.0, 1.0, 1.0], True),
    ],
)
def test_accuracies(values, passed):
    check = same_accuracy(360)([0.99, 0.99, 0.99], values)
    assert check.passed == passed
    assert check.values == tuple(values)


def test_a_low_baseline_does_not_excuse_a_variant():
    assert not same_accuracy(360)([0.9, 0.9, 0.9], [0.9, 0.9, 0.9]).passed


@pytest.mark.parametrize(
    ("values", "passed"), [([1.0, 2.0], True), ([1.0, 2.0000001], False), ([1.0], False), ([], False)]
)
def test_values_to_the_bit(values, passed):
    assert same_values("what", "same")([1.0, 2.0], values).passed == passed


def test_nothing_is_not_the_same():
    assert not same_values("what", "same")([], []).passed
