"""What several processes read of one source: each example once an epoch, in equal steps, and in one order if asked."""

import itertools

import numpy as np
import pytest
import tensorflow as tf
from part_sources import ALL, COUNT, FEATURES, NAMES, source, write_files
from quick import first_quick

from tfopt.errors import PipelineError, UnsupportedError
from tfopt.pipelines import per_batch, plan_pipeline, records
from tfopt.pipelines.sources import parts
from tfopt.pipelines.stages import batch_stages

BATCH = 12


@pytest.fixture(autouse=True)
def no_strategy(monkeypatch):
    """Leaves the datasets as they are before the strategy takes them."""
    monkeypatch.setattr(batch_stages, "distributed", lambda dataset, part: dataset)


@pytest.fixture
def plans(monkeypatch):
    """Returns the plans of so many processes, made one after the other in this one."""

    def planned(data, processes, **options):
        made = []
        for index in range(processes):
            monkeypatch.setattr(parts, "_place", lambda index=index: (index, processes))
            made.append(plan_pipeline(data, **{"batch_size": BATCH, **options}))
        return made

    return planned


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Returns the folder of their files."""
    return tmp_path_factory.mktemp("sources")


def read(made):
    """The batches of each dataset or plan."""
    datasets = [each.build() if hasattr(each, "build") else each for each in made]
    return [[batch.tolist() for batch in dataset.as_numpy_iterator()] for dataset in datasets]


RECORDS_FIRST = sorted(NAMES, key=lambda name: name != "records")
TABLE = [*itertools.product(NAMES, (2, 1, 3, 4), ("keep", "drop"), (None, 7))]


@pytest.mark.parametrize(("name", "processes", "remainder", "seed"), first_quick(TABLE, every=7))
def test_each_example_comes_to_one_process_once_an_epoch(sources, plans, name, processes, remainder, seed):
    made_of, transform = source(sources, name)
    made = plans(made_of, processes, transform=transform, remainder=remainder, seed=seed)
    built = [plan.build() for plan in made]
    orders = []
    for _ in range(2):
        seen = read(built)
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
        again = plans(made_of, processes, transform=transform, remainder=remainder, seed=seed)
        assert read(again) == orders[0]


@pytest.mark.parametrize(("processes", "name"), first_quick(itertools.product((2, 3, 4), RECORDS_FIRST), every=2))
def test_without_a_shuffle_the_processes_batches_in_turn_are_those_of_one(sources, plans, name, processes):
    made_of, transform = source(sources, name)
    (alone,), made = (plans(made_of, count, transform=transform, training=False) for count in (1, processes))
    (expected,) = read([alone])
    assert sorted(number for batch in expected for number in batch) == ALL
    assert {plan.to_dict()["steps_per_epoch"] for plan in made} == {len(expected)}
    together = itertools.zip_longest(*read(made), fillvalue=[])
    assert [[*itertools.chain(*batches)] for batches in together] == expected


@pytest.mark.slow
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_cache_on_disk_holds_the_part_of_one_process_only(plans, tmp_path, shuffle):
    # Such a source has no fingerprint, so the key given stands for the data.
    options = {"shuffle": shuffle, "remainder": "keep", "cache": str(tmp_path), "cache_key": "numbers"}
    made = plans(tf.data.Dataset.range(COUNT), 2, **options)
    for _ in range(2):
        assert sorted(number for batches in read(made) for batch in batches for number in batch) == ALL


def test_processes_draw_different_augmentations_under_one_seed(plans):
    def drawn(number, seed):
        return number, tf.random.stateless_uniform((), seed)

    made = plans(tf.data.Dataset.range(48), 2, augment=drawn, seed=3)
    draws = [{float(draw) for _, batch in plan.build() for draw in batch} for plan in made]
    assert [len(each) for each in draws] == [24, 24]
    assert not draws[0] & draws[1]


@pytest.mark.parametrize(
    ("data", "options", "found"),
    [
        (tf.data.Dataset.range(COUNT).shuffle(COUNT), {}, "same order in each of several processes"),
        (tf.data.Dataset.range(COUNT).filter(lambda number: number > 3), {}, "assert_cardinality"),
        (tf.data.Dataset.range(COUNT).repeat(), {}, "unknown or endless"),
        (np.arange(COUNT), {"remainder": "pad"}, "Found: 'pad'"),
        (np.arange(COUNT), {"batch_size": 200, "remainder": "drop"}, "zero steps"),
    ],
)
def test_what_would_lose_or_repeat_examples_is_refused(plans, data, options, found):
    with pytest.raises((UnsupportedError, PipelineError, ValueError), match=found):
        plans(data, 2, **options)


@pytest.mark.parametrize("count", [48, 46])  # static, and with a smaller last batch
def test_a_function_that_adds_examples_to_the_batches_of_several_replicas_is_refused(plans, count):
    def twice(numbers):
        return tf.concat([numbers, -numbers], 0)

    part = parts.Part(**dict.fromkeys(parts.Part.__dataclass_fields__) | {"size": 6, "replica_size": 3})
    plain, added = (plans(np.arange(count), 2, augment=augment)[0] for augment in (None, per_batch(twice)))
    assert {len(batch) for batch in parts.replica_batches(plain.build(), part)} <= {3, 2, 1}
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match=r"no more than the 6 examples.*Found 12"):
        list(parts.replica_batches(added.build(), part))


def test_a_batch_that_only_one_process_could_fill_is_left_out_by_all(plans):
    made = plans(np.arange(107), 2, remainder="drop")  # 54 and 53 examples, 6 of each batch
    assert [[len(batch) for batch in batches] for batches in read(made)] == [[6] * 8] * 2
    assert [plan.to_dict()["steps_per_epoch"] for plan in made] == [8, 8]


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        ("arrays", {"remainder": "keep"}, [[[0]], [[1]], []]),
        ("records", {"remainder": "keep"}, [[[0]], [[1]], []]),
        ("arrays", {"training": False}, [[[0, 1]], [], []]),
    ],
)
def test_fewer_examples_than_processes_still_come_once(plans, tmp_path, kind, options, expected):
    write_files(tmp_path, (1, 1))
    data = np.arange(2) if kind == "arrays" else records(f"{tmp_path}/*", features=FEATURES)
    transform = None if kind == "arrays" else lambda parsed: parsed["number"]
    made = plans(data, 3, transform=transform, **options)
    assert read(made) == expected
    assert {plan.to_dict()["steps_per_epoch"] for plan in made} == {1}
