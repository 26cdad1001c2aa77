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


def changed(paths, number, length):
    """Cuts one of these files; returns all of them."""
    os.truncate(paths[number], length)
    return paths


@pytest.mark.parametrize("compression", ["", "GZIP", "ZLIB"])
def test_records_come_in_the_order_of_the_files_or_shuffled(record_files, compression):
    # Gzip is found from the first bytes, zlib must be told.
    told = "ZLIB" if compression == "ZLIB" else None
    source = records(record_files(compression=compression), features=FEATURES, compression=told)
    assert numbers(build_pipeline(source, batch_size=4, training=False)) == list(range(30))
    for cache in (None, "memory"):
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


@pytest.mark.parametrize(
    ("given", "options", "error", "text"),
    [
        (lambda paths: [], {}, PipelineError, "empty list"),
        (lambda paths: f"{paths[0]}.*nothing", {}, PipelineError, r"Nothing matches '.*\*nothing'"),
        (lambda paths: [*paths, "gone"], {}, PipelineError, "There is no TFRecord file 'gone'"),
        (lambda paths: [os.path.dirname(paths[0])], {}, PipelineError, "is a folder without an index"),
        (lambda paths: 3, {}, TypeError, "a path, a glob or a list of paths"),
        (lambda paths: changed(paths, 1, 0), {}, PipelineError, r"part-1\.tfrecord' is empty"),
        (lambda paths: changed(paths, 0, 5), {}, PipelineError, "no TFRecord file, or is cut inside its first record"),
        (lambda paths: __file__, {}, PipelineError, r"test_records\.py' is no TFRecord file"),
        (lambda paths: paths, {"compression": "gzip"}, ValueError, r"'GZIP' or 'ZLIB'\. Received: 'gzip'"),
        (lambda paths: paths, {"compression": "ZLIB"}, PipelineError, r"as ZLIB: .* or correct `compression`"),
        (lambda paths: paths, {"features": FEATURES, "parse": len}, ValueError, "`features` or `parse`"),
        (lambda paths: paths, {"features": ["number"]}, TypeError, "dict of features"),
        (lambda paths: paths, {"on_bad_record": "skp"}, ValueError, r"'error' or 'skip'\. .*'skp'\. Did you mean"),
    ],
)
def test_wrong_files_and_arguments_are_refused(record_files, given, options, error, text):
    with pytest.raises(error, match=text):
        records(given(record_files()), **options)


@pytest.mark.parametrize("lost", [1, 3, 5, 20, 25, 36, 50])
def test_a_file_cut_inside_a_record_is_named(record_files, lost):
    paths = record_files()
    size = os.path.getsize(paths[2])
    assert size == 10 * (size // 10), "records of one size"
    found = rf"{re.escape(paths[2])}' is cut inside record {9 - lost // (size // 10)} .* byte {size - lost}\)"
    with pytest.raises(PipelineError, match=found):
        records(changed(paths, 2, size - lost))


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
def test_a_compressed_file_cut_to_a_stub_is_named(record_files, compression):
    paths = record_files(compression=compression)
    for length in range(17, 2, -2):
        found = rf"None can be read from '{re.escape(paths[1])}' as {compression}: it is"
        with pytest.raises(PipelineError, match=found):
            records(changed(paths, 1, length), compression=compression)
