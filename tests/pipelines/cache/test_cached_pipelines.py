"""Pipelines with a cache on disk: which cache they use, and that they serve what they would without one."""

import itertools
import logging
import os

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfopt.pipelines import CentralCrop, RandomCrop, Source, build_pipeline, mix, plan_pipeline
from tfopt.pipelines.sources import parts

ROWS = np.arange(60, dtype=np.int64)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "caches"


@pytest.fixture
def one_by_one(monkeypatch):
    """Each batch is written by itself, however quick its examples are."""
    monkeypatch.setattr("tfopt.pipelines.stages.example_stages._AT_ONCE_SECONDS", 0.0)


def key(source, folder, **options):
    return plan_pipeline(source, cache=folder, **({"batch_size": 4} | options)).to_dict()["cache_key"]


def epochs(dataset, number=3):
    return [[int(row) for batch in dataset for row in batch] for _ in range(number)]


def add(number):
    return lambda row: row + number


@pytest.mark.slow
def test_the_source_is_read_once(folder):
    calls = itertools.count()

    def counted(row):
        next(calls)
        return row + 1

    def transform(row):
        return tf.ensure_shape(tf.numpy_function(counted, [row], tf.int64), ())

    options = {"batch_size": 10, "training": False, "transform": transform, "cache": folder, "cache_key": "1"}
    for expected in (60, 0):
        dataset = build_pipeline(ROWS, **options)
        before = next(calls)
        assert epochs(dataset) == [list(range(1, 61))] * 3
        assert next(calls) - before - 1 == expected


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.0, 1000.0])
def test_whatever_is_written_together_another_run_reads(folder, monkeypatch, seconds):
    monkeypatch.setattr("tfopt.pipelines.stages.example_stages._AT_ONCE_SECONDS", seconds)
    once = build_pipeline(ROWS, batch_size=10, training=False, transform=add(1), cache=folder)
    assert epochs(once) == [list(range(1, 61))] * 3
    again = build_pipeline(ROWS, batch_size=7, training=False, transform=add(1), cache=folder)
    assert epochs(again, 1) == [list(range(1, 61))]
    assert len(list(folder.iterdir())) == 1


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"seed": 5}, {"training": False}])
@pytest.mark.parametrize("by_position", [True, False])
def test_epochs_that_are_left_early_fill_the_cache_together(folder, by_position, options):
    """Those of `fit(steps_per_epoch=…)`, of which each reads other examples if the data are shuffled."""
    source = ROWS if by_position else tf.data.Dataset.range(60)
    plan = plan_pipeline(source, batch_size=10, transform=add(1), cache=folder, cache_key="a", **options)
    dataset, written = plan.build(), folder / plan.to_dict()["cache_key"]
    lengths = []
    while not written.is_dir() and len(lengths) < (40 if options.get("training", True) else 2):
        lengths.append(sum(1 for _ in dataset.take(4)))
    assert written.is_dir() or not options.get("training", True)
    assert sorted(epochs(dataset, 1)[0]) == list(range(1, 61))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"crop": None}, {"training": False}, {"batch_size": 7, "remainder": "keep"}])
def test_the_order_under_a_seed_is_that_without_a_cache(folder, options):
    """Rows that are read by position, in any case: when the cache is written, and when it is read."""

    def read(cache):
        return epochs(build_pipeline(ROWS, **({"batch_size": 10, "transform": add(1)} | options), cache=cache, seed=3))

    without = read(None)
    assert read(folder) == without
    assert read(folder) == without


def test_other_data_another_cache(folder):
    changed = ROWS.copy()
    changed[30] = 0
    assert key(ROWS, folder, transform=add(1)) == key(ROWS.copy(), folder, transform=add(1))
    assert key(changed, folder, transform=add(1)) != key(ROWS, folder, transform=add(1))


@pytest.mark.slow
def test_a_source_that_changed_between_runs(folder, photos, picture):
    def shades():
        dataset = build_pipeline(photos, batch_size=3, training=False, cache=folder)
        return [sorted({int(image[1, 1, 0]) for batch, _ in dataset for image in batch}) for _ in range(2)]

    assert shades() == [list(range(12))] * 2
    picture(photos / "a" / "03.png", shade=99)
    os.utime(photos / "a" / "03.png", (10**9, 10**9))  # within the clock's resolution, else
    assert shades() == [[*range(3), *range(4, 12), 99]] * 2
    picture(photos / "a" / "new.png", shade=77)
    assert shades()[1] == [*range(3), *range(4, 12), 77, 99]


@pytest.mark.slow
def test_what_the_content_depends_on_is_in_the_key(folder, photos):
    keys = [
        key(photos, folder),
        key(photos, folder, crop=CentralCrop(4)),
        key(photos, folder, crop=CentralCrop(3)),
        key(photos, folder, crop=CentralCrop(3, fraction=1.0)),
        key(photos, folder, transform=lambda image, label: (image, label + 1)),
        *(key(tf.data.Dataset.range(12), folder, cache_key="a", seed=seed) for seed in (1, 2)),  # its order is mixed
        key(tf.data.Dataset.range(12), folder, cache_key="a", training=False),
        key(photos, folder, cache_key="mine"),
        key(photos, folder, shuffle=False, batch_size=5, remainder="drop"),
    ]
    assert len(set(keys)) == len(keys)


@pytest.mark.slow
def test_what_it_does_not_depend_on_is_not(folder, photos):
    plain = key(photos, folder)
    assert key(photos, folder, crop=RandomCrop(4)) == plain  # behind the cache
    assert key(photos, folder, batch_size=2, prefetch=2, augment=lambda image, label: (image, label)) == plain
    assert key(str(photos), folder, remainder="keep") == plain
    assert {key(photos, folder, seed=1), key(photos, folder, training=False)} == {plain}  # read by position


def test_a_source_without_a_fingerprint_wants_a_cache_key(folder):
    with pytest.raises(ValueError, match=r"source.*cache_key="):
        key(tf.data.Dataset.range(60), folder)
    first, second = (key(tf.data.Dataset.range(60), folder, cache_key=name) for name in "ab")
    assert first != second
    assert key(tf.data.Dataset.range(59), folder, cache_key="a") != first
    # What can be fingerprinted still is.
    assert len({key(ROWS, folder, cache_key="a"), key(ROWS + 1, folder, cache_key="a")}) == 2


def test_a_sources_own_functions_are_in_the_key_or_want_a_cache_key(folder):
    def source(decode, *found):
        rows = tf.data.Dataset.range(60)
        return Source(name="own", dataset=lambda: rows, decode=decode, fingerprint=lambda: [*found])

    assert key(source(add(1)), folder) == key(source(add(1)), folder) != key(source(add(2)), folder)
    assert key(source(add(1), 1), folder) != key(source(add(1), 2), folder)
    with pytest.raises(ValueError, match=r"'source'.*Found the function .*<lambda>, whose code.*cache_key="):
        key(source(add(1), add(1)), folder)
    assert key(source(add(1), add(1)), folder, cache_key="a")
    called = source(lambda row: tf.ensure_shape(tf.numpy_function(abs, [row], tf.int64), ()))
    with pytest.raises(ValueError, match=r"'decode' holds PyFunc.*cache_key="):
        key(called, folder)


def test_files_that_a_source_reads_are_in_its_fingerprint_and_those_of_a_transform_are_refused(folder, photos):
    assert key(photos, folder)
    paths = np.array([str(path) for path in sorted(photos.rglob("*.png"))])
    with pytest.raises(ValueError, match=r"'transform' holds ReadFile.*cache_key="):
        key(paths, folder, transform=lambda path: tf.strings.length(tf.io.read_file(path)))


@pytest.mark.slow
def test_auto_caches_on_disk_what_is_slow_to_compute_and_not_what_is_quick(free_memory, tmp_path, monkeypatch):
    """Decided by a probe of the sampled examples, which is removed."""
    free_memory(0.0)
    folder = tmp_path / "cache/tfopt/pipelines"
    rows = np.arange(3000, dtype=np.int64)

    def costly(row):
        square = tf.ones((200, 200)) * tf.cast(row, tf.float32)
        for _ in range(100):
            square = tf.linalg.matmul(square, square) / 200
        return tf.reduce_sum(square)

    for transform, on in ((costly, str(folder)), (add(1), None)):
        plan = plan_pipeline(rows, batch_size=8, transform=transform)
        assert plan.to_dict()["cache"] == on, plan
        assert not list(folder.iterdir())
    assert "hardly pay" in plan.stage("cache").reason

    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("tfopt.pipelines.cache.choice.read_index", stopped)  # between writing and reading it
    with pytest.raises(KeyboardInterrupt):
        plan_pipeline(rows, batch_size=8, transform=costly)
    assert not list(folder.iterdir())


@pytest.mark.slow
def test_auto_leaves_it_out_where_it_cannot_be_fingerprinted(free_memory, tmp_path):
    free_memory(0.0)
    layer = keras.layers.Dense(300)

    def costly(row):
        for _ in range(300):
            row = tf.linalg.matmul(row, row) / 64
        return row

    rows = np.ones((50, 64, 64), np.float32)
    assert plan_pipeline(rows, batch_size=4, transform=costly).to_dict()["cache"] == str(
        tmp_path / "cache/tfopt/pipelines"
    )
    plan = plan_pipeline(rows, batch_size=4, transform=lambda row: layer(costly(row)), cache_limit_gib=1)
    assert plan.to_dict()["cache"] is None
    assert plan.to_dict()["cache_key"] is None


def test_a_source_without_one_order_is_refused(folder):
    shuffled = tf.data.Dataset.range(60).shuffle(60)
    with pytest.raises(ValueError, match=r"source with one order.*Dataset.shuffle"):
        key(shuffled, folder, cache_key="a")


@pytest.mark.slow
def test_the_cache_mixes_what_lies_sorted(folder, monkeypatch):
    # Two of the examples behind the cache, where it is not read by position.
    monkeypatch.setattr("tfopt.pipelines.stages.order_stages.SHUFFLE_MIB", 0.0005)
    for source, buffer in ((ROWS, 60), (tf.data.Dataset.range(60), 2)):
        options = {"transform": lambda row: row + tf.zeros((32,), tf.int64), "cache": folder, "cache_key": "a"}
        wide = plan_pipeline(source, batch_size=10, **options)
        assert wide.to_dict()["shuffle_buffer"] == buffer
        for _ in range(2):
            batches = [sorted(batch[:, 0].numpy()) for batch in wide.build()]
            assert all(batch[-1] - batch[0] > 20 for batch in batches)


@pytest.mark.slow
def test_an_unknown_number_of_examples(folder):
    source = Source(name="some", dataset=lambda: tf.data.Dataset.range(60).filter(lambda i: i % 2 == 0))
    options = {"batch_size": 10, "training": False, "cache": folder, "cache_key": "even"}
    for _ in range(2):
        plan = plan_pipeline(source, **options)
        assert epochs(plan.build(), 2) == [list(range(0, 60, 2))] * 2
        assert (folder / plan.to_dict()["cache_key"]).is_dir()


def test_a_limit_that_is_exceeded_stops_the_writing_and_not_the_epoch(folder, caplog):
    source = Source(name="some", dataset=lambda: tf.data.Dataset.range(60).filter(lambda i: i >= 0))
    options = {"batch_size": 10, "training": False, "cache": folder, "cache_key": "some"}
    dataset = build_pipeline(source, **options, cache_limit_gib=100 / 2**30)
    with caplog.at_level(logging.WARNING, "tfopt"):
        assert epochs(dataset, 2) == [list(range(60))] * 2
    assert caplog.text.count("exceeds the limit of 100 bytes") == 1
    assert not list(folder.iterdir())


@pytest.mark.slow
def test_an_error_of_the_source_is_the_trainings_own(folder):
    def broken(row):
        with tf.control_dependencies([tf.debugging.Assert(row < 40, ["row of 40"])]):
            return row + 1

    plan = plan_pipeline(ROWS, batch_size=10, training=False, transform=broken, cache=folder)
    for _ in range(2):
        with pytest.raises(tf.errors.InvalidArgumentError, match="row of 40"):
            epochs(plan.build(), 1)
    assert not (folder / plan.to_dict()["cache_key"]).exists()


@pytest.mark.slow
def test_a_training_is_the_same_with_and_without_it(folder):
    x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    y = x.sum(axis=1)

    def weights(cache):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)])
        model.compile("adam", "mse")
        scaled = build_pipeline((x, y), batch_size=16, shuffle=False, transform=lambda x, y: (2 * x, y), cache=cache)
        model.fit(scaled, epochs=3, verbose=0, shuffle=False)
        return model.get_weights()

    expected = weights(None)
    for cache in (folder, folder, "memory"):  # written, then read
        for found, weight in zip(weights(cache), expected, strict=True):
            np.testing.assert_array_equal(found, weight)
    assert len(list(folder.iterdir())) == 1


@pytest.mark.slow
def test_what_changes_between_planning_and_building_is_another_cache(folder):
    factor = np.array([1])
    options = {"batch_size": 10, "training": False, "transform": lambda row: row * factor[0], "cache": folder}
    plan = plan_pipeline(ROWS, **options)
    factor[0] = 7
    assert epochs(plan.build(), 1) == [[7 * row for row in range(60)]]
    factor[0] = 1
    assert epochs(build_pipeline(ROWS, **options), 2) == [list(range(60))] * 2


@pytest.mark.slow
def test_files_of_one_name_in_two_places(tmp_path, folder, monkeypatch):
    for number, place in enumerate(("first", "second")):
        (tmp_path / place).mkdir()
        monkeypatch.chdir(tmp_path / place)
        np.save("rows.npy", np.full(60, number))
        os.utime("rows.npy", (1, 1))
        options = {"batch_size": 10, "training": False, "transform": add(1), "cache": folder}
        assert epochs(build_pipeline("rows.npy", **options), 2) == [[number + 1] * 60] * 2


@pytest.mark.slow
def test_data_sets_of_one_cache_key_are_told_apart_by_what_was_sampled(folder):
    for first in (0, 100):
        numbers = tf.data.Dataset.range(first, first + 60)
        dataset = build_pipeline(numbers, batch_size=10, training=False, cache=folder, cache_key="v1")
        assert epochs(dataset, 2) == [list(range(first, first + 60))] * 2


def test_the_code_of_the_crop_is_in_the_key(folder, photos, monkeypatch):
    before = key(photos, folder, crop=CentralCrop(4))
    assert key(photos, folder, crop=CentralCrop(4)) == before
    monkeypatch.setattr("tfopt.pipelines.shared.crop.resize", lambda image, crop: tf.zeros((*crop.size, 3), tf.uint8))
    assert key(photos, folder, crop=CentralCrop(4)) != before


@pytest.mark.parametrize(
    "parallel",
    [
        lambda rows: rows.map(lambda row: row, num_parallel_calls=2, deterministic=False),
        lambda rows: rows.interleave(
            lambda row: tf.data.Dataset.from_tensors(row), cycle_length=2, num_parallel_calls=2, deterministic=False
        ),
    ],
)
def test_a_source_that_does_not_keep_its_order_is_refused(folder, parallel):
    rows = tf.data.Dataset.range(60)
    with pytest.raises(ValueError, match=r"source with one order.*deterministic=False"):
        key(parallel(rows), folder, cache_key="a")
    options = tf.data.Options()
    options.deterministic = False
    with pytest.raises(ValueError, match=r"source with one order.*deterministic=False"):
        key(rows.with_options(options), folder, cache_key="a")
    in_order = rows.interleave(lambda row: tf.data.Dataset.from_tensors(row), cycle_length=2, num_parallel_calls=2)
    assert key(in_order, folder, cache_key="a")


@pytest.mark.slow
def test_looks_during_an_epoch_change_nothing(folder):
    """Each look is an iteration that is left: neither the one that reads nor the one that writes may suffer."""
    dataset = build_pipeline(ROWS, batch_size=10, training=False, transform=add(1), cache=folder, prefetch=1)
    for _ in range(2):
        found = []
        for batch in dataset:
            found += batch.numpy().tolist()
            next(iter(dataset))
        assert found == list(range(1, 61))
    assert len([path for path in folder.iterdir() if path.is_dir()]) == 1


@pytest.mark.slow
def test_a_pipeline_that_was_only_looked_at_keeps_no_other_from_writing(folder, caplog):
    options = {"batch_size": 10, "training": False, "transform": add(1), "cache": folder}
    looked_at = build_pipeline(ROWS, **options)
    left = iter(looked_at)
    next(left)
    plan = plan_pipeline(ROWS, **options)
    assert epochs(plan.build(), 1) == [list(range(1, 61))]
    assert (folder / plan.to_dict()["cache_key"]).is_dir()
    assert [row for batch in left for row in batch.numpy()] == list(range(11, 61))
    assert not caplog.records


def test_the_memory_stated_holds_what_is_mixed(folder):
    large = tf.data.Dataset.range(60).map(lambda row: row + tf.zeros((2**17,), tf.int64))
    mixed = plan_pipeline(large, batch_size=10, cache=folder, cache_key="a")
    assert mixed.to_dict()["memory_mib"] >= mixed.stage("memory").ahead_mib + 2 * 60  # before the cache and behind it


@pytest.mark.slow
def test_what_changes_while_the_cache_is_written_changes_nothing(folder, one_by_one):
    """What is written is what the functions were when the pipeline was built, and so is the key."""
    factor = [1]
    options = {"batch_size": 10, "training": False, "transform": lambda row: row * factor[0], "cache": folder}
    batches = iter(build_pipeline(ROWS, **options, prefetch=0))
    found = next(batches).numpy().tolist()
    factor[0] = 7
    assert found + [int(row) for batch in batches for row in batch] == ROWS.tolist()
    assert epochs(build_pipeline(ROWS, **options), 2) == [(7 * ROWS).tolist()] * 2
    factor[0] = 1
    plan = plan_pipeline(ROWS, **options)
    assert (folder / plan.to_dict()["cache_key"]).is_dir()
    assert epochs(plan.build(), 1) == [ROWS.tolist()]


@pytest.mark.slow
def test_files_that_change_while_the_cache_is_written_are_not_published(folder, photos, picture, caplog, one_by_one):
    dataset = build_pipeline(photos, batch_size=3, training=False, cache=folder, prefetch=0)
    batches = iter(dataset)
    next(batches)
    picture(photos / "a" / "03.png", shade=99)
    os.utime(photos / "a" / "03.png", (10**9, 10**9))
    assert len(list(batches)) == 3
    os.unlink(photos / "b" / "04.png")
    with pytest.raises(tf.errors.NotFoundError):
        epochs(dataset.map(lambda image, label: label), 1)
    assert caplog.text.count("have changed since the pipeline was built") == 1
    assert not list(folder.iterdir())


@pytest.mark.slow
def test_rows_of_a_writable_map_are_copied_when_the_source_is_made(folder, tmp_path):
    rows = np.memmap(tmp_path / "rows", np.int64, "w+", shape=(60,))
    rows[:] = ROWS
    options = {"batch_size": 10, "training": False, "transform": add(1), "cache": folder}
    dataset = build_pipeline(rows, **options)
    rows[:] = 5
    assert epochs(dataset, 2) == [list(range(1, 61))] * 2
    assert epochs(build_pipeline(rows, **options), 2) == [[6] * 60] * 2


def test_a_later_run_finds_the_cache_of_its_part(tmp_path, monkeypatch):
    def keys(processes):
        found = []
        for index in range(processes):
            monkeypatch.setattr(parts, "_place", lambda index=index: (index, processes))
            plan = plan_pipeline(np.arange(24), batch_size=6, transform=tf.negative, cache=tmp_path, seed=1)
            found.append(plan.to_dict()["cache_key"])
        return found

    first = keys(2)
    assert keys(2) == first
    assert len({*first, *keys(3)}) == 5


@pytest.mark.parametrize("by_position", [True, False])
def test_a_part_of_a_mixture_that_is_read_several_times(folder, by_position):
    few = ROWS[:7] if by_position else tf.data.Dataset.range(7)
    small = plan_pipeline(few, batch_size=5, transform=add(100), cache=folder, cache_key="a", seed=1)
    large = plan_pipeline(ROWS, batch_size=5, seed=1)
    dataset = mix([(small, 0.5), (large, 0.5)], stop="all", batch_size=5, seed=1, remainder="keep").build()
    for epoch in epochs(dataset):
        assert sorted(row for row in epoch if row < 100) == list(range(60))
        counts = np.bincount([row - 100 for row in epoch if row >= 100], minlength=7)
        assert counts.sum() in (59, 60)
        assert counts.max() - counts.min() <= 1  # each as often as the others
