"""Records that are parsed a batch at a time give what parsing each of them gives."""

import numpy as np
import pytest
import tensorflow as tf

from tfopt.pipelines import build_pipeline, images, plan_pipeline, records, write_records

COUNT = 100
FEATURES = {
    "row": tf.io.FixedLenFeature([], tf.int64),
    "pair": tf.io.FixedLenFeature([2, 1], tf.float32),
    "text": tf.io.FixedLenFeature([], tf.string, default_value="none"),
}


def same(example):
    return example


def arrays():
    rows = np.arange(COUNT)
    texts = np.array([b"" if row % 5 == 0 else b"\xff%d" % row for row in rows])
    return {"row": rows, "pair": np.tile(rows[:, None, None], (2, 1)).astype(np.float32), "text": texts}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """The same examples as records of features and as tfopt's own."""
    folder = tmp_path_factory.mktemp("records")
    write_records(arrays(), folder / "own", shards=3, shuffle_seed=None)
    for file in range(2):
        with tf.io.TFRecordWriter(str(folder / f"{file}.tfrecord")) as writer:
            for row in range(file * COUNT // 2, (file + 1) * COUNT // 2):
                pair, text = arrays()["pair"][row].reshape(-1), arrays()["text"][row]
                feature = {
                    "row": tf.train.Feature(int64_list=tf.train.Int64List(value=[row])),
                    "pair": tf.train.Feature(float_list=tf.train.FloatList(value=pair)),
                    "text": tf.train.Feature(bytes_list=tf.train.BytesList(value=[text])),
                }
                writer.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())
    return {"features": records(str(folder / "*.tfrecord"), features=FEATURES), "own": records(folder / "own")}


@pytest.mark.parametrize("kind", ["features", "own"])
@pytest.mark.parametrize("transform", [None, same])
def test_each_comes_once_as_it_was_written(sources, kind, transform):
    plan = plan_pipeline(sources[kind], batch_size=32, remainder="keep", cache=None, transform=transform)
    names = [stage.name for stage in plan.stages]
    assert (names.index("decode") > names.index("batch")) is (transform is None)
    seen = []
    for batch in plan.build():
        for name, expected in arrays().items():
            np.testing.assert_array_equal(batch[name].numpy(), expected[batch["row"]], strict=name != "text")
        seen += batch["row"].numpy().tolist()
    assert sorted(seen) == list(range(COUNT)) != seen


def test_all_else_is_parsed_one_by_one(record_files, photos, tmp_path):
    paths = record_files()
    others = [
        tf.io.FixedLenSequenceFeature([], tf.int64, allow_missing=True),
        tf.io.VarLenFeature(tf.int64),
        tf.io.RaggedFeature(tf.int64),
        tf.io.SparseFeature("row", "row", tf.int64, COUNT),
    ]
    for options in [*({"features": {"number": feature}} for feature in others), {"parse": tf.strings.length}, {}]:
        assert records(paths, **options).decode_batch is None
    write_records(images(photos), tmp_path / "shards")
    assert records(tmp_path / "shards").decode_batch is None


def test_large_records_are_parsed_one_by_one(tmp_path):
    for size in (32_000, 33_000):
        write_records(np.zeros((3, size), np.uint8), tmp_path / str(size))
        source = records(tmp_path / str(size))
        assert (source.decode_batch is None) is (source.at is not None) is (size == 33_000)


@pytest.mark.parametrize("transform", [None, same])
def test_a_record_without_the_feature_is_an_error_that_names_it(tmp_path, transform):
    path = str(tmp_path / "some.tfrecord")
    with tf.io.TFRecordWriter(path) as writer:
        for number in range(COUNT):
            value = tf.train.Feature(int64_list=tf.train.Int64List(value=[number]))
            feature = {"other" if number == 50 else "row": value}
            writer.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())
    source = records(path, features={"row": tf.io.FixedLenFeature([], tf.int64)})
    dataset = build_pipeline(source, batch_size=10, training=False, cache=None, transform=transform)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"Feature: row .* is required but could not be found"):
        for _ in dataset:
            pass
