"""The thresholds, each from both sides."""

import re
from dataclasses import replace

import keras
import pytest
from snippets import ROOT

from tfopt.precision.float8_margins import Float8Margin
from tfopt.precision.gate import verdict
from tfopt.precision.gate.layer_table import (
    Deviation,
    Grid,
    LateCast,
    LayerPrecision,
    LayerTable,
    StatePrecision,
    TensorPrecision,
    WeightGradient,
)
from tfopt.precision.gate.verdict import drift_limit, find_problems

FINE = Deviation(error=0.001, overflow=0.0, underflow=0.0, lost=0.0, largest=1.0, norm=1.0, difference=0.001)
HALF = keras.DTypePolicy("mixed_float16")


def layer(path="a", **parts):
    roles = ("input", "output", "weight_gradient", "output_gradient", "input_gradient")
    found = {role: replace(FINE, **parts.get(role, {})) for role in roles}
    return LayerPrecision(path=path, kind="Dense", policy="mixed_float16", **found)


def judged(*layers, policies=None, **arguments):
    tensors = tuple(TensorPrecision(path=x.path, error=x.output, sources=(x.input,)) for x in layers)
    arguments = {"heads": (), "tensors": tensors, "reference_loss": 1.0, "candidate_loss": 1.0} | arguments
    policies = policies or {x.path: HALF for x in layers}
    computing = policies.values()
    return find_problems(LayerTable(calls=layers, layers=layers, policies=policies, computing=computing, **arguments))


def test_nothing():
    assert judged(layer("a"), layer("b")) == []


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"output": {"overflow": 1e-6}}, "'a' overflows inside"),
        ({"output": {"overflow": 1e-6, "largest": 7e4}}, "'a' overflows, the first"),
        ({"weight_gradient": {"overflow": 1e-6}}, "Gradients overflow"),
        ({"output": {"lost": 0.91}}, "The output of 'a' loses 91 %"),
        ({"output": {"error": 2.1}}, "The output of 'a' differs from float32 by 2.1 times its norm"),
        ({"output": {"error": 0.16}, "input": {"error": 0.04}}, "The output of 'a' differs from float32 by 15.5 %"),
        ({"weight_gradient": {"lost": 0.11}}, "The gradient of 'a' underflows"),
        (
            {"weight_gradient": {"error": 2.1, "difference": 2.1}},
            "The gradient of 'a' differs from float32 by 2.1 times its norm",
        ),
    ],
)
def test_beyond(parts, said):
    assert [problem.sentence.startswith(said) for problem in judged(layer(**parts))] == [True]
    assert judged(layer(**parts))[0].blamed == ("a",)


@pytest.mark.parametrize(
    "parts",
    [
        {"output": {"underflow": 0.9, "lost": 0.89}},
        {"output": {"error": 1.9}, "input": {"error": 0.06}},
        {"output": {"error": 0.09}},
        {"output": {"lost": 1.0, "norm": 1e-7}},  # beside an input of 1: what rounding leaves of zero
        {"output": {"lost": 1.0}, "input": {"lost": 1.0}},  # that comes from elsewhere
        {"weight_gradient": {"underflow": 0.9, "lost": 0.09}},
        {"weight_gradient": {"lost": 1.0, "norm": 1e-7}},
        {"weight_gradient": {"error": 1.9, "difference": 1.9}},
        {"weight_gradient": {"error": 2.1, "difference": 2.1}, "output_gradient": {"error": 0.6}},  # it came like that
        {"weight_gradient": {"error": 1e5, "difference": 0.005}},  # of a whole of 1 and more
    ],
)
def test_within(parts):
    assert judged(layer(**parts), layer("b")) == []


@pytest.mark.parametrize(("error", "problems"), [(0.4, 1), (1.5, 0)])
def test_what_rounding_makes_zero_within_noise_is_noise(error, problems):
    found = judged(
        layer(weight_gradient={"lost": 0.11, "error": error}), policies={"a": keras.DTypePolicy("mixed_bfloat16")}
    )
    assert len(found) == problems


MARGIN = Float8Margin(
    path="a",
    tensor="inputs",
    format="E4M3",
    scale=1.0,
    amax_history=(),
    largest=448.0,
    clipped=0.0,
    vanished=0.0,
    lost=0.0,
)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"clipped": 0.21}, "Values saturate: 21 % of the norm of the inputs of 'a' in float8 (E4M3)"),
        ({"clipped": 0.19}, None),
        ({"vanished": 0.11}, "Values vanish: 11 % of the nonzero values of the inputs of 'a'"),
        ({"vanished": 0.09}, None),
        ({"tensor": "kernel", "vanished": 0.11}, "Values vanish: 11 % of the nonzero values of the kernel of 'a'"),
        ({"lost": 0.11}, None),  # zeros among inputs count by their number
        ({"tensor": "output gradient", "lost": 0.11}, "Values vanish: 11 % of the norm of the output gradient of 'a'"),
        ({"tensor": "output gradient", "lost": 0.09, "vanished": 0.9}, None),
    ],
)
def test_float8(parts, said):
    found = judged(layer("a"), float8=(replace(MARGIN, **parts),))
    assert [problem.blamed for problem in found] == [("a",)] * (said is not None)
    assert all(problem.sentence.startswith(said) for problem in found)


def test_bfloat16_has_the_range_of_float32():
    """So no gradient underflows in it, and no loss scale would help."""
    (problem,) = judged(
        layer(weight_gradient={"lost": 0.2}), policies={"a": keras.DTypePolicy("mixed_bfloat16")}, loss_scale=1.0
    )
    assert problem.sentence.startswith("The gradient of 'a' is lost to rounding, not to the range of the dtype: 20 %")
    assert "scal" not in problem.sentence


def test_what_follows_an_overflow_is_no_problem_of_its_own():
    broken = {"overflow": 1.0}
    first = layer("first", output=broken, weight_gradient=broken)
    second = layer("second", input=broken, output=broken, weight_gradient=broken)
    found = judged(layer("before"), first, second, candidate_loss=float("nan"))
    assert [problem.blamed for problem in found] == [("first",)]


def test_what_follows_a_wrong_output_is_no_problem_of_its_own():
    found = judged(layer("root", output={"lost": 1.0}), layer("b", input={"lost": 1.0}, weight_gradient={"lost": 1.0}))
    assert [problem.blamed for problem in found] == [("root",)]


def test_a_gradient_overflows_where_it_is_finite_before():
    came, went = {"output_gradient": {"overflow": 0.0}}, {"input_gradient": {"overflow": 1.0}}
    reached = {"output_gradient": {"overflow": 1.0}, "weight_gradient": {"overflow": 1.0}}
    found = judged(layer("first", **reached), layer("root", **came, **went), layer("last"))
    assert [problem.blamed for problem in found] == [("root",)]


def test_a_loss_that_is_no_number_though_no_layer_overflows():
    [problem] = judged(layer("a"), candidate_loss=float("inf"), reference_loss=2.0)
    assert problem.sentence.startswith("The loss is inf (2 in float32), though no layer's output overflows")
    assert problem.to_float32 == ("a",)


@pytest.mark.parametrize(
    ("names", "limit"),
    [
        (["float32"], 32 * 2.0**-23),
        (["float32", "mixed_float16"], 1 / 32),
        (["mixed_float16", "mixed_bfloat16"], 1 / 4),
        (["float8_from_float32", "float32"], 1 / 2),
    ],
)
def test_drift_is_bounded_by_the_coarsest_dtype(names, limit):
    policies = {str(number): keras.dtype_policies.get(name) for number, name in enumerate(names)}
    assert drift_limit(policies.values()) == pytest.approx(limit)
    layers = [layer(path) for path in policies]
    assert judged(*layers, policies=policies, candidate_loss=1 + limit * 0.99) == []
    [problem] = judged(*layers, policies=policies, candidate_loss=1 + limit * 1.01)
    assert problem.sentence.startswith("The loss is")


def test_the_largest_error_of_its_own_is_blamed_for_drift():
    layers = [
        layer("heir", input={"error": 0.5}, output={"error": 0.5}),
        layer("root", output={"error": 0.09}),
        *(layer(str(number)) for number in range(14)),
    ]
    [problem] = judged(*layers, candidate_loss=2.0)
    assert problem.blamed == ("root",)
    assert len(problem.to_float32) == 2  # an eighth of them a round


def test_heads_are_named_beside_anything_else():
    late = LateCast(path="a", kind="softmax", dtype="float16", before=())
    found = judged(layer(output={"overflow": 1.0}), layer("head"), heads=("head",), late_casts=(late,))
    assert ["overflows" in found[0].sentence, "'head' outputs" in found[1].sentence] == [True, True]
    assert "'a' computes the model's softmax" in found[2].sentence


def test_an_error_between_layers_is_that_of_the_layer_around_them():
    off = replace(FINE, error=0.3)
    tensor = TensorPrecision(path="block", error=off, sources=(FINE, FINE), neighbours=("block/a", "block/b"))
    [problem] = judged(layer("block"), tensors=(tensor,))
    assert problem.sentence.startswith("What 'block' computes between its layers differs from float32 by 30 %")
    assert problem.to_float32 == ("block", "block/a", "block/b")


def test_float8_is_coarse_by_design():
    policies = {"a": keras.dtype_policies.get("float8_from_mixed_bfloat16")}
    assert judged(layer("a", output={"error": 1.9}), policies=policies) == []


@pytest.mark.parametrize(
    ("change", "value", "inherited", "wrong"),
    [
        ({"error": 0.51, "difference": 0.001}, {}, 0.04, True),
        ({"error": 0.51, "difference": 1e-5}, {}, 0.04, False),  # beside a value of 1: no rounding of that
        ({"error": 0.51, "difference": 1e-5, "lost": 0.91}, {}, 0.04, True),  # it stands still
        ({"error": 0.49}, {}, 0.04, False),
        ({"error": 1.0}, {}, 0.06, False),  # that comes from elsewhere
        ({"error": 1.0, "norm": 1e-7}, {}, 0.0, False),  # beside a value of 1: what rounding leaves of no change
    ],
)
def test_the_update_of_a_variable(change, value, inherited, wrong):
    state = StatePrecision(
        path="a", name="mean", change=replace(FINE, **change), value=replace(FINE, **value), inherited=inherited
    )
    found = judged(layer("a"), states=(state,))
    said = "'a' updates its variable 'mean' in float16: what this step adds differs from float32 by 51 %"
    assert [problem.sentence.startswith(said) for problem in found] == [True] * wrong


def grid(**options):
    options = {"hidden": 0.0, "changed_ids": 0.0, "is_input": True, "blamed": ("a",)} | options
    return Grid(path="a", dtype="bfloat16", feature=3, largest=2026.0, spread=10.4, **options)


def test_a_hidden_feature_and_changed_ids():
    assert judged(layer("a"), grids=(grid(hidden=0.09),)) == []
    [problem] = judged(layer("a"), grids=(grid(hidden=0.22),))
    said = "'a' rounds the batch to bfloat16, which hides feature 3: it reaches 2026 and varies by 10.4, of which"
    assert problem.sentence.startswith(said)
    [problem] = judged(layer("a"), grids=(grid(changed_ids=0.01, blamed=("input",)),))
    assert problem.sentence.startswith(
        "'a' gets ids rounded to bfloat16: 1 % of them turn into other ids, since bfloat16 is exact"
    )
    assert problem.blamed == ("input",)
    # What a layer computes is its own error first.
    hidden = grid(hidden=0.22, is_input=False)
    assert "The output of 'a' differs" in judged(layer("a", output={"error": 0.3}), grids=(hidden,))[0].sentence
    assert "'a' rounds" in judged(layer("a"), grids=(hidden,))[0].sentence


@pytest.mark.parametrize(
    ("constants", "said"),
    [
        ([0.5, -1e9], "Its constant -1e+09 is beyond 65504"),
        ([1.0, 1e-12], "Its constant 1e-12 becomes zero"),
        ([2.0], ""),
    ],
)
def test_a_constant_is_named(constants, said):
    for parts in ({"overflow": 1e-6}, {"error": 0.3}):
        [problem] = judged(layer("a", output=parts), constants={"a": constants, "b": [1e30]})
        assert said in problem.sentence
        assert ("constant" in problem.sentence) == bool(said)


def test_the_page_states_the_limits():
    page = (ROOT / "docs" / "precision.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", page, re.M))
    share = "{:.0%}".format

    def stated(start):
        [limit] = [limit for what, limit in rows.items() if what.startswith(start)]
        return [part.replace(" %", "%") for part in re.findall(r"[0-9]+ %|twice", limit)]

    assert verdict.WRONG == 2
    assert stated("a layer's output underflows") == [share(verdict.LOST_OUTPUT)]
    assert stated("a weight gradient underflows") == [share(verdict.LOST)]
    assert stated("a layer's output differs") == [share(verdict.OWN_ERROR), share(verdict.CLEAN), "twice"]
    assert stated("a weight gradient differs") == ["twice", share(verdict.MATTERS)]
    assert stated("the gradient of a bias or a scale") == [share(verdict.MATTERS)]
    assert verdict.SHRUNK == 0.25
    assert stated("a gradient depends") == [share(verdict.LINEAR)]
    assert stated("a layer adds to a variable") == [share(verdict.STATE_ERROR)]
    assert stated("what a layer adds") == [share(verdict.STATE_ERROR)]
    assert stated("a layer rounds a feature") == [share(verdict.HIDDEN)]
    halves = [drift_limit([keras.DTypePolicy(f"mixed_{dtype}")]) for dtype in ("float16", "bfloat16")]
    assert stated("the loss drifts") == [share(limit) for limit in (*halves, verdict.FLOAT8_DRIFT)]


def gradient(summed=None, arriving=FINE, **parts):
    summed = replace(FINE, **summed) if summed else None
    found = replace(FINE, **({"difference": 1.0} | parts))
    return WeightGradient(path="a", name="a/bias", gradient=found, arriving=arriving, summed=summed)


@pytest.mark.parametrize(
    ("found", "wrong"),
    [
        (gradient({"shrunk": 0.26}), True),
        (gradient({"shrunk": 0.24}), False),
        (gradient({"shrunk": 0.26}, replace(FINE, error=0.3)), True),  # whatever arrives, it is summed wrongly
        (gradient({"shrunk": 0.26}, difference=0.009), False),  # of a whole of 1
        (gradient({"shrunk": 0.26}, norm=1e-7), False),  # zero but for rounding
        (gradient({"shrunk": 0.0}, shrunk=0.26), False),  # of noise that arrives
        (gradient(shrunk=0.26), True),
        (gradient(None, replace(FINE, error=0.06), shrunk=0.26), False),
    ],
)
def test_a_gradient_that_vanishes(found, wrong):
    problems = judged(layer("a"), gradients=(found,))
    assert [problem.sentence[:42] for problem in problems] == ["The gradient of 'a/bias' loses 26 % of its"] * wrong
    assert judged(layer("a"), gradients=(found,), normalises=True) == []


def test_gradients_that_depend_on_the_loss_scale():
    off = {"error": 0.011, "difference": 0.011}
    behind, clip = layer("behind", output_gradient=off, weight_gradient=off), layer("clip", input_gradient=off)
    [problem] = judged(layer("a"), scaled=(behind, clip, layer("last")), loss_scale=1024.0)
    said = "'clip' clips, normalises or rounds gradients that are multiplied by the loss scale of 1024: in float32, too"
    assert problem.sentence.startswith(said)
    assert (problem.blamed, problem.mends) == (("clip",), False)
    [problem] = judged(layer("a"), scaled=(layer("a", weight_gradient=off),))
    assert problem.sentence.startswith("train_step clips or normalises gradients")
    assert judged(layer("a"), scaled=(layer("a", weight_gradient={"error": 0.009, "difference": 1.0}),)) == []
    assert judged(layer("a"), scaled=(layer("a", weight_gradient={"error": 1.0, "difference": 0.009}),)) == []


def test_a_state_that_stops_later():
    change = replace(FINE, error=1.0, difference=1.0)
    state = StatePrecision(path="a", name="n", change=change, value=FINE, inherited=0.0, ahead=576)
    [problem] = judged(layer("a"), states=(state,))
    assert problem.sentence.startswith("'a' adds to its variable 'n' in float16: once it is 576 times what a step adds")


def test_a_weight_of_16_bits_is_named():
    [problem] = judged(layer("a"), half_weights=("a/w",))
    assert problem.sentence.startswith("'a/w' trains in 16 bits")
    assert (problem.blamed, problem.mends) == (("a",), False)
