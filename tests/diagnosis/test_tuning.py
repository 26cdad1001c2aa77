"""What `tune` applies, refuses and takes back, and that the training computes the same."""

import keras
import numpy as np
import pytest
from planted_trainings import eager_left_on, many_small_operations

import tfopt
from tfopt.diagnosis import tuning
from tfopt.diagnosis.findings import CauseCost
from tfopt.diagnosis.tuning import tune_fit
from tfopt.text import figure

pytestmark = pytest.mark.slow


def test_what_only_the_user_can_change_is_refused_with_the_reason():
    model, arguments = eager_left_on(mended=False)
    result = tune_fit(model, arguments, allow=(), steps=5)
    reasons = {one.cause: one.reason for one in result.refused}
    assert "only you can change this" in reasons["eager execution"]
    assert result.applied == ()
    assert result.data is arguments["x"]
    assert result.speedup == 1.0


FASTER = tfopt.measure.Comparison(ratio=2.0, interval=(1.9, 2.1))


@pytest.fixture(scope="module")
def judged():
    """What the timings say, whatever the machine is doing: XLA pays, and all together does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "_chosen", lambda its, *others: ([one for one in its.tested if one.kind == "xla"], []))
        patch.setattr(tuning, "_together", lambda *arguments: FASTER)
        yield patch


@pytest.fixture(scope="module")
def tuned(judged):
    """A training, tuned; its twin, not tuned; and the weights before."""
    models = []
    for _ in range(2):
        keras.utils.set_random_seed(0)
        model, arguments = many_small_operations(mended=False)
        models.append(model)
    before = models[0].get_weights()
    result = tune_fit(models[0], arguments, steps=5)
    return result, models[1], arguments, before


def test_what_pays_is_applied(tuned):
    result, _, _, _ = tuned
    assert "XLA is off" in result.applied, str(result)
    assert result.model.jit_compile
    assert result.speedup == 2.0
    assert "tfopt.xla.set_jit(model, True)" in result.code
    assert str(result).startswith("A step is now ")


def test_the_training_is_the_same(tuned):
    result, twin, arguments, before = tuned
    assert all(np.array_equal(one, other) for one, other in zip(before, result.model.get_weights(), strict=True))
    for model, x in ((result.model, result.data), (twin, arguments["x"])):
        model.fit(x, arguments["y"], batch_size=arguments["batch_size"], shuffle=False, verbose=0)
    for one, other in zip(result.model.get_weights(), twin.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_undo_takes_everything_back(tuned):
    result = tuned[0]
    result.undo()
    assert not result.model.jit_compile
    assert tfopt.fit.launching.overlap_of(result.model) is None
    result.undo()


def test_everything_tried_is_listed_with_its_figure(tuned):
    result = tuned[0]
    tried = {one.name for one in result.diagnosis.causes} & {"XLA is off", "steps that wait for each other"}
    assert "XLA is off" in tried
    assert tried <= {one.name for one in result.measured}
    listed = str(result).partition("Tried one by one:\n")[2]
    assert all(f"- {one.name}: {figure(abs(one.cost_ms))} ms " in listed for one in result.measured)
    assert [one["name"] for one in result.to_dict()["measured"]] == [one.name for one in result.measured]


@pytest.mark.parametrize(
    ("interval_ms", "says"), [((1.0, 3.0), False), ((0.1, 3.0), True), ((-1.0, 3.0), True), ((-3.0, 0.1), False)]
)
def test_what_a_repeat_may_overturn_says_so(interval_ms, says):
    """Of a step of 10 ms; less than 0.3 ms is not worth a change."""
    cost = CauseCost(name="a", cost_ms=0.5, interval_ms=interval_ms, share=0.05, evidence="", remedy="")
    assert ("a repeat may decide otherwise" in tuning._figures(cost, 10.0)) == says


def test_what_makes_a_step_slower_says_so():
    cost = CauseCost(name="a", cost_ms=-0.3, interval_ms=(-0.4, -0.2), share=-0.03, evidence="", remedy="")
    assert tuning._figures(cost, 10.0) == "0.3 ms slower of 10 ms a step (95 %: 0.2 to 0.4)"


def test_what_is_not_faster_together_is_not_applied(judged):
    slower = tfopt.measure.Comparison(ratio=0.9, interval=(0.8, 0.95))
    judged.setattr(tuning, "_together", lambda *arguments: slower)
    model, arguments = many_small_operations(mended=False)
    arrays = arguments["x"], arguments["y"]
    result = tfopt.tune(model, arrays, steps=5)
    assert result.applied == ()
    assert result.data is arrays
    assert result.code == ""
    assert not model.jit_compile
    assert str(result).startswith('Nothing was changed. Without "XLA is off", a step is 0.9 times as fast')


def test_unknown_changes_are_named():
    with pytest.raises(ValueError, match=r"Expected a change: 'precision', .*Received: 'batch'"):
        tfopt.tune(keras.Sequential(), np.zeros((4, 1)), allow=["batch"])
