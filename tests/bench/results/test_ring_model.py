"""The stated model of a step on many replicas, in exact numbers."""

import pytest

from tfopt.bench.results import CommunicationResult, Prediction, RingModel

MIB = 2**20
MODEL = RingModel(compute_ms=10, gradient_bytes=8 * MIB, latency_ms=0.5, mib_per_second=1000)


@pytest.mark.parametrize(
    ("replicas", "sent_mib", "step_ms"),
    [(1, 0, 10), (2, 8, 10 + 2 * 0.5 + 8), (8, 14, 10 + 14 * 0.5 + 14), (64, 15.75, 10 + 126 * 0.5 + 15.75)],
)
def test_a_step(replicas, sent_mib, step_ms):
    assert MODEL.sent_bytes(replicas) == sent_mib * MIB
    assert MODEL.step_ms(replicas) == pytest.approx(step_ms)
    assert MODEL.efficiency(replicas) == pytest.approx(10 / step_ms)


@pytest.mark.parametrize("replicas", [2, 4, 8])
def test_latency_and_bandwidth_follow_from_two_reductions(replicas):
    def reduction_ms(size):
        mib = 2 * (replicas - 1) / replicas * size / MIB
        return 0.3 + 2 * (replicas - 1) * 0.5 + mib / 1000 * 1000

    sizes = {16 * MIB: reduction_ms(16 * MIB), 4: reduction_ms(4), 0: 0.3}
    found = RingModel.measured(compute_ms=10, gradient_bytes=8 * MIB, replicas=replicas, reduction_ms=sizes)
    assert (found.latency_ms, found.mib_per_second) == (pytest.approx(0.5, rel=1e-4), pytest.approx(1000))


def test_a_large_tensor_that_seems_no_slower_than_a_small_one():
    found = RingModel.measured(compute_ms=10, gradient_bytes=MIB, replicas=2, reduction_ms={0: 0.5, 4: 2.5, MIB: 2.4})
    assert found.latency_ms == 1.0
    assert found.step_ms(2) == pytest.approx(12.0, abs=0.01)


def test_a_reduction_that_seems_no_slower_than_the_call_alone():
    found = RingModel.measured(compute_ms=10, gradient_bytes=0, replicas=2, reduction_ms={0: 2.0, 4: 1.9, MIB: 3.0})
    assert found.step_ms(2) == pytest.approx(10.0, abs=0.01)


def test_predictions_begin_with_what_was_measured():
    found = CommunicationResult(replicas=2, sent_bytes_per_step=None, model=MODEL, start_to_first_step_seconds={})
    assert [each.replicas for each in found.predictions] == [2, 8, 64]
    assert found.predictions[1] == Prediction(replicas=8, step_ms=pytest.approx(31), efficiency=pytest.approx(10 / 31))
    assert found.expected_bytes_per_step == 8 * MIB
