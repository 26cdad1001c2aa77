import numpy as np
import pytest
import tensorflow as tf

from tfopt.pipelines.tfrecords.write import write_records


@pytest.fixture
def plain_file(tmp_path):
    """Writes one file of these records; returns its path."""

    def write(records, name="a.tfrecord", compression=""):
        with tf.io.TFRecordWriter(str(tmp_path / name), compression) as writer:
            for record in records:
                writer.write(record)
        return tmp_path / name

    return write


@pytest.fixture
def shards(tmp_path):
    """Writes a folder of 6 numbered examples in 3 shards; returns its path."""

    def write(compression=None, name="shards"):
        write_records(np.arange(6, dtype=np.int32), tmp_path / name, shards=3, compression=compression)
        return tmp_path / name

    return write


@pytest.fixture
def flip():
    """Flips one bit of a file."""

    def change(path, position, bit=0):
        contents = bytearray(path.read_bytes())
        contents[position] ^= 1 << bit
        path.write_bytes(contents)

    return change
