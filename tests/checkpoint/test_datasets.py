import numpy as np

from tfopt.checkpoint.datasets import few_of, iterations_before
from tfopt.pipelines import plan_pipeline


def rare(number):
    """One for few of the numbers, so that the first batches of several orders are often alike."""
    return number // 36


def test_orders_whose_first_batches_are_alike_are_told_apart():
    plan = plan_pipeline(np.arange(40), transform=rare, batch_size=4, seed=4, cache=None)
    found = few_of(plan.at(2, opened=2).build())
    alike = few_of(plan.at(1, opened=1).build())
    assert np.array_equal(found[0], alike[0])
    assert iterations_before(plan, 1, 1, found, few_of) == (2, 2)
