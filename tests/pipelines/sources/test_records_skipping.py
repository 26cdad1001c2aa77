import warnings

import numpy as np
import pytest
import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.pipelines import build_pipeline, records
from tfopt.pipelines.sources import records as module
from tfopt.pipelines.tfrecords.format import read_index
from tfopt.pipelines.write import write_records

RECORDS = [b"%d" % number * 5 for number in range(8)]
SIZE = 21


def values(source):
    return [record.numpy() for record in source.dataset()]


def test_nothing_is_lost_and_nothing_said_where_all_is_whole(plain_file):
    source = records(plain_file(RECORDS), on_bad_record="skip")
    assert (source.count, values(source)) == (8, RECORDS)


@pytest.mark.parametrize("position", range(3 * SIZE, 4 * SIZE))
def test_only_the_record_with_a_flipped_byte_is_lost(plain_file, flip, position):
    path = plain_file(RECORDS)
    flip(path, position)
    with pytest.warns(UserWarning, match=rf"keeps 7 records:\n  altered: {path}: record 3, .* \(bytes 63 to 84\): its"):
        source = records(path, on_bad_record="skip")
    assert (source.count, values(source)) == (7, RECORDS[:3] + RECORDS[4:])


def test_the_warning_points_at_the_caller(plain_file, flip):
    path = plain_file(RECORDS)
    flip(path, 3)
    with pytest.warns(UserWarning, match="keeps 7") as caught:
        records(path, on_bad_record="skip")
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("training", [True, False])
def test_a_pipeline_reads_around_the_damage(shards, flip, training, seed):
    folder = shards()
    first, _, third = sorted(folder.glob("*.tfrecord"))
    flip(first, 3)
    flip(third, third.stat().st_size - 1)
    with pytest.warns(UserWarning, match="keeps 4 records"):
        source = records(folder, on_bad_record="skip")
    pipeline = build_pipeline(source, batch_size=2, training=training, seed=seed)
    for _ in range(2):
        numbers = np.concatenate([batch.numpy() for batch in pipeline]).tolist()
        assert (sorted(numbers) if training else numbers) == [1, 2, 3, 4]
    assert len(pipeline) == 2


def test_a_shard_cut_between_two_records(shards):
    folder = shards()
    path = sorted(folder.glob("*.tfrecord"))[1]
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[: size // 2])
    with pytest.warns(UserWarning, match=f"cut: {path}: the last 1 of 2 records are missing"):
        source = records(folder, on_bad_record="skip")
    assert [int(number) for number in source.dataset().map(source.decode)] == [0, 1, 2, 4, 5]


def test_a_shard_that_was_exchanged_is_an_error(shards, tmp_path):
    folder = shards()
    first, second, _ = sorted(folder.glob("*.tfrecord"))
    second.write_bytes(first.read_bytes() * 2)
    with pytest.raises(PipelineError, match=rf"Expected 2 records in '{second}'.* Found 4 whole ones"):
        records(folder, on_bad_record="skip")
    with tf.io.TFRecordWriter(str(second)) as writer:
        for _ in range(2):
            writer.write(b"another")
    with pytest.raises(PipelineError, match=r"Expected 2 records in \d+ bytes"):
        records(folder, on_bad_record="skip")


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
    folder = shards("GZIP")
    path = sorted(folder.glob("*.gz"))[1]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.warns(UserWarning, match=f"cut: {path}: record 2, .*the compressed stream is cut; nothing after it"):
        source = records(folder, on_bad_record="skip")
    assert [int(number) for number in source.dataset().map(source.decode)] == list(range(6))
    contents = path.read_bytes()
    path.write_bytes(contents[: len(contents) // 2])
    with pytest.warns(UserWarning, match=f"keeps 4 records:\n  cut: {path}: record 0"):
        source = records(folder, on_bad_record="skip")
    assert [int(number) for number in source.dataset().map(source.decode)] == [0, 1, 4, 5]


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
    monkeypatch.setattr(module, "_SHOWN", 2)
    path = plain_file(RECORDS)
    for record in (0, 2, 4, 6):
        flip(path, SIZE * record + 14)
    with pytest.warns(UserWarning, match=r"record 2, .*\n  and 2 more, which verify_records lists"):
        records(path, on_bad_record="skip")


def test_an_index_is_not_needed_to_be_whole(shards):
    assert read_index(str(shards())).count == 6
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert records(sorted((shards(name="b")).glob("*.tfrecord")), on_bad_record="skip").count == 6


def test_all_that_is_lost_is_reported(tmp_path, flip):
    write_records(np.arange(5), tmp_path / "shards")
    path = tmp_path / "shards" / "records-00000.tfrecord"
    size = path.stat().st_size // 5
    path.write_bytes(path.read_bytes()[: 3 * size])
    flip(path, 20)
    with pytest.warns(UserWarning, match=rf"keeps 2 .*\n.* record 0,.*\n  cut: {path}: 3 of 5 records are lost in all"):
        records(tmp_path / "shards", on_bad_record="skip")


def test_a_damaged_part_of_several_records_is_counted(tmp_path, flip):
    write_records(np.arange(5), tmp_path / "shards")
    path = tmp_path / "shards" / "records-00000.tfrecord"
    size = path.stat().st_size // 5
    for record in (1, 2):
        flip(path, record * size)
    with pytest.warns(UserWarning, match=rf"keeps 3 .*\n.* record 1,.*\n  altered: {path}: 2 of 5 records are lost"):
        records(tmp_path / "shards", on_bad_record="skip")


def test_a_whole_shard_that_is_a_copy_of_another_is_an_error(shards):
    first, second, _ = sorted(shards().glob("*.tfrecord"))
    second.write_bytes(first.read_bytes())
    with pytest.raises(PipelineError, match=rf"in '{second}'.* Found whole records of another SHA-256"):
        records(first.parent, on_bad_record="skip")
