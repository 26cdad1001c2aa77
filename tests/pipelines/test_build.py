import time

import numpy as np
import pytest
import tensorflow as tf
from iterations import noting
from quick import first_quick

from tfopt.pipelines import Source, build_pipeline, plan_pipeline
from tfopt.pipelines.shared.nondeterminism import lineage

ROWS = np.arange(50, dtype=np.int64)


def double(row):
    return row * 2


def negate(row):
    return -row


def stages(dataset):
    """The kinds of a dataset and of all that it reads from, the last stage first."""
    return [type(stage).__name__ for stage in lineage(dataset)]


def rows(dataset):
    return [int(row) for batch in dataset for row in batch]


def from_keys(count):
    return Source(name="keys", dataset=lambda: tf.data.Dataset.range(count), decode=lambda key: key)


@pytest.mark.parametrize("make", first_quick([np.arange, from_keys]))
@pytest.mark.parametrize(
    "options", first_quick([{"transform": double}, {}, {"transform": double, "cache": None}, {"augment": negate}], 2)
)
@pytest.mark.parametrize(
    ("remainder", "batch_size", "steps", "full"),
    [("drop", 8, 6, True), ("keep", 8, 7, False), ("keep", 10, 5, True)],
)
def test_cardinality_and_shapes_are_known(make, options, remainder, batch_size, steps, full):
    for shuffle in (True, False):
        dataset = build_pipeline(make(50), batch_size=batch_size, shuffle=shuffle, remainder=remainder, **options)
        assert int(dataset.cardinality()) == len(list(dataset)) == steps
        assert dataset.element_spec.shape.as_list() == [batch_size if full else None]


def test_an_epoch_that_drops_its_remainder_has_no_element_twice():
    dataset = build_pipeline(ROWS, batch_size=8)
    epochs = [rows(dataset) for _ in range(4)]
    assert all(len(set(epoch)) == len(epoch) == 48 for epoch in epochs)
    assert len({frozenset(epoch) for epoch in epochs}) > 1, "the same ones are left out in every epoch"


def test_gathered_batches_are_those_of_the_ordinary_way():
    data = {"x": np.arange(200).reshape(50, 4), "y": (ROWS, ROWS.astype("float32"))}
    plan = plan_pipeline(data, batch_size=8, seed=3)
    assert plan.stage("decode").setting == "whole batches"
    ordinary = plan_pipeline(data, batch_size=8, seed=3, augment=lambda example, *, seed: example)
    assert ordinary.stage("decode").setting == "8 at once"
    for _ in range(2):
        for gathered, mapped in zip(plan.build(), ordinary.build(), strict=True):
            tf.nest.map_structure(np.testing.assert_array_equal, gathered, mapped)


@pytest.mark.parametrize("prefetch", ["auto", 0])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("remainder", "batch_size"), [("drop", 8), ("keep", 8), ("keep", 10)])
def test_a_cached_transform_runs_once_even_where_the_end_is_never_asked_for(prefetch, shuffle, remainder, batch_size):
    calls = []
    dataset = build_pipeline(
        ROWS,
        batch_size=batch_size,
        transform=noting(calls),
        cache="memory",
        shuffle=shuffle,
        remainder=remainder,
        prefetch=prefetch,
    )
    calls.clear()  # of the sample
    for _ in range(3):
        iterator = iter(dataset)
        for _ in range(len(dataset)):  # as fit does where the number of steps is known
            next(iterator)
        ended = time.monotonic() + 10
        while len(calls) < (50 if shuffle else 48) and time.monotonic() < ended:  # in the time of fit's last step
            time.sleep(0.01)
        time.sleep(0.1)
    assert len(calls) == len(set(calls)) >= 48


def test_without_a_cache_the_transform_runs_in_every_epoch():
    calls = []
    dataset = build_pipeline(ROWS, batch_size=10, transform=noting(calls), cache=None, training=False)
    calls.clear()
    assert rows(dataset) == rows(dataset) == list(range(50))
    assert sorted(calls) == sorted([*range(50), *range(50)])


def test_the_augment_runs_behind_the_cache():
    dataset = build_pipeline(
        ROWS, batch_size=50, cache="memory", augment=lambda row: tf.random.uniform(()), remainder="keep"
    )
    first, second = (next(iter(dataset)).numpy() for _ in range(2))
    assert len(set(first)) > 40
    assert not np.array_equal(first, second)


@pytest.mark.parametrize("options", [{}, {"seed": 1}, {"training": False}, {"shuffle": False}])
def test_parallel_stages_keep_the_order(options):
    before = tf.data.Options()
    assert build_pipeline(ROWS, batch_size=8, **options).options().deterministic is True
    assert tf.data.Options() == before


def test_work_is_parallel():
    source = from_keys(50)
    kinds = stages(plan_pipeline(source, batch_size=8, transform=double, augment=negate).first_epoch())
    assert kinds.count("_ParallelMapDataset") == 2
    assert kinds.count("_MapDataset") == 1, "the seed of the cache's order"


@pytest.mark.parametrize("seed", [None, 1])
def test_whole_batches_are_gathered_in_parallel(seed):
    kinds = stages(plan_pipeline(ROWS, batch_size=8, seed=seed).first_epoch())
    assert "_ParallelMapDataset" in kinds
    assert not {"_MapDataset", "_BatchDataset"}.intersection(kinds), "a step for each row"


@pytest.mark.parametrize("options", [{}, {"training": False}, {"augment": lambda row, seed: row}])
def test_no_epoch_of_arrays_is_set_up_again(options):
    """In a function of TensorFlow's, which it would optimise for each iterator."""
    assert "_FlatMapDataset" not in stages(plan_pipeline(ROWS, batch_size=8, **options).build())


@pytest.mark.parametrize(("prefetch", "size"), [("auto", tf.data.AUTOTUNE), (3, 3), (0, None)])
def test_batches_are_prefetched_last(prefetch, size):
    built = build_pipeline(ROWS, batch_size=8, prefetch=prefetch, device=None)
    found = [stage for stage in lineage(built) if type(stage).__name__ == "_PrefetchDataset"]
    assert [int(stage._buffer_size) for stage in found] == ([] if size is None else [size])
    if found:
        assert stages(built)[:2] == ["_OptionsDataset", "_PrefetchDataset"]


@pytest.mark.filterwarnings("ignore:To make it possible to preserve tf.data options")  # TensorFlow's, in graphs
@pytest.mark.parametrize("seed", [None, 1])
def test_options_of_the_given_dataset_are_kept(seed):
    asked = tf.data.Options()
    asked.threading.private_threadpool_size = 3
    given = tf.data.Dataset.range(50).with_options(asked)
    built = build_pipeline(given, batch_size=8, seed=seed)
    assert built.options().threading.private_threadpool_size == 3
    with tf.Graph().as_default():  # as inside a tf.function, where TensorFlow reads them from its Python objects
        assert built.options().threading.private_threadpool_size == 3


@pytest.mark.parametrize("options", [{"cache": "memory"}, {"augment": lambda row: row + 1}])
def test_only_batches_are_counted(options):
    """To say how many elements a dataset has takes as long for each of them as a cheap function does."""
    dataset = build_pipeline(np.arange(64.0), batch_size=4, transform=lambda row: 2 * row, device=None, **options)
    (batch,) = (stage for stage in lineage(dataset) if type(stage).__name__ == "_BatchDataset")
    (examples,) = batch._inputs()
    assert len(dataset) == 16
    assert int(examples.cardinality()) == tf.data.UNKNOWN_CARDINALITY
