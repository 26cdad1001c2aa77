"""The order in which records are read: in one permutation by their offsets, or in runs, and each once an epoch."""

import os

import numpy as np
import pytest
import tensorflow as tf
from unwrapped import unwrapped

from tfopt.pipelines import build_pipeline, plan_pipeline, profile_pipeline, records, write_records
from tfopt.pipelines.cache.folder import ROWS

COUNT, CLASSES = 4000, 1000


@pytest.fixture
def buffer_mib(monkeypatch):
    """Sets the room for a shuffle's buffer."""

    def set_mib(mib):
        for module in ("inspection.facts", "stages.order_stages"):
            monkeypatch.setattr(f"tfopt.pipelines.{module}.SHUFFLE_MIB", mib)

    return set_mib


@pytest.fixture
def by_class(tmp_path, monkeypatch, buffer_mib):
    """Writes rows that lie sorted by class, too many for the shuffle's buffer; returns the folder."""
    buffer_mib(0.01)

    def write(count=COUNT, of=CLASSES, least_bytes=1, **options):
        monkeypatch.setattr("tfopt.pipelines.sources.records._LARGE_BYTES", least_bytes)
        labels = np.sort(np.arange(count) % of)
        write_records((np.arange(count), labels), tmp_path / "rows", shards=3, shuffle_seed=None, **options)
        return tmp_path / "rows"

    return write


def epochs(dataset, number=2):
    """The rows of each epoch, in their order."""
    return [[int(row) for rows, _ in dataset for row in rows] for _ in range(number)]


def classes(dataset):
    """How many classes a batch holds on average; 256 independent draws would give 226 of 1,000."""
    return np.mean([len({*labels.numpy()}) for _, labels in dataset if len(labels) == 256])


@pytest.mark.slow
def test_a_batch_holds_as_many_classes_as_by_chance(by_class):
    plan = plan_pipeline(by_class(), batch_size=256, remainder="keep", cache=None)
    dataset = plan.build()
    assert 215 < classes(dataset) < 237
    first, second = epochs(dataset)
    assert sorted(first) == sorted(second) == list(range(COUNT))
    assert first != second
    assert len(dataset) == 16
    assert plan.stage("shuffle").setting == f"all {COUNT:,}"
    assert "one permutation of all examples, drawn at once (8 bytes each), and read by position" in unwrapped(plan)
    assert plan.to_dict()["memory_mib"] < plan.stage("memory").ahead_mib + 1


@pytest.mark.slow
def test_records_are_written_again_in_one_permutation(by_class, tmp_path, monkeypatch):
    monkeypatch.setattr("tfopt.pipelines.write._MIXED_BYTES", 1)  # no room for a buffer
    write_records(by_class(), tmp_path / "again", shards=2)
    again = build_pipeline(tmp_path / "again", batch_size=256, training=False)
    assert 215 < classes(again) < 237
    assert sorted(epochs(again, 1)[0]) == list(range(COUNT))


@pytest.mark.slow
def test_small_records_are_mixed_in_runs(by_class, buffer_mib, monkeypatch):
    folder = by_class(of=20, least_bytes=10**9)
    buffer_mib(0.002)
    in_files = build_pipeline(folder, batch_size=256, remainder="keep", cache=None)
    monkeypatch.setattr("tfopt.pipelines.sources.records._RUN_BYTES", 1000)
    plan = plan_pipeline(folder, batch_size=256, remainder="keep", cache=None)
    in_runs = plan.build()
    assert sorted(epochs(in_runs, 1)[0]) == list(range(COUNT))
    assert classes(in_runs) > 15 > 10 > classes(in_files)  # of 20
    assert "several parts read side by side" in unwrapped(plan)


@pytest.mark.slow
@pytest.mark.parametrize(("compression", "on_bad_record"), [("GZIP", "error"), (None, "skip")])
def test_what_cannot_be_read_by_offset_is_read_as_before(by_class, compression, on_bad_record):
    source = records(by_class(compression=compression), on_bad_record=on_bad_record)
    plan = plan_pipeline(source, batch_size=256, remainder="keep", cache=None)
    assert source.at is None
    assert ("(GZIP, which cannot be read by offset)" in unwrapped(plan)) is (compression == "GZIP")
    assert plan.stage("shuffle").setting.startswith("buffer of")
    assert sorted(epochs(plan.build(), 1)[0]) == list(range(COUNT))


@pytest.mark.slow
def test_positions_are_those_of_the_list(by_class):
    paths = sorted(map(str, by_class().glob("*.tfrecord")))
    source = records([paths[2], paths[0], paths[1]])
    in_order = [record.numpy() for record in source.dataset()]
    chosen = [0, 3999, 1332, 1333, 1334, 2666, 2667, 5, 5]
    positions = tf.data.Dataset.from_tensor_slices(tf.constant(chosen, tf.int64))
    assert [record.numpy() for record in source.at(positions)] == [in_order[position] for position in chosen]


@pytest.mark.slow
def test_a_cache_on_disk_holds_one_permutation_and_survives_damage(by_class, tmp_path, caplog):
    options = {"batch_size": 256, "remainder": "keep", "cache": tmp_path / "caches"}
    plan = plan_pipeline(by_class(), **options)
    assert "in one random order, that of the cache" in plan.stage("read").reason
    dataset = plan.build()
    assert 215 < classes(dataset) < 237  # though the buffer behind it holds a few
    (rows,) = (tmp_path / "caches").glob(f"*/{ROWS}")
    with open(rows, "r+b") as file:
        file.seek(rows.stat().st_size // 2)
        file.write(b"damaged")
    assert [sorted(epoch) for epoch in epochs(dataset)] == [list(range(COUNT))] * 2
    assert "is damaged at example" in caplog.text


@pytest.mark.slow
def test_an_iterator_goes_on_where_it_was_saved(by_class, tmp_path):
    options = {"batch_size": 100, "cache": None, "seed": 1}
    folder = by_class()
    batches = iter(build_pipeline(folder, **options))
    for _ in range(3):
        next(batches)
    saved = tf.train.Checkpoint(batches=batches).save(str(tmp_path / "saved"))
    expected = [batch[0].numpy().tolist() for batch in batches]
    again = iter(build_pipeline(folder, **options))
    tf.train.Checkpoint(batches=again).restore(saved)
    assert [batch[0].numpy().tolist() for batch in again] == expected


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["cut", "altered", "longer"])
def test_files_that_change_later_lose_nothing_in_silence(by_class, damage):
    folder = by_class()
    dataset = build_pipeline(folder, batch_size=100, remainder="keep", cache=None)
    shard = sorted(folder.glob("*.tfrecord"))[1]
    contents = shard.read_bytes()
    size = len(contents)
    if damage == "altered":
        shard.write_bytes(contents[: size // 2] + b"damaged" + contents[size // 2 + 7 :])
    else:
        os.truncate(shard, size - size // 1333 if damage == "cut" else size + 1)
    if damage == "longer":  # behind the records
        assert sorted(epochs(dataset, 1)[0]) == list(range(COUNT))
    else:
        with pytest.raises((tf.errors.DataLossError, tf.errors.FailedPreconditionError)):
            epochs(dataset, 1)


@pytest.mark.slow
def test_a_profile_knows_what_is_reading(by_class):
    plan = plan_pipeline(by_class(), batch_size=100, cache=None)
    assert "read" in {stage.name for stage in profile_pipeline(plan, seconds=1).stages}
