import hashlib
import os

import pytest
import tensorflow as tf

from tfopt.pipelines.tfrecords import shards as module
from tfopt.pipelines.tfrecords.shards import ShardWriters


def read(path, compression=""):
    return [record.numpy() for record in tf.data.TFRecordDataset([str(path)], compression)]


@pytest.mark.parametrize(("compression", "suffix"), [("", ""), ("GZIP", ".gz"), ("ZLIB", ".zz")])
def test_records_go_to_their_shards_in_order(tmp_path, compression, suffix):
    rows = [[b"%d of %d" % (row, shard) for row in range(50)] for shard in range(9)]
    with ShardWriters(str(tmp_path), compression) as writers:
        for shard in rows:
            writers.begin()
            writers.put(shard[:20])
            writers.put([])
            writers.put(shard[20:])
        shards = writers.finish()
    assert [shard.name for shard in shards] == [f"records-{number:05}.tfrecord{suffix}" for number in range(9)]
    assert [read(tmp_path / shard.name, compression) for shard in shards] == rows
    for shard in shards:
        contents = (tmp_path / shard.name).read_bytes()
        assert (shard.count, shard.size_bytes) == (50, len(contents))
        assert shard.sha256 == hashlib.sha256(contents).hexdigest()


def test_more_than_may_be_under_way_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_UNDER_WAY_BYTES", 10)
    with ShardWriters(str(tmp_path), "") as writers:
        for shard in range(20):
            writers.begin()
            for _ in range(3):
                writers.put([b"x" * shard, b"y"])
        shards = writers.finish()
    assert [shard.count for shard in shards] == [6] * 20


def test_a_shard_that_cannot_be_written_ends_the_writing(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_UNDER_WAY_BYTES", 10)
    (tmp_path / "records-00001.tfrecord").mkdir()

    def write():
        with ShardWriters(str(tmp_path), "") as writers:
            for _ in range(3):
                writers.begin()
                for _ in range(100):
                    writers.put([b"x" * 100])
            writers.finish()

    with pytest.raises(tf.errors.FailedPreconditionError, match="Is a directory"):
        write()


@pytest.mark.timeout(60)
def test_nobody_waits_for_a_shard_that_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_UNDER_WAY_BYTES", 10)
    (tmp_path / "records-00000.tfrecord").mkdir()
    writers = ShardWriters(str(tmp_path), "")
    writers.begin()

    def put_until_it_fails():
        while True:
            writers.put([b"x" * 10])

    for _ in range(2):
        with pytest.raises(tf.errors.FailedPreconditionError, match="Is a directory"):
            put_until_it_fails()
    with pytest.raises(tf.errors.FailedPreconditionError, match="Is a directory"):
        writers.finish()


def test_an_error_of_the_caller_ends_the_threads(tmp_path):
    def write():
        with ShardWriters(str(tmp_path), "") as writers:
            writers.begin()
            writers.put([b"x"])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert os.listdir(tmp_path) in ([], ["records-00000.tfrecord"])
