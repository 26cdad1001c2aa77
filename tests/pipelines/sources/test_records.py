import os
import re

import pytest
import tensorflow as tf
from unwrapped import unwrapped

from tfopt.errors import PipelineError
from tfopt.pipelines import build_pipeline, plan_pipeline, records
from tfopt.pipelines.shared.nondeterminism import lineage

FEATURES = {"number": tf.io.FixedLenFeature([], tf.int64)}


def numbers(dataset):
    return [int(number) for batch in dataset for number in batch["number"]]


@pytest.mark.parametrize("compression", ["", "GZIP", "ZLIB"])
def test_records_come_in_the_order_of_the_files(record_files, compression):
    # Gzip is found from the first bytes, zlib must be told.
    source = records(
        record_files(compression=compression),
        features=FEATURES,
        compression="ZLIB" if compression == "ZLIB" else None,
    )
    assert numbers(build_pipeline(source, batch_size=4, training=False)) == list(range(30))


@pytest.mark.parametrize("compression", ["", "GZIP"])
@pytest.mark.parametrize("cache", [None, "memory"])
def test_each_record_once_an_epoch_when_shuffled(record_files, compression, cache):
    source = records(record_files(compression=compression), features=FEATURES)
    dataset = build_pipeline(source, batch_size=4, remainder="keep", cache=cache)
    epochs = [numbers(dataset) for _ in range(3)]
    assert all(sorted(epoch) == list(range(30)) for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_the_count_is_known_where_records_are_plain(record_files):
    plain, packed = record_files(), record_files(compression="GZIP")
    assert records(plain).count == 30
    assert len(build_pipeline(records(plain), batch_size=7)) == 5
    assert records(packed).count is None
    plan = plan_pipeline(packed, batch_size=7)
    assert int(plan.build().cardinality()) == tf.data.UNKNOWN_CARDINALITY
    assert "one optimizer iteration too many" in unwrapped(plan)


def test_a_glob_is_sorted_and_a_list_is_not(record_files, tmp_path):
    paths = record_files()
    by_glob = records(str(tmp_path / "*.tfrecord"), features=FEATURES)
    by_list = records(paths[::-1], features=FEATURES)
    assert numbers(build_pipeline(by_glob, training=False)) == list(range(30))
    assert numbers(build_pipeline(by_list, training=False))[:10] == list(range(20, 30))


def test_parse_and_raw_records(record_files):
    def parse(serialized):
        return tf.io.parse_single_example(serialized, FEATURES)["number"] * 2

    parsed = build_pipeline(records(record_files(1), parse=parse), training=False)
    assert [int(number) for batch in parsed for number in batch] == list(range(0, 20, 2))
    assert build_pipeline(record_files(1), training=False).element_spec == tf.TensorSpec([None], tf.string)


def test_sparse_features_batch(record_files):
    source = records(record_files(1), features={"number": tf.io.VarLenFeature(tf.int64)})
    batch = next(iter(build_pipeline(source, batch_size=10, training=False)))
    assert batch["number"].values.numpy().tolist() == list(range(10))


def test_nothing_that_matches(tmp_path, record_files):
    with pytest.raises(PipelineError, match=r"Nothing matches '.*\*\.nothing'"):
        records(str(tmp_path / "*.nothing"))
    with pytest.raises(PipelineError, match="empty list"):
        records([])
    with pytest.raises(PipelineError, match=r"There is no TFRecord file '.*gone'"):
        records([*record_files(1), str(tmp_path / "gone")])
    with pytest.raises(PipelineError, match="is a folder"):
        records([str(tmp_path)])


def test_an_empty_file_is_named(record_files):
    paths = record_files()
    with open(paths[1], "w"):
        pass
    with pytest.raises(PipelineError, match=f"{re.escape(paths[1])}' is empty"):
        records(paths)


@pytest.mark.parametrize("lost", [1, 3, 5, 20, 25, 36, 50])
def test_a_file_cut_inside_a_record_is_named(record_files, lost):
    paths = record_files()
    with open(paths[2], "r+b") as file:
        size = file.seek(0, 2)
        assert size == 10 * (size // 10), "records of one size"
        file.truncate(size - lost)
    with pytest.raises(
        PipelineError, match=rf"{re.escape(paths[2])}' is cut inside record {9 - lost // (size // 10)} "
    ):
        records(paths)


def test_a_file_cut_inside_its_first_header_is_named(record_files):
    paths = record_files(1)
    with open(paths[0], "r+b") as file:
        file.truncate(5)
    with pytest.raises(PipelineError, match="no TFRecord file, or is cut inside its first record"):
        records(paths)


def test_another_kind_of_file_is_named(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("these are plain notes, no records")
    with pytest.raises(PipelineError, match=r"notes\.txt' is no TFRecord file"):
        records(path)


def test_a_plain_file_that_begins_like_gzip_is_read_as_plain(tmp_path):
    path = str(tmp_path / "long")
    with tf.io.TFRecordWriter(path) as writer:
        writer.write(b"x" * 0x00088B1F)
    with open(path, "rb") as file:
        assert file.read(3) == b"\x1f\x8b\x08"
    assert records(path).count == 1


def test_unlike_compression_is_refused(record_files):
    with pytest.raises(PipelineError, match="one compression"):
        records(record_files(1) + record_files(1, "GZIP"))


def test_arguments_are_checked(record_files):
    paths = record_files(1)
    with pytest.raises(ValueError, match=r"'GZIP' or 'ZLIB'\. Received: 'gzip'"):
        records(paths, compression="gzip")
    with pytest.raises(ValueError, match="`features` or `parse`"):
        records(paths, features=FEATURES, parse=lambda record: record)
    with pytest.raises(TypeError, match="dict of features"):
        records(paths, features=["number"])
    with pytest.raises(TypeError, match="a path, a glob or a list of paths"):
        records(3)


def test_a_feature_that_is_missing_names_the_element(record_files):
    source = records(record_files(1), features={"other": tf.io.FixedLenFeature([], tf.int64)})
    with pytest.raises(PipelineError, match=r"stage decode failed on element 0: .*other"):
        plan_pipeline(source)


@pytest.mark.parametrize("as_glob", [True, False])
def test_a_name_that_is_no_utf8_is_shown(record_files, tmp_path, as_glob):
    odd = os.fsencode(tmp_path) + b"/\xff.tfrecord"
    os.rename(record_files(1)[0], odd)
    with pytest.raises(PipelineError, match=r"file names in UTF-8\. Found '.*\\udcff\.tfrecord'\. Rename the file"):
        records(str(tmp_path / "*.tfrecord") if as_glob else [os.fsdecode(odd)])


def test_files_are_read_side_by_side_when_shuffled(record_files):
    for seed in (None, 7):
        source = plan_pipeline(records(record_files()), batch_size=4, seed=seed).first_epoch()
        reads = [stage for stage in lineage(source) if type(stage).__name__ == "_ParallelInterleaveDataset"]
        assert [int(stage._cycle_length) for stage in reads] == [3]
    plain = plan_pipeline(records(record_files()), batch_size=4, training=False).first_epoch()
    assert not any("Interleave" in type(stage).__name__ for stage in lineage(plain))


@pytest.mark.parametrize("compression", ["GZIP", "ZLIB"])
@pytest.mark.parametrize("length", range(3, 18, 2))
def test_a_compressed_file_cut_to_a_stub_is_named(record_files, compression, length):
    paths = record_files(compression=compression)
    os.truncate(paths[1], length)
    with pytest.raises(PipelineError, match=rf"None can be read from '{re.escape(paths[1])}' as {compression}: it is"):
        records(paths, compression=compression)


def test_a_plain_file_is_not_read_as_a_compressed_one(record_files):
    with pytest.raises(PipelineError, match=r"as ZLIB: .* or correct `compression`"):
        records(record_files(), compression="ZLIB")
