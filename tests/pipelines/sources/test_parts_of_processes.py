"""What several processes read of one source: each example once an epoch, in equal steps, and in one order if asked."""

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
from quick import first_quick

from tfopt.errors import PipelineError, UnsupportedError
from tfopt.pipelines import arrays, hdf5, images, npy, plan_pipeline, records
from tfopt.pipelines.sources import parts
from tfopt.pipelines.stages import batch_stages

COUNT, BATCH = 103, 12
ALL = list(range(COUNT))
FEATURES = {"number": tf.io.FixedLenFeature((), tf.int64)}


@pytest.fixture(autouse=True)
def no_strategy(monkeypatch):
    """Leaves the datasets as they are before the strategy takes them."""
    monkeypatch.setattr(batch_stages, "distributed", lambda dataset, part: dataset)


@pytest.fixture
def plans(monkeypatch):
    """Returns the plans of so many processes, made one after the other in this one."""

    def planned(source, processes, **options):
        made = []
        for index in range(processes):
            monkeypatch.setattr(parts, "_place", lambda index=index: (index, processes))
            made.append(plan_pipeline(source(), **{"batch_size": BATCH, **options}))
        return made

    return planned


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Makes the examples 0 to 102 by kind of source, as (function that makes it, transform to the number)."""
    folder = tmp_path_factory.mktemp("sources")
    np.save(folder / "rows.npy", np.arange(COUNT))
    with h5py.File(folder / "rows.h5", "w") as file:
        file["rows"] = np.arange(COUNT)
    (folder / "images").mkdir()
    for number in ALL:
        keras.utils.save_img(folder / "images" / f"{number:03}.png", np.full((2, 2, 3), number), scale=False)
    numbers = iter(ALL)
    for name, size in (("a", 7), ("b", 60), ("c", 36)):  # of unlike sizes
        with tf.io.TFRecordWriter(str(folder / f"{name}.tfrecord")) as writer:
            for _ in range(size):
                value = tf.train.Feature(int64_list=tf.train.Int64List(value=[next(numbers)]))
                features = tf.train.Features(feature={"number": value})
                writer.write(tf.train.Example(features=features).SerializeToString())
    with tf.io.TFRecordWriter(str(folder / "whole.gz"), "GZIP") as writer:
        for each in tf.data.TFRecordDataset([str(folder / f"{name}.tfrecord") for name in "abc"]):
            writer.write(each.numpy())

    def generated():
        made = tf.data.Dataset.from_generator(lambda: iter(ALL), output_signature=tf.TensorSpec((), tf.int64))
        return made.apply(tf.data.experimental.assert_cardinality(COUNT))

    paths = [str(folder / "images" / f"{number:03}.png") for number in ALL]
    whole = tf.data.TFRecordDataset(str(folder / "whole.gz"), "GZIP")
    return {
        "arrays": (lambda: arrays(np.arange(COUNT)), None),
        "npy": (lambda: npy(folder / "rows.npy"), None),
        "images": (lambda: images((paths, ALL)), lambda image, label: label),
        "records": (lambda: records(str(folder / "*.tfrecord"), features=FEATURES), lambda parsed: parsed["number"]),
        "hdf5": (lambda: hdf5(folder / "rows.h5", "rows"), None),
        "generator": (generated, None),
        "tf.data": (lambda: tf.data.Dataset.range(COUNT), None),
        "compressed": (
            lambda: whole.apply(tf.data.experimental.assert_cardinality(COUNT)),
            lambda record: tf.io.parse_single_example(record, FEATURES)["number"],
        ),
    }


TABLE = [
    (name, processes, remainder, seed)
    for name in ("arrays", "records", "images", "npy", "hdf5", "generator", "tf.data", "compressed")
    for processes in (2, 1, 3, 4)
    for remainder, seed in (("keep", None), ("drop", 7))
]


@pytest.mark.parametrize(("name", "processes", "remainder", "seed"), first_quick(TABLE))
def test_each_example_comes_to_one_process_once_an_epoch(sources, plans, name, processes, remainder, seed):
    source, transform = sources[name]
    made = plans(source, processes, transform=transform, remainder=remainder, seed=seed)
    built = [plan.build() for plan in made]
    orders = []
    for _ in range(2):
        seen = [[batch.tolist() for batch in dataset.as_numpy_iterator()] for dataset in built]
        steps = {len(batches) for batches in seen}
        found = sorted(number for batches in seen for batch in batches for number in batch)
        if remainder == "drop":
            assert steps == {COUNT // BATCH}
            assert len(found) == COUNT // BATCH * BATCH == len(set(found))
        else:
            assert found == ALL
            assert max(steps) == -(-COUNT // BATCH)
        assert {plan.to_dict()["steps_per_epoch"] for plan in made} == {max(steps)}
        assert all(len(batch) <= BATCH // processes for batches in seen for batch in batches)
        orders.append(seen)
    assert orders[0] != orders[1]
    if seed is not None:
        again = plans(source, processes, transform=transform, remainder=remainder, seed=seed)
        assert [[batch.tolist() for batch in plan.build().as_numpy_iterator()] for plan in again] == orders[0]


@pytest.mark.parametrize("name", first_quick(["records", "arrays", "images", "npy", "hdf5", "generator", "tf.data"]))
@pytest.mark.parametrize("processes", first_quick([2, 3, 4]))
def test_without_a_shuffle_the_processes_batches_in_turn_are_those_of_one(sources, plans, name, processes):
    source, transform = sources[name]
    made = plans(source, processes, transform=transform, training=False)
    steps = made[0].to_dict()["steps_per_epoch"]
    batches = [list(plan.build().as_numpy_iterator()) for plan in made]
    expected = [ALL[first : first + BATCH] for first in range(0, COUNT, BATCH)]
    assert steps == len(expected)
    for step, numbers in enumerate(expected):
        assert [number for each in batches if step < len(each) for number in each[step]] == numbers


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_cache_on_disk_holds_the_part_of_one_process_only(plans, tmp_path, shuffle):
    # Such a source has no fingerprint, so the key given stands for the data.
    made = plans(
        lambda: tf.data.Dataset.range(COUNT),
        2,
        shuffle=shuffle,
        remainder="keep",
        cache=str(tmp_path),
        cache_key="numbers",
    )
    for _ in range(2):
        seen = [number for plan in made for batch in plan.build().as_numpy_iterator() for number in batch.tolist()]
        assert sorted(seen) == ALL


def test_processes_draw_different_augmentations_under_one_seed(plans):
    def drawn(number, seed):
        return number, tf.random.stateless_uniform((), seed)

    made = plans(lambda: tf.data.Dataset.range(48), 2, augment=drawn, seed=3)
    draws = [{float(draw) for _, batch in plan.build() for draw in batch} for plan in made]
    assert [len(each) for each in draws] == [24, 24]
    assert not draws[0] & draws[1]


@pytest.mark.parametrize(
    ("source", "options", "found"),
    [
        (lambda: tf.data.Dataset.range(COUNT).shuffle(COUNT), {}, "same order in each of several processes"),
        (lambda: tf.data.Dataset.range(COUNT).filter(lambda number: number > 3), {}, "assert_cardinality"),
        (lambda: tf.data.Dataset.range(COUNT).repeat(), {}, "unknown or endless"),
        (lambda: np.arange(COUNT), {"remainder": "pad"}, "Found: 'pad'"),
        (lambda: np.arange(COUNT), {"batch_size": 200, "remainder": "drop"}, "zero steps"),
    ],
)
def test_what_would_lose_or_repeat_examples_is_refused(plans, source, options, found):
    with pytest.raises((UnsupportedError, PipelineError, ValueError), match=found):
        plans(source, 2, **options)


def test_a_batch_that_only_one_process_could_fill_is_left_out_by_all(plans):
    made = plans(lambda: np.arange(107), 2, remainder="drop")  # 54 and 53 examples, 6 of each batch
    seen = [[batch.tolist() for batch in plan.build().as_numpy_iterator()] for plan in made]
    assert [[len(batch) for batch in batches] for batches in seen] == [[6] * 8] * 2
    assert [plan.to_dict()["steps_per_epoch"] for plan in made] == [8, 8]


def test_fewer_examples_than_processes_still_come_once(plans):
    made = plans(lambda: np.arange(3), 4, training=False)
    seen = [[batch.tolist() for batch in plan.build().as_numpy_iterator()] for plan in made]
    assert seen == [[[0, 1, 2]], [], [], []]
    assert {plan.to_dict()["steps_per_epoch"] for plan in made} == {1}
