"""How much is read and computed before the first batch comes: a share of the epoch, counted, not timed."""

import itertools
import time

import numpy as np
import pytest
import tensorflow as tf

from tfopt.pipelines import build_pipeline, write_records
from tfopt.pipelines.sources.records import records

COUNT = 400
MOST = 100  # calls of `transform` for a batch of four, those that run ahead of it included


@pytest.fixture
def calls():
    return []


@pytest.fixture
def counting(calls):
    """A `transform` that counts its calls, each slow enough that a cache on disk lets few wait for its writing."""

    def count():
        calls.append(1)
        time.sleep(0.002)
        return np.int64(0)

    def transform(*parts):
        counted = tf.numpy_function(count, [], tf.int64)
        with tf.control_dependencies([counted]):
            same = tf.nest.map_structure(tf.identity, parts)
        return same if len(same) > 1 else same[0]

    return transform


def images(folder, picture):
    for index in range(COUNT):
        picture(folder / "ab"[index % 2] / f"{index:03}.jpg", shade=index % 256)
    return str(folder)


def arrays(folder, picture):
    return np.arange(COUNT, dtype="float32")


def npy(folder, picture):
    np.save(folder / "rows.npy", np.arange(COUNT))
    return str(folder / "rows.npy")


def own_records(folder, picture):
    write_records(np.ones((COUNT, 16), "float32"), folder / "records")
    return str(folder / "records")


def parsed_records(folder, picture):
    value = tf.train.Feature(float_list=tf.train.FloatList(value=[1.0] * 16))
    example = tf.train.Example(features=tf.train.Features(feature={"row": value})).SerializeToString()
    with tf.io.TFRecordWriter(str(folder / "a.tfrecord")) as writer:
        for _ in range(COUNT):
            writer.write(example)
    return records(str(folder / "a.tfrecord"), features={"row": tf.io.FixedLenFeature((16,), tf.float32)})


def generated(folder, picture):
    dataset = tf.data.Dataset.from_generator(lambda: iter(range(COUNT)), output_signature=tf.TensorSpec((), tf.int64))
    return dataset.apply(tf.data.experimental.assert_cardinality(COUNT))


SOURCES = [images, arrays, npy, own_records, parsed_records, generated]
CACHES = [None, "memory", "disk"]
TABLE = [(*row, [None, 1][number % 2]) for number, row in enumerate(itertools.product(SOURCES, CACHES))]


@pytest.mark.slow
@pytest.mark.parametrize(("source", "cache", "seed"), TABLE)
def test_the_first_batch_of_a_shuffle_waits_for_few_examples(source, cache, seed, calls, counting, picture, tmp_path):
    options = {"cache": str(tmp_path / "cache") if cache == "disk" else cache, "cache_key": "1", "seed": seed}
    dataset = build_pipeline(
        source(tmp_path, picture), batch_size=4, transform=counting, prefetch=1, device=None, **options
    )
    calls.clear()
    batches = iter(dataset)
    next(batches)
    assert 4 <= len(calls) < MOST
    assert 4 * (1 + len(list(batches))) == COUNT


@pytest.mark.slow
def test_the_first_batch_of_an_endless_source_comes():
    read = []

    def endless():
        for number in itertools.count():
            read.append(number)
            yield number

    source = tf.data.Dataset.from_generator(endless, output_signature=tf.TensorSpec((), tf.int64))
    batches = iter(build_pipeline(source, batch_size=4, transform=lambda number: number + 0, prefetch=1))
    next(batches)
    assert len(read) < 15_000
