"""The fastest dtype policies by measured times and errors, of planted and of real models."""

import itertools
import json
import random

import keras
import numpy as np
import pytest
from models import assert_same_state, batch, small_net, state
from precision_nets import X, Y, cross_entropy, functional
from quick import campaign, first_quick

from tfopt.measure import StepTimes
from tfopt.model.layers import layer_paths
from tfopt.precision import apply, assign, check
from tfopt.precision.layer_policies import assign_policies, current_policy
from tfopt.precision.per_layer import assigning, layer_times
from tfopt.precision.per_layer.layer_times import measure_layers

layers = keras.layers


def test_links_are_what_layers_take_from_each_other(monkeypatch):
    monkeypatch.setattr(layer_times, "_timed", lambda *_: (1.0, 1.0))
    shared = layers.Dense(8, name="shared")

    def body(x):
        one = layers.Dense(16, name="one")(x)
        two = shared(layers.Dense(8, name="two")(keras.ops.relu(one)))
        three = layers.Add(name="joined")([shared(two), keras.ops.sin(two) + x])
        return layers.Dense(3, name="head")(keras.ops.concatenate([three, one], axis=-1))

    model = functional(body)
    policies = [assign_policies(model, name).policies for name in ("float32", "mixed_bfloat16")]
    costs, _ = measure_layers(model, (X, Y), *policies)
    assert [one.layer.name for one in costs] == ["one", "two", "shared", "joined", "head"]
    examples = len(X)
    assert [one.links for one in costs] == [
        {None: 8 * examples},
        {0: 16 * examples},
        {1: 8 * examples},
        {2: 2 * 8 * examples, None: 8 * examples},
        {3: 24 * examples, 0: 24 * examples},
    ]


class Planted:
    """A model whose layers take the given times, and whose step their sum and that of the casts between them."""

    def __init__(self, monkeypatch, model, half_ms, cast_ms=0.0):
        self.model, self.half_ms, self.cast_ms = model, half_ms, cast_ms
        monkeypatch.setattr(layer_times, "_timed", lambda model, layer, *_: (10.0, half_ms.get(layer.name, 10.0)))
        monkeypatch.setattr(layer_times, "_cast_ms", lambda *_: cast_ms)
        monkeypatch.setattr(assigning, "_measured", self.measured)

    def measured(self, model, data, variants):
        return {name: self.step_times(assigned.policies) for name, assigned in variants.items()}

    def step_times(self, policies):
        dtypes = {layer.name: policy.compute_dtype for layer, policy in policies.items() if layer is not self.model}
        ms = sum(10.0 if dtype == "float32" else self.half_ms.get(name, 10.0) for name, dtype in dtypes.items())
        order = ["float32", *dtypes.values()]
        ms += self.cast_ms * 32 * 8 * sum(one != other for one, other in itertools.pairwise(order))
        return StepTimes(repeats_ms=((ms,),) * 6, steps_per_sample=1, first_step_seconds=0.0)


def chain():
    def body(x):
        for name, activation in (("one", "relu"), ("two", "tanh"), ("three", "gelu")):  # not alike, so timed apart
            x = layers.Dense(8, activation=activation, name=name)(x)
        return layers.Dense(3, name="head")(x)

    return functional(body)


class Subclassed(keras.Model):
    """Not built, and made in another order than it computes."""

    def __init__(self):
        super().__init__(name="net")
        self.head, self.body = layers.Dense(3, name="head"), layers.Dense(8, name="one")
        self.drop = layers.Dropout(0.5, name="drop")

    def call(self, x, training=None):
        return self.head(self.body(self.drop(x, training=training)) + 1.0)


@pytest.mark.slow
def test_a_subclassed_model_is_built_and_taken_apart(monkeypatch):
    model = Subclassed()
    model.compile("adam", cross_entropy())
    Planted(monkeypatch, model, {"one": 1.0})
    found = assign(model, (X, Y))
    assert [row.path for row in found.layers] == ["drop", "one", "head"]
    assert found.policy["net"] == "mixed_bfloat16"
    assert {row.path: row.policy for row in found.layers}["one"] == "mixed_bfloat16"


def test_layers_of_one_kind_are_timed_once(monkeypatch):
    timed = []
    monkeypatch.setattr(layer_times, "_timed", lambda model, layer, *_: timed.append(layer.name) or (1.0, 1.0))

    def body(x):
        for at in range(3):
            x = layers.Dense(8, name=f"block{at}")(x)
        return layers.Dense(3, name="head")(layers.Dense(8, activation="relu", name="other")(x))

    model = functional(body)
    policies = [assign_policies(model, name).policies for name in ("float32", "mixed_bfloat16")]
    assert len(measure_layers(model, (X, Y), *policies)[0]) == 5
    assert timed == ["block0", "block1", "other", "head"]  # of the first one's input training takes no gradient


@pytest.mark.slow
@pytest.mark.parametrize(
    ("half_ms", "cast_ms", "policy"),
    first_quick(
        [
            ({"one": 5.0, "two": 15.0, "three": 5.0}, 0.0, {"net": "mixed_bfloat16", "two": "float32"}),
            ({"one": 15.0, "two": 15.0, "three": 15.0}, 0.0, {"net": "float32"}),
            ({"one": 5.0, "two": 5.0, "three": 5.0}, 0.0, {"net": "mixed_bfloat16"}),
            # A cast takes 2.56 ms, and two of them more than what "two" loses.
            ({"one": 4.0, "two": 13.0, "three": 4.0}, 0.01, {"net": "mixed_bfloat16"}),
            ({"one": 4.0, "two": 13.0, "three": 4.0}, 0.1, {"net": "float32"}),
        ],
        2,
    ),
)
def test_a_planted_model_gets_what_is_fastest(monkeypatch, half_ms, cast_ms, policy):
    model = chain()
    plan = Planted(monkeypatch, model, half_ms, cast_ms)
    found = assign(model, (X, Y))
    assert found.policy == policy
    assert found.passed
    step = {name: plan.step_times(assign_policies(model, its).policies).median_ms for name, its in
            (("float32", "float32"), ("mixed_bfloat16", "mixed_bfloat16"), ("found", policy))}  # fmt: skip
    for name, comparison in found.speedup.items():
        assert comparison.ratio == pytest.approx(step[name] / step["found"])
    assert json.loads(json.dumps(found.to_dict()))["policy"] == policy
    assert {row.path: row.policy for row in found.layers} == {
        name: policy.get(name, policy["net"]) if name != "head" else "float32"
        for name in ("one", "two", "three", "head")
    }
    assert str(found).startswith(found.reason)


def with_years():
    """bfloat16 has three significant digits: of a year it keeps the century."""
    keras.utils.set_random_seed(1)
    years = np.random.default_rng(0).uniform(1990, 2020, size=(32, 8)).astype("float32")
    inputs = keras.Input((8,))
    x = layers.Rescaling(1.0, offset=-2005.0, name="age")(inputs)
    x = layers.Dense(8, activation="relu", name="one")(x)
    model = keras.Model(inputs, layers.Dense(3, name="head")(x), name="net")
    model.compile("adam", cross_entropy())
    return model, (years, Y)


@pytest.mark.slow
def test_a_layer_whose_error_is_beyond_the_tolerance_stays_in_float32(monkeypatch):
    model, data = with_years()
    Planted(monkeypatch, model, {"age": 5.0, "one": 5.0})
    found = assign(model, data)
    assert found.policy == {"net": "mixed_bfloat16", "age": "float32"}
    assert found.error <= 0.1
    assert check(model, data, found.policy).passed


@pytest.mark.slow
def test_a_layer_that_overflows_stays_in_float32(monkeypatch):
    def body(x):
        x = layers.Dense(8, name="one")(x)
        x = layers.Rescaling(1e-5, name="quiet")(layers.Rescaling(1e5, name="loud")(x))
        return layers.Dense(3, name="head")(layers.Dense(8, name="two")(x))

    model = functional(body)
    Planted(monkeypatch, model, dict.fromkeys(("one", "loud", "quiet", "two"), 5.0))
    monkeypatch.setattr(assigning, "_half_policy", lambda: "mixed_float16")
    found = assign(model, (X, Y))
    assert found.policy["loud"] == "float32"
    assert found.policy["net"] == "mixed_float16"
    fixed = {row.path: row.fixed for row in found.layers}
    assert fixed["loud"] == "does not pass check"
    assert check(model, (X, Y), found.policy).passed


@pytest.mark.slow
def test_outputs_in_16_bits_go_back_to_float32(monkeypatch):
    def body(x):
        x = layers.Normalization(mean=0.0, variance=1.0, dtype="mixed_bfloat16", name="constants")(x)
        return layers.Dense(3, dtype="mixed_bfloat16", name="head")(layers.Dense(8, name="body")(x))

    model = functional(body)
    Planted(monkeypatch, model, {"body": 5.0})
    policy = assign(model, (X, Y)).policy
    assert (policy["net"], policy["head"], policy.get("body")) == ("mixed_bfloat16", "float32", None)


@pytest.mark.parametrize(
    ("half", "options"),
    first_quick([("mixed_bfloat16", {"jit_compile": True}), ("mixed_float16", {})], 0)
    + campaign([("mixed_bfloat16", {})]),
)
def test_the_measured_model_is_unchanged(monkeypatch, half, options):
    monkeypatch.setattr(assigning, "_half_policy", lambda: half)
    model = small_net(**options)
    model.fit(*batch(), verbose=0)
    optimizer, compiled = model.optimizer, model._compile_config.config["optimizer"]
    policies = {path: current_policy(layer) for layer, path in layer_paths(model).items()}
    before, seeds, function = state(model), random.getstate(), model.train_function
    found = assign(model, batch())
    assert_same_state(before, state(model))
    assert random.getstate() == seeds
    assert {path: current_policy(layer) for layer, path in layer_paths(model).items()} == policies
    assert (model.optimizer, model.train_function) == (optimizer, function)
    assert model._compile_config.config["optimizer"] is compiled
    assert all(row.float32_ms > 0 for row in found.layers)
    assert all(row.half_ms > 0 for row in found.layers if not row.fixed)
    assert [row.half_ms for row in found.layers if row.fixed] == [None]
    assert set(found.speedup) == {"float32", half}
    apply(model, found.policy)
    model.fit(*batch(), verbose=0)


def test_wrong_input():
    with pytest.raises(ValueError, match=r"Expected tolerance to be at least 0\. Received: -1"):
        assign(chain(), (X, Y), tolerance=-1)
    with pytest.raises(ValueError, match="Expected a compiled model"):
        assign(keras.Sequential([layers.Dense(2)]), (X, Y))
