"""From figures to a decision: no clock, no model."""

import json

import pytest
from models import small_net

from tfopt.measure import StepTimes, compare
from tfopt.xla import JitDecision
from tfopt.xla.deciding import break_even, weigh
from tfopt.xla.shapes import BatchShapes

ONE = BatchShapes(seen=(((4, 8),),), batches=(0,), complete=True, steps_per_epoch=25)
TWO = BatchShapes(seen=(((4, 8),), ((2, 8),)), batches=(24, 1), complete=True, steps_per_epoch=25)


def lengths(*batches, complete=True):
    """Shapes of unlike lengths, with the number of batches that had each."""
    return BatchShapes(
        seen=tuple(((4, length),) for length in range(1, len(batches) + 1)), batches=batches, complete=complete
    )


def times(ms):
    return StepTimes(repeats_ms=((ms, ms),) * 5, steps_per_sample=1, first_step_seconds=1.0, examples_per_step=3000)


def weighed_against_10_ms(on, shapes=ONE, planned=None):
    both = {"off": times(10.0), "on": times(on)}
    return weigh(both, compare(*both.values()), 2.0, shapes, planned)


@pytest.mark.parametrize(
    ("on", "shapes", "break_even"),
    [
        (5.0, ONE, 400),
        (5.0, TWO, 800),  # two compilations
        (5.0, lengths(400, 400, 400), 1200),
        (5.0, lengths(*[1] * 20), None),  # a new shape in 19 of 20 batches: 1.9 s of compiling for each 5 ms saved
        (10.0, ONE, None),
        (20.0, ONE, None),
    ],
)
def test_compilation_is_paid_for_each_shape(on, shapes, break_even):
    weighed = weighed_against_10_ms(on, shapes)
    assert weighed.break_even_steps == break_even
    assert weighed.enabled == (break_even is not None)
    assert (weighed.comparison.verdict == "faster") == (on < 10)


@pytest.mark.parametrize(("planned", "pays"), [(None, True), (399, False), (400, True), (401, True)])
def test_the_steps_planned_must_pay_for_it(planned, pays):
    assert weighed_against_10_ms(5.0, planned=planned).enabled == pays


def expected(shapes, steps):
    """How many shapes that many steps will bring."""
    return shapes.count + shapes.new_per_batch * max(0, steps - shapes.batches_read)


def test_shapes_still_to_come_are_paid_for_too():
    shapes = lengths(*[1] * 11, 989, complete=False)  # one batch in a hundred brings a new shape
    steps = break_even(0.1, 1.0, shapes)
    assert shapes.new_per_batch == 0.01
    assert 0.1 * steps >= expected(shapes, steps)
    assert 0.1 * (steps - 1) < expected(shapes, steps - 1)
    later = break_even(0.0117, 1.0, shapes)
    assert 0.0117 * later >= expected(shapes, later) > expected(shapes, 1000)
    assert 0.0117 * (later - 1) < expected(shapes, later - 1)
    assert break_even(0.01, 1.0, shapes) is None


@pytest.mark.parametrize(
    ("weighed", "text"),
    [
        (weighed_against_10_ms(5.0), "compiling took 2 s, paid back after 400 steps (an epoch has 25)"),
        (weighed_against_10_ms(5.0), "with it a step of 3,000 examples runs 2 times as fast (95 %: 2–2); compiling"),
        (weighed_against_10_ms(5.0, planned=1000), "paid back after 400 steps of 1,000 planned"),
        (
            weighed_against_10_ms(5.0, TWO),
            "2 s, for each of 2 batch shapes in the 25 batches read (all of the dataset), paid back",
        ),
        (weighed_against_10_ms(5.0, lengths(*[1] * 20)), "and new shapes come faster than they pay off"),
        (weighed_against_10_ms(20.0), "runs 0.5 times as fast (95 %: 0.5–0.5), slower; compiling took 2 s"),
    ],
)
def test_it_reads_well(weighed, text):
    assert text in weighed.reason
    assert ("paid back" in weighed.reason) == (weighed.break_even_steps is not None)


def test_apply():
    model = small_net(jit_compile=False)
    JitDecision(enabled=True, reason="measured").apply(model)
    assert model.jit_compile is True
    assert str(JitDecision(enabled=False, reason="slower.")) == "XLA off: slower."


@pytest.mark.parametrize(("drift", "written"), [(0.5, 0.5), (float("nan"), None), (float("inf"), None), (None, None)])
def test_json_holds_finite_numbers(drift, written):
    decision = JitDecision(enabled=False, reason="", drift=drift, off=times(1.0), shapes=TWO)
    values = json.loads(json.dumps(decision.to_dict(), allow_nan=False))
    assert values["drift"] == written
    assert StepTimes.from_dict(values["off"]) == times(1.0)
    assert values["shapes"]["count"] == 2
