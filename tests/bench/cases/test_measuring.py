import itertools
from dataclasses import replace

import pytest
import tensorflow as tf

from tfopt.bench.cases import Case, Variant, same_accuracy, same_values
from tfopt.bench.cases.measuring import measure
from tfopt.bench.results import UNDER_WAY
from tfopt.errors import DeviceMemoryError, UnsupportedError
from tfopt.measure import StepTimes


def times(ms):
    return StepTimes(repeats_ms=((ms, ms),), steps_per_sample=1, first_step_seconds=1.0)


def variant(name, ms, values=(), closed=None):
    def timer(stack):
        if closed is not None:
            stack.callback(closed.append, name)
        return lambda: times(ms)

    return Variant(name=name, note=f"{name}'s note", timer=timer, values=lambda: values)


def case(*variants, judge=None, repeats=3):
    return Case(suite="s", workload="w", question="?", unit="step", variants=variants, judge=judge, repeats=repeats)


def test_a_case_measures_compares_and_checks():
    seen, closed = [], []
    subject = case(
        variant("slow", 10.0, [1.0], closed),
        variant("fast", 5.0, [1.0], closed),
        variant("slower", 20.0, [1.0], closed),
        variant("wrong", 1.0, [2.0], closed),
        judge=same_values("values", "same"),
        repeats=5,
    )
    outcome = measure(subject, lambda result, name: seen.append((result.turns, name)))
    assert len(seen) == 4 * 6
    assert sorted(closed) == ["fast", "slow", "slower", "wrong"]
    assert outcome.baseline == "slow"
    assert outcome.done
    found = {v.name: (v.metrics.comparison and v.metrics.comparison.ratio, v.metrics.verdict) for v in outcome.variants}
    assert found == {
        "slow": (None, "baseline"),
        "fast": (2.0, "faster"),
        "slower": (0.5, "slower"),
        "wrong": (10.0, "changes the result"),
    }
    assert outcome.variants[1].times.repeats_ms == ((5.0, 5.0),) * 5
    assert outcome.variants[3].check.text == "1 of 1 differ"


def test_each_turn_is_handed_over_as_it_ends():
    seen = []
    measure(case(variant("a", 1.0), variant("b", 2.0), repeats=2), lambda result, name: seen.append((result, name)))
    assert [name for _, name in seen] == ["a", "b", "a", "b"]
    assert [[v.turns for v in result.variants] for result, _ in seen] == [[1, 0], [1, 1], [2, 1], [2, 2]]
    assert {result.unfinished for result, _ in seen} == {UNDER_WAY}
    assert {result.planned_turns for result, _ in seen} == {2}


def test_in_each_turn_what_says_most_comes_first():
    ordinary, recommended, ceiling = variant("b", 1.0), variant("c", 1.0), variant("d", 1.0)
    variants = variant("a", 1.0), ordinary, replace(recommended, recommended=True), replace(ceiling, ceiling=True)
    seen = []
    outcome = measure(case(*variants, repeats=1), lambda result, name: seen.append(name))
    assert seen == ["a", "c", "d", "b"]
    assert [one.name for one in outcome.variants] == ["a", "b", "c", "d"]


@pytest.mark.parametrize("turns", [1, 2, 3, 8])
def test_a_resumed_case_takes_only_the_turns_that_are_missing(turns):
    """Of four each, `turns` were taken in another process."""
    seen, taken = [], []

    def timed(name):
        return Variant(name=name, note="", timer=lambda stack: lambda: taken.append(name) or times(2.0))

    measure(case(variant("a", 1.0), variant("b", 1.0), repeats=4), lambda result, name: seen.append(result))
    earlier = seen[turns - 1]
    subject = case(timed("a"), timed("b"), repeats=4)
    assert subject.keeps(earlier)
    outcome = measure(subject, earlier=earlier.with_metrics())
    assert taken == (["a", "b"] * 4)[turns:]
    assert outcome.done
    for found, before in zip(outcome.variants, earlier.variants, strict=True):
        kept = before.times.repeats_ms if before.times else ()
        assert found.times.repeats_ms == (*kept, *((2.0, 2.0),) * (4 - len(kept)))


def test_a_resumed_case_takes_at_least_a_round():
    seen = []
    subject = case(variant("a", 1.0), variant("b", 1.0), repeats=4)
    measure(subject, lambda result, name: seen.append(result))
    outcome = measure(subject, earlier=seen[2], seconds=0.0)
    assert [v.turns for v in outcome.variants] == [2, 2]
    assert outcome.unfinished == "the budget ran out"


def test_a_resumed_case_makes_only_the_checks_that_are_missing():
    made, seen = [], []

    def checked(name):
        return replace(variant(name, 1.0), values=lambda: made.append(name) or [1.0])

    subject = case(checked("a"), checked("b"), checked("c"), judge=same_values("values", "same"), repeats=2)
    measure(subject, lambda result, name: seen.append(result))
    assert made == ["a", "b", "c"]
    outcome = measure(subject, earlier=seen[-2])  # c was not checked yet
    assert made == ["a", "b", "c", "a", "c"]  # the baseline's values are in no file
    assert [v.check.passed for v in outcome.variants] == [True] * 3
    assert outcome.done


@pytest.mark.parametrize("change", [{"unfinished": None, "error": "lost"}, {"planned_turns": 5}, {"variants": ()}])
def test_a_failed_or_other_attempt_is_not_kept(change):
    seen = []
    subject = case(variant("a", 1.0), variant("b", 1.0))
    measure(subject, lambda result, name: seen.append(result))
    assert subject.keeps(seen[0])
    assert not subject.keeps(replace(seen[0], **change))
    assert not subject.keeps(None)


def test_a_variant_is_built_in_its_first_turn():
    happened = []

    def noted(name):
        def timer(stack):
            happened.append(f"build {name}")
            return lambda: happened.append(f"time {name}") or times(1.0)

        return Variant(name=name, note="", timer=timer)

    measure(case(noted("a"), noted("b"), repeats=2))
    assert happened == ["build a", "time a", "build b", "time b", "time a", "time b"]


def failing(error, after=0):
    """A variant that fails in its turn of that number."""
    turns = itertools.count()

    def timed():
        if next(turns) == after:
            raise error
        return times(2.0)

    def timer(stack):
        stack.callback(closed.append, 1)
        return timed

    closed = []
    return Variant(name="b", note="", timer=timer, values=lambda: [1.0]), closed


REFUSALS = [
    UnsupportedError("no such device"),
    DeviceMemoryError("no such device"),
    MemoryError("no such device"),
    tf.errors.ResourceExhaustedError(None, None, "no such device"),
    tf.errors.InternalError(None, None, "RESOURCE_EXHAUSTED: no such device"),
]


@pytest.mark.parametrize("error", REFUSALS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("after", [0, 2])
def test_a_variant_that_the_machine_cannot_run_is_a_row_with_its_reason(error, after):
    seen = []
    refused, closed = failing(error, after)
    judge = same_values("values", "same")
    outcome = measure(
        case(variant("a", 4.0, [1.0]), refused, variant("c", 2.0, [1.0]), judge=judge),
        lambda result, name: seen.append(len(closed)),
    )
    first, second, third = outcome.variants
    assert "no such device" in second.refused
    assert outcome.done
    assert [first.turns, second.turns, third.turns] == [3, after, 3]
    assert first.refused is third.refused is None
    assert third.metrics.comparison.ratio == 2.0
    assert (second.metrics is None) == (after == 0)
    assert closed == [1]
    assert seen[-3] == 1  # what it holds was given back before the others' last turns


@pytest.mark.parametrize(
    "error", [RuntimeError("a bug"), ValueError("a bug"), tf.errors.InternalError(None, None, "a bug")]
)
def test_any_other_error_is_the_cases(error):
    broken, closed = failing(error)
    with pytest.raises(type(error), match="a bug"):
        measure(case(variant("a", 1.0), broken))
    assert closed == [1]


def test_a_refused_baseline_leaves_the_others_times():
    refused, _ = failing(UnsupportedError("no such device"))
    outcome = measure(case(refused, variant("a", 1.0, [1.0]), judge=same_values("values", "same")))
    assert outcome.done
    assert [v.turns for v in outcome.variants] == [0, 3]
    assert outcome.variants[1].check is None
    assert outcome.variants[1].metrics.verdict == "not compared"


def test_a_check_that_the_machine_cannot_run_refuses_the_variant():
    def unsupported():
        raise UnsupportedError("no such device")

    other = Variant(name="b", note="", timer=lambda stack: lambda: times(1.0), values=unsupported)
    outcome = measure(case(variant("a", 1.0, [1.0]), other, judge=same_values("values", "same")))
    assert [v.refused for v in outcome.variants] == [None, "no such device"]
    assert outcome.variants[0].check.passed


@pytest.mark.parametrize(("seconds", "turns"), [(0.1, [1, 1]), (10, [2, 2]), (7, [2, 1]), (100, [3, 3])])
def test_little_time_means_fewer_turns_and_at_least_one(seconds, turns):
    """A turn takes two seconds of this clock; four fifths of the time are for turns."""
    now = [0.0]

    def timer(stack):
        def timed():
            now[0] += 2
            return times(1.0)

        return timed

    variants = [Variant(name=name, note="", timer=timer, values=lambda: [1.0]) for name in "ab"]
    outcome = measure(case(*variants, judge=same_values("values", "same")), seconds=seconds, clock=lambda: now[0])
    assert [v.turns for v in outcome.variants] == turns
    assert outcome.unfinished == (None if turns == [3, 3] else "the budget ran out")
    assert [v.check.passed for v in outcome.variants] == [True, True]


def test_a_baseline_that_fails_its_own_check_says_so():
    outcome = measure(case(variant("a", 1.0, [0.5]), variant("b", 1.0, [0.5]), judge=same_accuracy(360)))
    assert [v.metrics.verdict for v in outcome.variants] == ["changes the result"] * 2


def test_resources_are_released_when_a_timer_fails():
    closed = []

    def failing(stack):
        raise RuntimeError("no")

    broken = Variant(name="b", note="", timer=failing)
    with pytest.raises(RuntimeError):
        measure(case(variant("a", 1.0, closed=closed), broken))
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
