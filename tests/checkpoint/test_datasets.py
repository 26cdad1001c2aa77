import keras
import numpy as np

from tfopt.checkpoint.datasets import few_of, iterations_before, seeds_of
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


def test_loaders_of_folders_draw_a_seed_in_each_process(tmp_path):
    """Each call stands for a process."""
    for name in ("a/1.txt", "a/2.txt", "b/1.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    loaders = [
        keras.utils.text_dataset_from_directory(tmp_path, verbose=False, seed=seed) for seed in (None, None, 3, 3)
    ]
    drawn, other, given, same = map(seeds_of, loaders)
    assert drawn != other
    assert given == same != [[0, 0]]
