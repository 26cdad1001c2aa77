import json

import keras
import pytest
import tensorflow as tf
from models import assert_same_state, batch, small_net, state
from precision_nets import (
    X,
    Y,
    functional,
    lstm,
    mlp,
    overflowing,
    transformer,
)
from quick import first_quick

from tfopt.bench.workloads import digits
from tfopt.precision import check

layers = keras.layers
HALVES = ("mixed_float16", "mixed_bfloat16")


def small():
    return small_net(), batch(32)


def digits_net():
    return digits.conv_net(), digits.batch(64)


@pytest.mark.slow
@pytest.mark.parametrize("policy", HALVES)
@pytest.mark.parametrize("make", first_quick([digits_net, transformer, small, mlp, lstm], 2))
def test_healthy_nets_pass(make, policy):
    model, data = make()
    report = check(model, data, policy)
    assert report.passed, str(report)
    assert (report.problems, report.notes, report.fallback, report.first_overflow) == ((), (), {}, None)
    assert report.loss_scale == (2.0**15 if policy == "mixed_float16" else 1)
    errors = [layer.output.error for layer in report.layers if layer.output and layer.policy == policy]
    # Some roundings each, so it did compute in that dtype.
    rounding = 2.0**-10 if policy == "mixed_float16" else 2.0**-7
    assert 0.1 * rounding < max(errors) < 10 * rounding
    assert 0 < report.loss_drift < rounding


@pytest.mark.slow
def test_float32_is_itself():
    model, data = mlp()
    report = check(model, data, "float32")
    assert report.passed
    assert report.loss_drift == 0
    assert {part.error for x in report.layers for part in (x.output, x.weight_gradient) if part} == {0.0}


@pytest.mark.slow
@pytest.mark.parametrize("policy", HALVES)
def test_the_model_comes_back_bit_for_bit(policy):
    model = small_net(jit_compile=False)
    model.fit(*batch(), verbose=0)
    before, function = state(model), model.train_function
    objects = [(layer, layer._dtype_policy, dict(layer.__dict__)) for layer in model._flatten_layers()]
    check(model, batch(32), policy)
    assert_same_state(before, state(model))
    assert model.train_function is function
    assert [layer.rate for layer in model.layers if isinstance(layer, layers.Dropout)] == [0.5]
    for layer, its, attributes in objects:
        assert layer._dtype_policy is its
        assert layer.__dict__.keys() == attributes.keys()
    assert tf.config.experimental.tensor_float_32_execution_enabled()


@pytest.mark.slow
def test_json_holds_no_infinity():
    report = check(overflowing(), (X, Y), "mixed_float16")
    values = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert values["candidate_loss"] is None
    assert values["fallback"] == report.fallback
    assert values["passed"] is False


@pytest.mark.slow
def test_batches_are_those_asked_for():
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(6)
    model = functional(lambda x: layers.Dense(3)(layers.Dense(8)(x)))
    assert check(model, dataset, "mixed_bfloat16").batches == 3
    assert check(model, dataset, "mixed_bfloat16", batches=1).batches == 1
    assert check(model, dataset, "mixed_bfloat16", batches=9).batches == 5  # the last one has two examples
    assert check(model, (X, Y), "mixed_bfloat16").batches == 1
