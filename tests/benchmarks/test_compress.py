"""benchmarks/compress.py and cost.py: what is pruned is smaller and trained, and what is too far off is noticed."""

from dataclasses import replace

import compress
import cost
import numpy as np
import pytest

from tfopt import compress as toolkit
from tfopt.bench.cases import CPU
from tfopt.bench.cases.measuring import measure
from tfopt.errors import UnsupportedError


@pytest.fixture
def few(monkeypatch):
    """So few examples and epochs that a net learns nothing."""
    train, test = compress.data()
    monkeypatch.setattr(compress, "data", lambda: (train._make(part[:64] for part in train), test))
    monkeypatch.setattr(compress, "EPOCHS", 1)


def test_the_same_examples_come_each_time():
    train, test = compress.data()
    assert train.images.shape == (4000, 32, 32, 3)
    assert len(test.labels) == compress.TEST_EXAMPLES
    assert abs(train.images.std() - np.hypot(compress._NOISE, 1.04)) < 0.1
    compress.data.cache_clear()
    again, _ = compress.data()
    assert np.array_equal(again.images, train.images)


@pytest.mark.parametrize(("values", "passed"), [([0.98, 0.99], True), ([0.97, 0.99], False), ([1.0], True)])
def test_a_pruned_net_may_lose_one_point(values, passed):
    case, *_ = compress.cases(CPU)
    assert case.judge([0.99, 0.9900001], values).passed == passed
    assert not case.judge([0.1], [0.1]).passed  # neither learned anything


@pytest.mark.parametrize(("values", "passed"), [([3.1, 4.0], True), ([3.4, 4.0], False)])
def test_outputs_in_integers_may_be_a_twentieth_apart(values, passed):
    case = compress.cases(CPU)[-1]
    assert case.judge([3.0, 4.0], values).passed == passed


@pytest.mark.slow
def test_the_pruned_net_is_smaller_and_trained(few, monkeypatch):
    students, taught, sizes = [], [], []
    pruned, distil, timer = compress._pruned, toolkit.distil, compress.StepTimer
    monkeypatch.setattr(toolkit, "distil", lambda *given: taught.append(given[:2]) or distil(*given))
    monkeypatch.setattr(compress, "StepTimer", lambda net, data: sizes.append(net.count_params()) or timer(net, data))
    monkeypatch.setattr(compress, "_pruned", lambda *given: students.append(pruned(*given)) or students[-1])
    case, *_ = compress.cases(CPU)
    outcome = measure(replace(case, repeats=1))
    whole, smaller = outcome.variants
    assert [len(one.check.values) for one in (whole, smaller)] == [1, 1]
    (student,) = students
    assert student.count_params() < 0.3 * compress.resnet().count_params()
    assert int(student.optimizer.iterations) == 2  # its 64 examples, once
    assert [one is student for _, one in taught] == [True]
    assert sizes[1] < 0.3 * sizes[0]
    assert smaller.times.examples_per_step == whole.times.examples_per_step == compress.BATCH


@pytest.mark.slow
def test_integers_that_do_not_pay_are_refused(monkeypatch):
    def refused(*given):
        raise UnsupportedError("not faster")

    monkeypatch.setattr(toolkit, "quantize", refused)
    _, integers = measure(replace(compress.cases(CPU)[-1], repeats=1)).variants
    assert integers.refused == "not faster"


@pytest.mark.slow
def test_each_form_of_a_layer_trains_with_fewer_parameters(monkeypatch):
    sizes, timer = [], cost.StepTimer
    monkeypatch.setattr(cost, "StepTimer", lambda net, data: sizes.append(net.count_params()) or timer(net, data))
    for layers in (cost._convolution(8), cost._dense(64), cost._attention(64)):
        sizes.clear()
        found = measure(replace(cost._case(layers, 2), repeats=1)).variants
        assert all(variant.times and not variant.refused for variant in found)
        assert max(sizes[1:]) < sizes[0]
