import numpy as np
import pytest
import tensorflow as tf

from tfopt.errors import PipelineError, UnsupportedError
from tfopt.pipelines import build_pipeline, loader, plan_pipeline

grain = pytest.importorskip("grain", reason="grain is not installed")


def example(number):
    return {"x": np.full(3, number, "float32")}, np.float32(number)


def numbers(batch=4):
    examples = grain.MapDataset.source(np.arange(10)).seed(3).shuffle().map(example)
    return examples.batch(batch) if batch else examples


def data_loader(workers=0):
    sampler = grain.samplers.IndexSampler(10, shuffle=True, seed=5, num_epochs=1)
    operations = [grain.transforms.Batch(4, drop_remainder=True)]
    return grain.DataLoader(data_source=np.arange(10), sampler=sampler, operations=operations, worker_count=workers)


@pytest.mark.parametrize("make", [numbers, lambda: numbers().to_iter_dataset()])
def test_batches_are_those_of_the_dataset(make):
    plan = plan_pipeline(make())
    dataset = plan.build()
    truth = list(make())
    for _ in range(2):
        found = list(dataset.as_numpy_iterator())
        assert len(found) == len(truth) == 3
        for one, other in zip(found, truth, strict=True):
            tf.nest.map_structure(np.testing.assert_array_equal, one, other)
    assert plan.stage("read").count == (3 if make is numbers else None)
    with pytest.raises(UnsupportedError, match=r"Grain \w+Dataset, which decides"):
        plan.at(1)


def test_a_data_loader_is_read():
    dataset = build_pipeline(data_loader())
    for _ in range(2):
        np.testing.assert_array_equal(np.stack(list(dataset)), np.stack(list(data_loader())))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_worker_processes_end_with_their_epoch():
    import multiprocessing

    iterator = iter(build_pipeline(data_loader(workers=1)))
    np.testing.assert_array_equal(next(iterator), next(iter(data_loader())))
    del iterator
    assert not multiprocessing.active_children()


def test_one_that_repeats_is_endless():
    dataset = build_pipeline(numbers().repeat())
    assert int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY
    assert len(list(dataset.take(7))) == 7


def test_single_examples_are_batched_by_the_pipeline():
    with pytest.raises(PipelineError, match=r"batch 0\[1\].*batched=False"):
        build_pipeline(numbers(batch=None))
    dataset = build_pipeline(loader(numbers(batch=None), batched=False), batch_size=4, shuffle=False)
    for (_, labels), (_, truth) in zip(dataset, numbers(), strict=True):
        np.testing.assert_array_equal(labels, truth)
