"""What the matrix takes for right is known without the gate."""

from collections import Counter

import numpy as np
import pytest
from ml_dtypes import bfloat16
from precision_matrix.both_ways import NOT_TRAINED, share_of_fall
from precision_matrix.case import RECORDS
from precision_matrix.cases import ALL, GRADIENTS, TRAINED
from precision_matrix.formulas import FINE, FORMULAS, WRONG, wrong_share
from precision_matrix.judged import DISPUTED, QUICK
from precision_matrix.structures import Counting
from quick import first_quick

from tfopt.precision import apply

LARGEST = {"float16": 2048, "bfloat16": 256}


def test_the_matrix_is_whole():
    names = Counter(case.id for case in ALL)
    assert [name for name, count in names.items() if count > 1] == []
    assert len(names) >= 120
    assert len(DISPUTED) <= 2
    assert {*DISPUTED, *QUICK} <= names.keys()
    assert {case.id for case in ALL if case.verdict == "pass"} >= DISPUTED.keys()  # no wrong pass is one


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", first_quick([*FORMULAS], 3))
def test_a_formula_is_clearly_wrong_or_clearly_right(name, dtype):
    share, hidden = wrong_share(FORMULAS[name], dtype)
    if dtype in FORMULAS[name].wrong_in.split():
        assert share >= WRONG
    else:
        assert share <= FINE
        assert hidden <= 2 * FINE


def test_healthy_nets_learn_as_in_float32():
    assert {case.id for case in ALL if case.truth is TRAINED and case.name not in NOT_TRAINED} == RECORDS.keys()
    assert {case.name for case in ALL if case.truth is TRAINED} >= NOT_TRAINED.keys()
    assert {name: share for name, record in RECORDS.items() if not (share := share_of_fall(record)) >= 0.9} == {}


@pytest.mark.parametrize(("dtype", "type_"), [("float16", np.float16), ("bfloat16", bfloat16)])
def test_whole_numbers_end(dtype, type_):
    largest = LARGEST[dtype]
    exact = np.arange(largest + 1, dtype="float32")
    assert (exact.astype(type_).astype("float32") == exact).all()
    assert float(type_(largest + 1)) == float(type_(largest) + type_(1)) == largest


@pytest.mark.parametrize("type_", [np.float16, bfloat16])
def test_a_moving_average_sticks(type_):
    average, mean, momentum = (type_(value) for value in (1.0, 0.1, 0.9999))
    for _ in range(100):
        average = average * momentum + mean * (type_(1) - momentum)
    assert average == 1


def test_float16_has_nothing_left_of_a_faint_gradient():
    smallest = np.float16(2.0**-24)
    assert np.float16(1e-6 * 1e-2) == 0 < smallest
    assert np.float16(2.0**15 * 1e-6 * 1e-2) > 1000 * smallest


def test_a_softmax_of_16_bits_is_saturated_where_float32s_is_not():
    logits = np.array([0.0, 9.0])
    probabilities = (np.exp(logits) / np.exp(logits).sum()).astype("float32")
    assert 0 < 1 - probabilities[1] < 1e-3
    for type_ in (np.float16, bfloat16):
        assert probabilities.astype(type_)[1] == 1  # so that no gradient is left


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in GRADIENTS if "own step" not in case.name], ids=lambda case: case.id)
def test_a_gradient_that_vanishes_is_not_learned_from(case):
    """The losses of the steps from the 21st to the 40th, on a CPU without XLA."""
    mean = []
    for policy in ("float32", case.policy):
        model, data = case.build()
        apply(model, policy)
        mean.append(np.mean(model.fit(*data, epochs=40, verbose=0).history["loss"][20:]))
    if case.verdict == "pass":  # under Adam the losses jump, and a step that the loss scale skips moves them all
        assert mean[1] == pytest.approx(mean[0], rel=0.5 if "Adam" in case.name else 0.1)
    else:
        assert mean[1] > 1.03 * mean[0]


@pytest.mark.parametrize(("policy", "count"), [("mixed_bfloat16", 256), ("mixed_float16", 2048)])
def test_stock_keras_stops_a_counter_of_float32(policy, count):
    layer = Counting(count - 1, "float32", lambda count, x: count + 1, True, dtype=policy)
    for _ in range(3):
        layer(np.ones((1, 1)), training=True)
    assert layer.count.dtype == "float32"
    assert float(layer.count) == count  # and not count + 2
