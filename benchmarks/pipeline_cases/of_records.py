"""Cases of records of small rows: TFRecord files described by features, and those of write_records."""

from functools import partial

import numpy as np
import tensorflow as tf

from pipeline_cases import HAND, TFOPT, Case, Way, at_least
from pipeline_cases.by_grain import by_grain, of_records, write
from pipeline_cases.of_arrays import AUTOTUNE, equal, floats, tfopt
from tfopt.pipelines import records, write_records

FILES = 8
FEATURES = {"x": tf.io.FixedLenFeature((16,), tf.float32), "label": tf.io.FixedLenFeature((), tf.int64)}


def serialised(row, label):
    """A row as a tf.train.Example."""
    features = {
        "x": tf.train.Feature(float_list=tf.train.FloatList(value=row)),
        "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
    }
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


def write_plain(folder, records):
    """Writes TFRecord files, as many programs do, and returns their paths."""
    paths = [str(folder / f"plain-{number}.tfrecord") for number in range(FILES)]
    writers = [tf.io.TFRecordWriter(path) for path in paths]
    for number, record in enumerate(records):
        writers[number % FILES].write(record)
    for writer in writers:
        writer.close()
    return paths


def side_by_side(paths, buffer):
    """By hand: files in random order, read side by side, then a buffer."""
    files = tf.data.Dataset.from_tensor_slices(paths).shuffle(len(paths))
    reading = files.interleave(
        tf.data.TFRecordDataset, cycle_length=len(paths), num_parallel_calls=AUTOTUNE, deterministic=False
    )
    return reading.shuffle(buffer)


def parsed_in_batches(paths, batch, buffer):
    """By hand: serialised records are shuffled and batched, and a batch is parsed at once."""
    batches = side_by_side(paths, buffer).batch(batch, drop_remainder=True)
    return batches.map(partial(tf.io.parse_example, features=FEATURES), num_parallel_calls=AUTOTUNE).prefetch(AUTOTUNE)


def grains_way(folder, data, batch):
    """Records of ArrayRecord, a row's bytes and its label's each."""

    def row(record):
        return np.frombuffer(record, np.float32, 16), np.frombuffer(record, np.int64, 1, 64)[0]

    path = write(folder / "rows.array_record", (x.tobytes() + y.tobytes() for x, y in zip(*data, strict=True)))
    return by_grain("ArrayRecord, shuffle, map, batch", of_records(path), batch, function=row)


def features(folder, scale):
    """TFRecord files of other programs."""
    data, batch = floats(scale.records), scale.batch
    paths = write_plain(folder, map(serialised, *data))
    return Case(
        question=f"{scale.records:,} TFRecords of 16 floats and a label, in {FILES} files",
        goal=at_least(0.95),
        ways=[
            Way(TFOPT, "records(paths, features=…)", lambda: tfopt(records(paths, features=FEATURES), batch)),
            Way(
                HAND,
                "interleave, shuffle, batch, parse_example",
                lambda: parsed_in_batches(paths, batch, scale.records),
            ),
            grains_way(folder, data, batch),
        ],
        examples=scale.records,
        batch=batch,
        right=equal(data[0]),
    )


def written(folder, scale):
    """The format of write_records."""
    data, batch = floats(scale.records), scale.batch
    paths = write_plain(folder, map(serialised, *data))
    write_records(data, folder / "own", shards=FILES)
    return Case(
        question="The same rows as write_records wrote them, with checksums and index",
        goal=at_least(0.5),
        ways=[
            Way(TFOPT, "records(folder)", lambda: tfopt(records(folder / "own"), batch)),
            Way(
                HAND,
                "plain TFRecords: interleave, shuffle, batch, parse_example",
                lambda: parsed_in_batches(paths, batch, scale.records),
            ),
            grains_way(folder, data, batch),
        ],
        examples=scale.records,
        batch=batch,
        right=equal(data[0]),
    )


CASES = {"records, features": features, "records, written": written}
