"""The arithmetic of limits, on nodes with known figures."""

import pytest

from tfopt.pipelines.profiling.profile import find_limits
from tfopt.pipelines.profiling.sampled_run import Node


def node(name, elements, seconds, *inputs, ratio=1.0, parallelism=None):
    places = {(slot, one.name): one for slot, one in enumerate(inputs)}
    return Node(name, elements, seconds, ratio, parallelism, places)


def limits(root, threads=8, batch_size=1, **shares):
    return find_limits(root, lambda one: shares.get(one.name, {one.name: 1.0}), batch_size=batch_size, threads=threads)


def test_a_parallel_node_has_as_many_calls_as_its_parallelism():
    found = limits(node("Map", 10, 1.0, node("Range", 10, 0.1), parallelism=4))
    assert found.rate() == pytest.approx(40)
    assert found.rate("Map") == pytest.approx(100)
    assert found.busy_percent("Map", 20) == pytest.approx(50)


def test_nodes_in_one_thread_wait_for_each_other():
    chain = node("Batch", 10, 1.0, node("Shuffle", 10, 2.0))
    assert limits(chain).rate() == pytest.approx(10 / 3)
    assert limits(chain).rate("Shuffle") == pytest.approx(10)


def test_a_prefetch_starts_a_thread():
    found = limits(node("Batch", 10, 1.0, node("Prefetch", 10, 0.0, node("Shuffle", 10, 2.0))))
    assert found.rate() == pytest.approx(5)


def test_all_stages_share_the_pool():
    found = limits(node("Two", 10, 1.0, node("One", 10, 1.0, parallelism=2), parallelism=2), threads=2)
    assert found.rate() == pytest.approx(10)
    assert found.rate("One") == found.rate("Two") == pytest.approx(20)


def test_costs_are_told_by_the_example():
    batches = node("Batch", 10, 0.0, node("Map", 80, 4.0, parallelism=1), ratio=8)
    assert limits(batches, batch_size=8).pool.seconds["Map"] == pytest.approx(0.05)


def test_what_a_filter_drops_costs_those_that_pass():
    kept = node("Filter", 10, 0.0, node("Map", 40, 4.0, parallelism=1), ratio=None)
    assert limits(kept).pool.seconds["Map"] == pytest.approx(0.4)


def test_nested_datasets_run_side_by_side():
    inner = node("Records", 10, 1.0)
    found = limits(node("ParallelInterleaveV4", 10, 0.0, node("Range", 1, 0.0), inner, ratio=None, parallelism=4))
    assert found.rate() == pytest.approx(40)


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
