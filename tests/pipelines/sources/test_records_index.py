"""Records with an index: what the source takes from it, and what it refuses."""

import json
import os
import shutil

import numpy as np
import pytest
import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.pipelines import build_pipeline, plan_pipeline, records, verify_records
from tfopt.pipelines.tfrecords.format import INDEX_NAME
from tfopt.pipelines.write import write_records


@pytest.fixture
def folder(tmp_path):
    """Writes a folder of 20 examples in 4 shards; returns its path."""

    def write(name="shards", compression=None, start=0):
        rows = {"number": np.arange(start, start + 20), "row": np.zeros((20, 3), np.float32)}
        write_records(rows, tmp_path / name, shards=4, compression=compression, shuffle_seed=None)
        return tmp_path / name

    return write


def files(folder):
    return sorted(str(path) for path in folder.iterdir() if path.name != INDEX_NAME)


def numbers(source):
    return [int(example["number"]) for example in source.dataset().map(source.decode)]


@pytest.mark.parametrize("compression", [None, "GZIP", "ZLIB"])
def test_count_and_examples_are_known_of_a_folder_a_glob_or_a_list(folder, compression):
    path = folder(compression=compression)
    for paths in (path, str(path / "*.tfrecord*"), files(path)):
        source = records(paths)
        assert (source.count, numbers(source)) == (20, list(range(20)))
    assert len(build_pipeline(source, batch_size=6)) == 4
    source = records(files(path)[2:0:-1])
    assert (source.count, numbers(source)) == (10, [*range(10, 15), *range(5, 10)])


def test_files_of_two_folders_have_an_index_each(folder):
    source = records(files(folder()) + files(folder("more", start=20)))
    assert (source.count, numbers(source)) == (40, list(range(40)))


def test_a_file_without_an_index_among_others_makes_all_serialised(folder, record_files):
    source = records([*files(folder()), *record_files(1)])
    assert source.decode is None
    assert source.count == 30


def test_features_and_parse_come_before_the_index(folder):
    path = folder()
    described = records(path, features={"number": tf.io.FixedLenFeature([], tf.string)})
    assert next(iter(described.dataset().map(described.decode)))["number"].dtype == tf.string
    parsed = records(path, parse=tf.strings.length)
    assert int(next(iter(parsed.dataset().map(parsed.decode)))) > 50


def test_the_index_of_another_program_counts_for_nothing(record_files, tmp_path):
    paths = record_files()
    (tmp_path / INDEX_NAME).write_text(json.dumps({"files": 3}))
    assert (records(paths).count, records(paths).decode) == (30, None)


@pytest.mark.parametrize("compression", [None, "GZIP"])
@pytest.mark.parametrize("share", [None, 0, 0.5, 0.99])
def test_a_shard_that_is_missing_or_cut_is_named(folder, compression, share):
    path = folder(compression=compression)
    shard = files(path)[2]
    size = os.path.getsize(shard)
    if share is None:
        os.unlink(shard)
        told = f"There is no TFRecord file '{shard}'"
    else:
        os.truncate(shard, int(share * size))
        told = rf"Expected {size} bytes in '{shard}', as the index beside it says. Found {int(share * size)}"
    with pytest.raises(PipelineError, match=told):
        records(path)


def test_a_shard_of_another_number_of_records_is_named(folder):
    path = folder()
    changed = files(path)[1]
    size = os.path.getsize(changed)
    with tf.io.TFRecordWriter(changed) as writer:
        writer.write(b"x" * (size - 16))
    with pytest.raises(PipelineError, match=rf"Expected 5 records in '{changed}'.* Found 1\."):
        records(path)


def test_a_compression_unlike_the_index_is_refused(folder):
    with pytest.raises(ValueError, match=r"or 'GZIP', which the index beside .* Received: 'ZLIB'"):
        records(folder(compression="GZIP"), compression="ZLIB")


def test_the_fingerprint_changes_with_the_files(folder, record_files):
    path = folder()
    found = [
        records(path).fingerprint(),
        records(files(path)[:3]).fingerprint(),
        records(path, on_bad_record="skip").fingerprint(),
        records(record_files()).fingerprint(),
    ]
    assert all(one != other for number, one in enumerate(found) for other in found[:number])
    source = records(path)
    assert source.fingerprint() == found[0]
    assert len(set(found[0]["sha256"])) == 4
    os.utime(files(path)[3], (1, 1))
    assert source.fingerprint() != found[0]


def test_the_key_of_a_cache_changes_with_the_functions(record_files, tmp_path):
    plain, number = record_files(), {"number": tf.io.FixedLenFeature([], tf.int64)}
    given = [
        {},
        {"parse": tf.strings.length},
        {"parse": lambda record: tf.strings.length(record) + 1},
        {"features": number},
        {"features": {"number": tf.io.FixedLenFeature([], tf.int64, default_value=3)}},
    ]
    first, again = (
        [plan_pipeline(records(plain, **each), batch_size=2, cache=tmp_path).stage("cache").key for each in given]
        for _ in range(2)
    )
    assert first == again
    assert len({*first}) == len(given)


@pytest.mark.parametrize("on_bad_record", ["error", "skip"])
def test_a_shard_that_is_missing_beside_the_given_ones_is_named(folder, on_bad_record):
    path = folder()
    assert records(files(path)[:2], on_bad_record=on_bad_record).count == 10
    gone = files(path)[2]
    os.unlink(gone)
    for paths in (str(path / "*.tfrecord"), files(path)[:2]):
        with pytest.raises(PipelineError, match=rf"every shard that the index beside .* Missing: '{gone}'\. Copy"):
            records(paths, on_bad_record=on_bad_record)


@pytest.mark.parametrize("compression", [None, "GZIP"])
@pytest.mark.parametrize("width", [1, 50_000])  # of more than is hashed at both ends, with equal beginnings
def test_a_shard_that_is_a_copy_of_another_is_named(tmp_path, compression, width):
    rows = np.zeros((8, width), np.float32)
    rows[:, -1] = range(8)
    write_records(rows, tmp_path / "shards", shards=4, compression=compression)
    first, second, *_ = files(tmp_path / "shards")
    shutil.copy(first, second)
    told = (
        ".*" if compression else "the records that were written"
    )  # of one size: nothing but the contents tells them apart
    with pytest.raises(PipelineError, match=rf"Expected {told} in '{second}', as the index beside it says"):
        records(tmp_path / "shards")


@pytest.mark.parametrize("contents", [b"", b'{"form', b"\0" * 50])
def test_an_index_that_was_emptied_is_refused(folder, contents):
    path = folder()
    (path / INDEX_NAME).write_bytes(contents)
    for paths in (path, str(path / "*.tfrecord"), files(path)[:1]):
        with pytest.raises(PipelineError, match="damaged or was edited"):
            records(paths)


@pytest.fixture
def remote(folder):
    """Writes a folder of records and copies it to TensorFlow's file system in memory; returns its URL."""

    def copy(name, compression=None):
        local, url = folder(compression=compression), f"ram://{name}/shards"
        for path in local.iterdir():
            tf.io.gfile.copy(str(path), f"{url}/{path.name}", overwrite=True)
        return url

    return copy


@pytest.mark.parametrize("compression", [None, "GZIP"])
def test_remote_records_use_their_index(remote, compression):
    url = remote(f"use{compression}", compression)
    for paths in (url, f"{url}/*.tfrecord*"):
        source = records(paths)
        assert (source.count, numbers(source)) == (20, list(range(20)))
    assert sorted(
        int(number)
        for batch in build_pipeline(url, batch_size=6, remainder="keep", seed=1)
        for number in batch["number"]
    ) == list(range(20))
    assert numbers(records(url, on_bad_record="skip")) == list(range(20))
    assert verify_records(url).passed


def test_remote_records_are_checked_against_their_index(remote):
    url = remote("checked")
    with tf.io.gfile.GFile(f"{url}/other", "wb") as file:
        file.write(b"other")
    assert [problem.kind for problem in verify_records(url).problems] == ["extra"]
    shard = f"{url}/records-00002.tfrecord"
    with tf.io.gfile.GFile(shard, "rb") as file:
        contents = file.read()
    tf.io.gfile.remove(shard)  # else TensorFlow appends
    with tf.io.gfile.GFile(shard, "wb") as file:
        file.write(contents[:40] + b"damaged" + contents[47:])
    with pytest.raises(PipelineError, match=f"the records that were written in '{shard}'"):
        records(url)
    assert [problem.kind for problem in verify_records(url).problems] == ["extra", "altered"]
    tf.io.gfile.remove(shard)
    with pytest.raises(PipelineError, match=f"Missing: '{shard}'"):
        records(f"{url}/*.tfrecord")
    tf.io.gfile.remove(f"{url}/{INDEX_NAME}")
    with tf.io.gfile.GFile(f"{url}/{INDEX_NAME}", "wb") as file:
        file.write(b"{")
    with pytest.raises(PipelineError, match="damaged or was edited"):
        records(url)
