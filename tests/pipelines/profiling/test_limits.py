"""The arithmetic of limits, on nodes with known figures."""

import pytest

from tfopt.pipelines.profiling.profile import find_limits
from tfopt.pipelines.profiling.sampled_run import Node


def node(name, elements, seconds, *inputs, ratio=1.0, parallelism=None):
    places = {(slot, one.name): one for slot, one in enumerate(inputs)}
    return Node(name, elements, seconds, ratio, parallelism, places)


def limits(root, threads=8, batch_size=1, **shares):
    return find_limits(root, lambda one: shares.get(one.name, {one.name: 1.0}), batch_size=batch_size, threads=threads)


ONE = node("One", 10, 1.0, parallelism=2)
IN_TURN = node("Batch", 10, 1.0, node("Shuffle", 10, 2.0))
PREFETCHED = node("Batch", 10, 1.0, node("Prefetch", 10, 0.0, node("Shuffle", 10, 2.0)))
RECORDS = node("ParallelInterleaveV4", 10, 0, node("Range", 1, 0), node("Records", 10, 1.0), ratio=None, parallelism=4)


@pytest.mark.parametrize(
    ("root", "threads", "rate", "without"),
    [
        # As many calls as the parallelism.
        (node("Map", 10, 1.0, node("Range", 10, 0.1), parallelism=4), 8, 40, {"Map": 100}),
        # Nodes in one thread wait for each other; a prefetch starts another.
        (IN_TURN, 8, 10 / 3, {"Shuffle": 10}),
        (PREFETCHED, 8, 5, {"Shuffle": 10}),
        # All stages share the pool.
        (node("Two", 10, 1.0, ONE, parallelism=2), 2, 10, {"One": 20, "Two": 20}),
        # Nested datasets run side by side.
        (RECORDS, 8, 40, {}),
    ],
)
def test_the_rate_is_what_the_shared_resources_admit(root, threads, rate, without):
    found = limits(root, threads)
    assert found.rate() == pytest.approx(rate)
    assert {name: found.rate(name) for name in without} == pytest.approx(without)


def test_busy_is_the_share_of_its_own_calls():
    assert limits(node("Map", 10, 1.0, parallelism=4)).busy_percent("Map", 20) == pytest.approx(50)


@pytest.mark.parametrize(
    ("root", "batch_size", "seconds"),
    [
        (node("Batch", 10, 0.0, node("Map", 80, 4.0, parallelism=1), ratio=8), 8, 0.05),
        # What a filter drops costs those that pass.
        (node("Filter", 10, 0.0, node("Map", 40, 4.0, parallelism=1), ratio=None), 1, 0.4),
    ],
)
def test_costs_are_by_the_example(root, batch_size, seconds):
    assert limits(root, batch_size=batch_size).pool.seconds["Map"] == pytest.approx(seconds)


def test_a_fused_node_is_shared_out():
    found = limits(node("MapAndBatch", 10, 1.0, parallelism=1), MapAndBatch={"map": 0.75, "batch": 0.25})
    assert dict(found.pool.seconds) == pytest.approx({"map": 0.075, "batch": 0.025})
    assert found.rate("map") == pytest.approx(40)


def test_time_that_was_not_seen_goes_to_calls():
    found = limits(node("Batch", 10, 0.0, node("Map", 90, 0.0, parallelism=1), ratio=9), batch_size=9, threads=2)
    found.account_for(0.02, 50)
    # Nine calls, and one handing over a batch.
    assert found.pool.seconds["Map"] == pytest.approx(0.018)
    assert found.rate() == pytest.approx(100)
    assert found.rate("Map") == pytest.approx(1000)


def test_time_that_was_seen_is_left_as_it_is():
    found = limits(node("Map", 10, 1.0, parallelism=1), threads=2)
    found.account_for(0.2, 9)  # as fast as the work seen allows
    found.account_for(0.05, 1)  # slow, but not for lack of processor time
    assert found.pool.seconds["Map"] == pytest.approx(0.1)
