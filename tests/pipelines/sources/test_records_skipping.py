import os
import warnings

import numpy as np
import pytest
import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.pipelines import build_pipeline, records
from tfopt.pipelines.write import write_records

RECORDS = [b"%d" % number * 5 for number in range(8)]
SIZE = 21


def values(source):
    return [record.numpy() for record in source.dataset()]


def skipping(paths, found):
    """The records that are left, and a warning that says what is lost and shows the user's line."""
    with pytest.warns(UserWarning, match=found) as caught:
        source = records(paths, on_bad_record="skip")
    assert [warning.filename for warning in caught] == [__file__]
    return source


def numbers(source):
    return [int(number) for number in source.dataset().map(source.decode)]


def test_nothing_is_lost_and_nothing_said_where_all_is_whole(plain_file, shards):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        source = records(plain_file(RECORDS), on_bad_record="skip")
        assert (source.count, values(source)) == (8, RECORDS)
        assert records(sorted(shards().glob("*.tfrecord")), on_bad_record="skip").count == 6


@pytest.mark.parametrize("position", range(3 * SIZE, 4 * SIZE))
def test_only_the_record_with_a_flipped_byte_is_lost(plain_file, flip, position):
    path = plain_file(RECORDS)
    flip(path, position)
    part = "length" if position < 3 * SIZE + 12 else "data"
    found = rf"keeps 7 records:\n  altered: {path}: record 3, .* \(bytes 63 to 84\): its {part}, or the checksum"
    source = skipping(path, found)
    assert (source.count, values(source)) == (7, RECORDS[:3] + RECORDS[4:])


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("training", [True, False])
def test_a_pipeline_reads_around_the_damage(shards, flip, training, seed):
    folder = shards()
    first, _, third = sorted(folder.glob("*.tfrecord"))
    flip(first, 3)
    flip(third, third.stat().st_size - 1)
    source = skipping(folder, "keeps 4 records")
    pipeline = build_pipeline(source, batch_size=2, training=training, seed=seed)
    for _ in range(2):
        found = np.concatenate([batch.numpy() for batch in pipeline]).tolist()
        assert (sorted(found) if training else found) == [1, 2, 3, 4]
    assert len(pipeline) == 2


def test_a_shard_cut_between_two_records(shards):
    path = sorted(shards().glob("*.tfrecord"))[1]
    os.truncate(path, path.stat().st_size // 2)
    source = skipping(path.parent, f"cut: {path}: the last 1 of 2 records are missing")
    assert numbers(source) == [0, 1, 2, 4, 5]


def test_a_shard_that_was_exchanged_is_an_error(shards):
    first, second, _ = sorted(shards().glob("*.tfrecord"))

    def refused(found):
        with pytest.raises(PipelineError, match=found):
            records(first.parent, on_bad_record="skip")

    second.write_bytes(first.read_bytes() * 2)
    refused(rf"Expected 2 records in '{second}'.* Found 4 whole ones")
    second.write_bytes(first.read_bytes())
    refused(rf"in '{second}'.* Found whole records of another SHA-256")
    with tf.io.TFRecordWriter(str(second)) as writer:
        for _ in range(2):
            writer.write(b"another")
    refused(r"Expected 2 records in \d+ bytes")


def test_a_missing_shard_is_an_error(shards):
    folder = shards()
    path = sorted(folder.glob("*.tfrecord"))[1]
    path.unlink()
    with pytest.raises(PipelineError, match=f"There is no TFRecord file '{path}'"):
        records(folder, on_bad_record="skip")


def test_an_empty_file_is_an_error(shards, plain_file):
    path = sorted(shards().glob("*.tfrecord"))[1]
    for paths in (path.parent, [plain_file(RECORDS), path]):
        path.write_bytes(b"")
        with pytest.raises(PipelineError, match=f"The TFRecord file '{path}' is empty"):
            records(paths, on_bad_record="skip")
        (path.parent / "index.json").unlink(missing_ok=True)


def test_a_compressed_file_loses_all_behind_the_damage(shards):
    path = sorted(shards("GZIP").glob("*.gz"))[1]
    contents = path.read_bytes()
    for length, record, left in ((len(contents) - 1, 2, [*range(6)]), (len(contents) // 2, 0, [0, 1, 4, 5])):
        path.write_bytes(contents[:length])
        lost = f"cut: {path}: record {record}, .*the compressed stream is cut; nothing after it"
        assert numbers(skipping(path.parent, f"keeps {len(left)} records:\n  {lost}")) == left


def test_damage_that_comes_later_is_an_error(shards, flip):
    folder = shards()
    source = records(folder, on_bad_record="skip")
    flip(sorted(folder.glob("*.tfrecord"))[1], 3)
    with pytest.raises(tf.errors.DataLossError):
        list(source.dataset())


def test_a_file_without_a_whole_record_is_an_error(plain_file, tmp_path):
    path = tmp_path / "notes"
    path.write_text("no records, but a text")
    with pytest.raises(PipelineError, match=f"Expected a whole record in '{path}'. Found none"):
        records(path, on_bad_record="skip")


def test_many_losses_are_counted(plain_file, monkeypatch, flip):
    monkeypatch.setattr("tfopt.pipelines.shared.problems._SHOWN", 2)
    path = plain_file(RECORDS)
    for record in (0, 2, 4, 6):
        flip(path, SIZE * record + 14)
    skipping(path, r"record 2, .*\n  and 2 more\nverify_records says more")


@pytest.mark.parametrize(
    ("kept", "flipped", "found"),
    [
        (3, [0], "record 0,.*\n  cut: {path}: 3 of 5 records are lost in all"),
        (5, [1, 2], "record 1,.*\n  altered: {path}: 2 of 5 records are lost"),
    ],
)
def test_all_that_is_lost_is_reported(tmp_path, flip, kept, flipped, found):
    write_records(np.arange(5), tmp_path / "shards")
    path = tmp_path / "shards" / "records-00000.tfrecord"
    size = path.stat().st_size // 5
    os.truncate(path, kept * size)
    for record in flipped:
        flip(path, record * size)
    skipping(tmp_path / "shards", f"keeps {kept - len(flipped)} .*\n.* {found.format(path=path)}")
