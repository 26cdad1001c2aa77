"""`PipelinePlan.at`: batches are those of the pipeline read from its start, bit for bit, whatever it is made of."""

import itertools

import numpy as np
import pytest
import tensorflow as tf
from iterations import contents, read_from, three_epochs
from part_sources import COUNT, NAMES, source
from quick import first_quick

from tfopt.internals.sources import find
from tfopt.pipelines import RandomCrop, per_batch, plan_pipeline
from tfopt.pipelines.stages import example_stages

BATCH = 10
POSITIONS = [(0, 3), (2, 4), (1, 1), (0, 0), (1, 0), (3, 11), (0, 11)]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Returns the folder of their files."""
    return tmp_path_factory.mktemp("sources")


def noisy(features, label, seed):
    return features + tf.random.stateless_uniform((3,), seed), label


def scaled(features, label, seed):
    return features * tf.random.stateless_uniform((), seed), label


def pair(number):
    return tf.fill((3,), tf.cast(number, tf.float32)), tf.cast(number, tf.int64)


AUGMENTED = {"augment": [noisy, per_batch(scaled)]}
OPTIONS = [
    {"remainder": "keep", **AUGMENTED},
    {"remainder": "drop", "augment": noisy, "prefetch": 0},
    {"remainder": "pad", "augment": per_batch(scaled)},
    {"shuffle": False, **AUGMENTED, "prefetch": 1},
    {"training": False, "seed": None, "remainder": "pad"},
    {"split": 0.1, "remainder": "keep", **AUGMENTED},
    {"device": "CPU:0", "remainder": "keep", **AUGMENTED},
]
CACHES = ["memory", None, "./cache", "auto"]
# Each source with each cache, and each two of cache, options and position.
TABLE = [
    (POSITIONS[(name + 2 * cache) % len(POSITIONS)], NAMES[name], CACHES[cache], (3 * name + cache) % len(OPTIONS))
    for cache, name in itertools.product(range(len(CACHES)), range(len(NAMES)))
]


@pytest.mark.slow
@pytest.mark.parametrize(("position", "name", "cache", "number"), TABLE)
def test_the_rest_of_the_epoch_and_two_more(sources, position, name, cache, number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made_of, to_number = source(sources, name)
    options = {"batch_size": BATCH, "seed": 3, "cache": cache, "cache_key": "numbers", **OPTIONS[number]}

    def transform(*raw):
        return pair(to_number(*raw) if to_number else raw[0])

    plan = plan_pipeline(made_of, transform=transform, **options)
    dataset = plan.build()
    steps = int(dataset.cardinality())
    epoch, batch = position[0], min(position[1], steps)
    expected = read_from(dataset, epoch, batch)
    assert [len(each) for each in expected] == [steps - batch, steps, steps]
    if options.get("shuffle", options.get("training", True)):
        assert expected[1] != expected[2]
    if cache == "./cache":  # one that is not written yet
        plan = plan_pipeline(made_of, transform=transform, **options | {"cache": "./another"})
    moved = plan.at(9).at(epoch, batch).build()
    assert moved.element_spec == dataset.element_spec
    assert int(moved.cardinality()) == steps
    assert three_epochs(moved) == expected


@pytest.mark.slow
@pytest.mark.parametrize("cache", first_quick([None, "memory", "auto"]))
@pytest.mark.parametrize("position", first_quick([((1, 2),), ((0, 1),)]))
def test_random_crops_are_those_of_their_places(photos, cache, position):
    options = {"batch_size": 3, "seed": 3, "crop": RandomCrop(4), "cache": cache, "transform": lambda x, y: (x + 1, y)}
    plan = plan_pipeline(photos, **options)
    epoch, batch = position
    expected = read_from(plan.build(), epoch, batch)
    assert expected[1] != expected[2]
    assert three_epochs(plan.at(epoch, batch).build()) == expected


def placed(features, label):
    """Adds a little that shows an example's place among those that are transformed at once."""
    return features + 1e-5 * tf.cast(tf.range(tf.shape(label)[0]), tf.float32)[:, tf.newaxis], label


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cache", "shuffle"), first_quick([(None, True), ("memory", False), (None, False), ("memory", True)])
)
def test_functions_of_many_examples_get_the_same_ones_at_once(monkeypatch, cache, shuffle):
    monkeypatch.setattr(example_stages, "_CHUNK_BYTES", 7 * 20)  # about seven examples, of batches of ten
    rows = np.random.default_rng(0).normal(size=(COUNT, 3)).astype("float32"), np.arange(COUNT)
    options = {"transform": per_batch(placed), "augment": noisy, "remainder": "keep", "seed": 3}
    plan = plan_pipeline(rows, batch_size=BATCH, cache=cache, shuffle=shuffle, **options)
    assert plan.stage("transform").setting == "5 at once", "which no position cuts"
    assert three_epochs(plan.at(1, 4).build()) == read_from(plan.build(), 1, 4)


@pytest.mark.parametrize("cache", [None, "memory"])
def test_a_strategy_finds_no_batch_size(cache):
    """Without one, TensorFlow divides a smaller last batch evenly among the replicas."""
    plan = plan_pipeline(np.arange(COUNT), batch_size=BATCH, cache=cache, remainder="keep", seed=3)
    compute_batch_size = getattr(*find("tensorflow.python.data.experimental.ops.distribute:compute_batch_size"))
    found = [int(compute_batch_size(each.build())) for each in (plan, plan.at(1, 2))]
    assert found == [-1] * 2


@pytest.mark.slow
def test_a_batch_larger_than_the_epoch():
    plan = plan_pipeline(np.arange(7), batch_size=10, seed=3)
    assert three_epochs(plan.at(2).build()) == read_from(plan.build(), 2, 0)
    assert three_epochs(plan.at(2, 1).build()) == read_from(plan.build(), 2, 1)


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_unknown_number_stays_unknown(shuffle):
    numbers = tf.data.Dataset.range(50).filter(lambda number: number > 6)
    plan = plan_pipeline(numbers, batch_size=5, seed=3, shuffle=shuffle)
    moved = plan.at(1, 3).build()
    assert int(moved.cardinality()) == tf.data.UNKNOWN_CARDINALITY
    assert three_epochs(moved) == read_from(plan.build(), 1, 3)
    assert contents(plan.at(1, 30).build()) == []


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_endless_source_goes_on_after_any_number_of_batches(shuffle):
    numbers = tf.data.Dataset.range(50).repeat()
    plan = plan_pipeline(numbers, batch_size=8, seed=3, shuffle=shuffle, augment=lambda x, seed: (x, seed))
    moved = plan.at(0, 40).build()
    assert int(moved.cardinality()) == tf.data.INFINITE_CARDINALITY
    assert contents(moved.take(9)) == contents(itertools.islice(plan.build(), 40, 49))


@pytest.mark.slow
def test_a_cache_on_disk_written_before_changes_nothing(tmp_path):
    options = {"batch_size": 5, "transform": lambda row: row + 0, "cache": str(tmp_path / "cache"), "seed": 3}
    plan = plan_pipeline(np.arange(COUNT), **options)
    unwritten = three_epochs(plan.at(0, 3).build())
    assert list((tmp_path / "cache").iterdir()), "the first iteration reads all, and so writes the cache"
    for moved in (plan, plan_pipeline(np.arange(COUNT), **options)):
        assert three_epochs(moved.at(0, 3).build()) == unwritten
    assert unwritten == read_from(plan.build(), 0, 3)
