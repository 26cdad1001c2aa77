import os
import time
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.pipelines import CentralCrop, Source, build_pipeline, dataset, images, records
from tfopt.pipelines import write as module
from tfopt.pipelines.tfrecords.format import read_index
from tfopt.pipelines.write import write_records

DTYPES = [
    *(tf.bool, tf.string, tf.bfloat16, tf.float16, tf.float32, tf.float64, tf.complex64, tf.complex128),
    *(tf.int8, tf.uint8, tf.int16, tf.uint16, tf.int32, tf.uint32, tf.int64, tf.uint64),
]


def examples(source):
    """The source's examples."""
    raw = source.dataset()
    return raw if source.decode is None else raw.map(source.decode)


def equal(first, second):
    tf.nest.assert_same_structure(first, second)
    for one, other in zip(tf.nest.flatten(first), tf.nest.flatten(second), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        np.testing.assert_array_equal(one.numpy(), other.numpy())


def test_every_dtype_comes_back(tmp_path):
    values = {
        dtype.name: tf.constant([["a", "", b"\xff"]] * 2) if dtype == tf.string else tf.cast([[0, 1, 2]] * 2, dtype)
        for dtype in DTYPES
    }
    given = tf.data.Dataset.from_tensors((values, {"scalar": tf.constant(-3, tf.int16)}, tf.constant("text")))
    write_records(given, tmp_path / "shards")
    found = examples(records(tmp_path / "shards"))
    assert found.element_spec == given.element_spec
    equal(next(iter(found)), next(iter(given)))


@pytest.mark.parametrize("compression", [None, "GZIP", "ZLIB"])
def test_examples_of_unlike_shapes_come_back_in_order(tmp_path, compression):
    def example(number):
        return {"x": tf.fill([number % 4, 2], number), "y": (number,)}

    given = tf.data.Dataset.range(40).map(example)
    index = write_records(given, tmp_path / "shards", shards=7, compression=compression, shuffle_seed=None)
    source = records(tmp_path / "shards")
    assert (index.count, source.count, len(index.shards)) == (40, 40, 7)
    assert {shard.count for shard in index.shards} == {5, 6}
    assert examples(source).element_spec == given.element_spec
    for one, other in zip(examples(source), given, strict=True):
        equal(one, other)


def test_shards_are_filled_to_a_size(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_SHARD_BYTES", 5000)
    monkeypatch.setattr(module, "_CHUNK", 7)
    unknown = tf.data.Dataset.range(100).filter(lambda number: number >= 0)
    index = write_records(unknown.map(lambda number: tf.fill([100], number)), tmp_path / "shards", shuffle_seed=None)
    sizes = [shard.size_bytes for shard in index.shards]
    assert index.count == 100
    assert len(sizes) > 10
    assert all(5000 <= size < 7000 for size in sizes[:-1])
    assert [int(row[0]) for row in examples(records(tmp_path / "shards"))] == list(range(100))


def test_the_order_is_the_sources_whatever_takes_longer(tmp_path):
    def slow_first(number):
        time.sleep(0.02 * (number % 4 == 0))
        return number

    free = tf.data.Options()
    free.deterministic = False
    slow = tf.data.Dataset.range(40).map(
        lambda number: tf.ensure_shape(tf.numpy_function(slow_first, [number], tf.int64, stateful=False), ()),
        num_parallel_calls=4,
    )
    write_records(slow.with_options(free), tmp_path / "shards", shuffle_seed=None)
    assert [int(number) for number in examples(records(tmp_path / "shards"))] == list(range(40))


def test_images_are_written_encoded_and_read_decoded(photos, tmp_path):
    index = write_records(images(photos), tmp_path / "shards", shards=2, shuffle_seed=None)
    back, given = records(tmp_path / "shards"), images(photos)
    assert back.class_names == given.class_names == ("a", "b", "c")
    first = sorted((photos / "a").iterdir())[0].read_bytes()
    contents, label = next(iter(back.dataset().map(back.encoded)))
    assert (contents.numpy(), int(label)) == (first, 0)
    assert index.shards[0].size_bytes < 6 * (len(first) + 200)
    for one, other in zip(examples(back), examples(given), strict=True):
        equal(one, other)
    # Written again from records, they are still encoded.
    write_records(back, tmp_path / "again", shards=2, shuffle_seed=None)
    assert read_index(str(tmp_path / "again")) == index


def test_the_index_says_whether_all_images_are_jpegs(tmp_path, picture):
    for folder, suffixes in (("jpegs", ("jpg", "jpg")), ("mixed", ("jpg", "png", "jpg"))):
        for shade, suffix in enumerate(suffixes):
            picture(tmp_path / folder / "a" / f"{shade}.{suffix}", shade=50 + shade, size=(9, 9))
        index = write_records(images(tmp_path / folder), tmp_path / "records" / folder, shuffle_seed=None)
        assert index.only_jpeg is (folder == "jpegs")
    paths = {name: sorted(map(str, (tmp_path / "records").glob(f"{name}/*.tfrecord"))) for name in ("jpegs", "mixed")}
    assert records(paths["jpegs"]).only_jpeg
    both = records(paths["jpegs"] + paths["mixed"])
    assert not both.only_jpeg
    files = [str(path) for name in paths for path in sorted((tmp_path / name / "a").iterdir())]
    decoded = np.array([tf.io.decode_image(tf.io.read_file(path), channels=3) for path in files])
    ((cropped, _),) = build_pipeline(both, batch_size=5, crop=CentralCrop(7, fraction=7 / 9), training=False)
    np.testing.assert_array_equal(cropped, decoded[:, 1:8, 1:8])
    assert not write_records(np.arange(3), tmp_path / "numbers").only_jpeg


def test_the_bar_is_shown_on_a_terminal_only(tmp_path, capfd, monkeypatch):
    write_records(np.arange(3), tmp_path / "a")
    assert capfd.readouterr() == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")
    write_records(np.arange(3), tmp_path / "b")
    out, err = capfd.readouterr()
    assert out == ""
    assert "3/3" in err
    assert "writing arrays" in err


HALVES = tf.data.Dataset.range(12).map(lambda number: 12 // (number - 6))
UNKNOWN = tf.data.Dataset.range(3).filter(lambda number: number >= 0)


def counted(count):
    return Source(name="mine", dataset=lambda: tf.data.Dataset.range(3), count=count)


@pytest.mark.parametrize(
    ("source", "options", "error", "text"),
    [
        (HALVES, {"shards": 3}, PipelineError, "Expected to read dataset.*failed after .* Integer division by zero"),
        (counted(2), {}, PipelineError, "Expected 2 examples, as mine says. Found 3"),
        (counted(4), {}, PipelineError, "Expected 4 examples, as mine says. Found 3"),
        (UNKNOWN.filter(lambda number: number > 5), {}, PipelineError, "at least one example"),
        (tf.data.Dataset.range(3).repeat(), {}, PipelineError, "has no end"),
        (3, {}, TypeError, "Expected a source"),
        (np.arange(3), {"shards": 4}, ValueError, "Received: 4 for 3 examples"),
        (UNKNOWN, {"shards": 2}, ValueError, "Received: 2 for an unknown number of examples"),
        (np.arange(3), {"shards": 0}, ValueError, "at least 1"),
        (np.arange(3), {"compression": "gzip"}, ValueError, r"'GZIP' or 'ZLIB'\. Received: 'gzip'\. Pass .* capitals"),
        *[
            (np.arange(3), {"shuffle_seed": seed}, (TypeError, ValueError), "shuffle_seed.*Received: .*None")
            for seed in (-1, 2.5, "a", True)
        ],
        *[
            (
                {key: np.arange(5), "value": np.arange(5)},
                {},
                PipelineError,
                "in UTF-8, not empty and without '/'.* Bring",
            )
            for key in ("", "\udc80", "a/b")
        ],
    ],
)
def test_what_cannot_be_written_leaves_nothing(tmp_path, source, options, error, text):
    given = dataset(source) if isinstance(source, tf.data.Dataset) else source
    with pytest.raises(error, match=text):
        write_records(given, tmp_path / "shards", **{"shuffle_seed": None} | options)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("folder", "error", "text"),
    [
        *[(wrong, TypeError, r"the path of a folder\. Received: .*\. Pass a string") for wrong in (5, None, b"abc")],
        ("", ValueError, r"the path of a new or empty folder\. Received: ''\. Name one"),
        *[
            (remote, ValueError, r"local folder.* Received: .*out'.* copy it")
            for remote in ("ram://out", "gs://bucket/out", Path("gs://bucket/out"))
        ],
    ],
)
def test_what_is_no_local_folder_is_refused(folder, error, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=text):
        write_records(np.arange(3), folder)
    assert os.listdir(tmp_path) == []


def test_an_image_that_does_not_decode_is_named_before_writing(photos, tmp_path):
    broken = sorted((photos / "b").iterdir())[1]
    broken.write_bytes(b"no image")
    with pytest.raises(PipelineError, match=rf"(?s)Expected images that TensorFlow decodes.*{broken.name}"):
        write_records(images(photos), tmp_path / "out" / "shards", shards=3)
    assert not (tmp_path / "out").exists()


def test_images_that_are_decoded_otherwise_are_written_decoded(tmp_path):
    pixels = np.arange(16, dtype=np.uint8).reshape(4, 4, 1)
    encoded = tf.io.encode_png(pixels).numpy()

    def decode(contents, label):
        return tf.cast(tf.io.decode_png(contents, channels=1), tf.float32) / 255.0, label

    source = Source(
        name="grey",
        dataset=lambda: tf.data.Dataset.from_tensors((encoded, 3)),
        decode=decode,
        encoded=lambda contents, label: (contents, label),
    )
    assert not write_records(source, tmp_path / "shards").image
    equal(next(iter(examples(records(tmp_path / "shards")))), (tf.constant(pixels / np.float32(255)), tf.constant(3)))


@pytest.mark.slow
def test_what_lies_sorted_by_class_is_written_mixed(tmp_path):
    data = np.arange(4000), np.sort(np.arange(4000) % 1000)
    index = write_records(data, tmp_path / "mixed", shards=3)
    batches = build_pipeline(records(tmp_path / "mixed"), batch_size=256, training=False, remainder="drop")
    # Independent draws would give 226 of the 1,000 classes.
    assert 215 < np.mean([len({*labels.numpy()}) for _, labels in batches]) < 235
    found = [(int(row), int(label)) for row, label in examples(records(tmp_path / "mixed"))]
    assert sorted(found) == list(zip(*data, strict=True))
    assert index.shuffle_seed == read_index(str(tmp_path / "mixed")).shuffle_seed == 0
    plain = write_records(data, tmp_path / "plain", shards=3, shuffle_seed=None)
    assert plain.shuffle_seed is None
    assert [int(row) for row, _ in examples(records(tmp_path / "plain"))] == list(range(4000))


def test_a_seed_gives_one_order_and_another_seed_another(tmp_path):
    indexes, orders = [], []
    for name, seed in [("a", 0), ("b", 0), ("c", 7)]:
        tf.random.set_seed(len(orders))  # which changes nothing
        indexes.append(write_records(np.arange(3000), tmp_path / name, shards=4, shuffle_seed=seed))
        orders.append([int(row) for row in examples(records(tmp_path / name))])
    assert orders[0] == orders[1] != orders[2]
    assert indexes[0] == indexes[1] == read_index(str(tmp_path / "b"))  # byte for byte
    assert sorted(orders[2]) == list(range(3000))


@pytest.mark.slow
def test_examples_that_exceed_the_buffer_are_mixed_within_it(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_MIXED_BYTES", 100 * 400)
    rows = tf.data.Dataset.range(1000).map(lambda number: tf.fill([50], number))
    for given in (rows, rows.filter(lambda row: True)):  # of known and unknown number
        folder = tmp_path / type(given).__name__
        write_records(given, folder)
        found = [int(row[0]) for row in examples(records(folder))]
        assert sorted(found) == list(range(1000))
        assert max(found[:50]) < 150
        assert found[:50] != sorted(found[:50])
