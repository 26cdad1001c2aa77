"""The policies that count for the gate are those of layers that compute, not what the others were made under."""

import keras
import numpy as np
import pytest
from precision_nets import X, Y, functional
from quick import first_quick

from tfopt import hardware, precision
from tfopt.precision import check

layers = keras.layers
HALVES = ("mixed_bfloat16", "mixed_float16")


class Rough(layers.Layer):
    """In float16 it is wrong by 9 %: little enough for a layer, too much for that dtype's loss, not for bfloat16's."""

    def call(self, x):
        return x * (1.09 if x.dtype == "float16" else 1.0)


def made_under(policy):
    keras.config.set_dtype_policy(policy)
    model = functional(lambda x: layers.Dense(3, name="head")(Rough(name="rough")(layers.Dense(8, name="body")(x))))
    keras.config.set_dtype_policy("float32")
    return model


@pytest.mark.parametrize("made", ["float32", *HALVES])
def test_drift_is_judged_by_the_dtype_that_computes(made):
    report = check(made_under(made), (X, Y), "mixed_float16")
    assert 1 / 32 < report.loss_drift < 1 / 4
    assert any("above the limit of 3.12 %" in problem for problem in report.problems), str(report)


@pytest.mark.parametrize("made", HALVES)
def test_drift_of_a_map_does_not_go_by_the_models_own_policy(made):
    halves = dict.fromkeys(("body", "rough"), "mixed_float16") | {"head": "float32"}
    report = check(made_under(made), (X, Y), halves)
    assert any("above the limit of 3.12 %" in problem for problem in report.problems), str(report)


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16"])
def test_the_loss_is_scaled_where_something_computes_in_float16(policy):
    report = check(made_under("mixed_float16"), (X, Y), policy)
    assert (report.loss_scale > 1) == (policy == "mixed_float16")


@pytest.mark.parametrize(
    ("capability", "policy", "fallback"),
    first_quick(
        [
            ((8, 0), "mixed_bfloat16", {"year": "mixed_bfloat16", "body": "float32"}),
            ((7, 5), "mixed_float16", {}),  # which holds whole numbers up to 2048
            (None, "float32", {}),
        ]
    ),
)
def test_auto_is_judged_as_what_is_then_set(monkeypatch, capability, policy, fallback):
    gpu = hardware.Gpu(0, "GPU-0", "Test", 1024, capability, False, "1.2")
    monkeypatch.setattr(hardware, "gpus", lambda: (gpu,) if capability else ())
    model = functional(
        lambda x: layers.Dense(3)(layers.Dense(8, name="late")(layers.Dense(8, name="body")(x))), name="year"
    )
    years = X.copy()
    years[:, 0] = np.arange(len(X)) % 30 + 1990
    report = check(model, (years, Y))
    assert (report.policy, report.fallback) == (policy, fallback)
    assert any('"auto" is float32 here: no NVIDIA GPU' in note for note in report.notes) == (policy == "float32")
    assert precision.set_policy("auto") == policy
    assert precision.apply(model, "auto").changed.get("late", "float32") == policy
