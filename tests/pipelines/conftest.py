import dataclasses

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from tfopt.hardware import host
from tfopt.pipelines import write_records
from tfopt.pipelines.cache import choice
from tfopt.pipelines.device import placing
from tfopt.pipelines.stages import batch_stages


@pytest.fixture
def free_memory(monkeypatch):
    """Sets the free memory that the planner sees, in MiB."""

    def set_mib(mib):
        fake = dataclasses.replace(host(), memory_available_mib=mib)
        for module in (choice, placing, batch_stages):
            monkeypatch.setattr(module, "host", lambda: fake)

    return set_mib


@pytest.fixture(autouse=True)
def _memory_and_state(free_memory, monkeypatch, tmp_path):
    free_memory(16384.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tf.random.set_seed(None)
    yield
    tf.random.set_seed(None)


@pytest.fixture
def picture():
    """Writes an image whose pixels say which it is; returns its path as text."""

    def write(path, shade=0, size=(6, 5), mode="RGB"):
        path.parent.mkdir(parents=True, exist_ok=True)
        height, width = size
        pixels = np.full((height, width, 3), shade, np.uint8)
        pixels[0, 0] = (shade, 255 - shade, 7)
        Image.fromarray(pixels).convert(mode).save(path)
        return str(path)

    return write


@pytest.fixture
def photos(tmp_path, picture):
    """A folder of 3 classes with 4 PNG images each, shades 0 to 11 in order."""
    for index in range(12):
        picture(tmp_path / "photos" / "cba"[2 - index // 4] / f"{index:02}.png", shade=index)
    return tmp_path / "photos"


@pytest.fixture
def record_files(tmp_path):
    """Writes files of 10 records each, numbered through; returns their paths."""

    def write(files=3, compression=""):
        paths = []
        for file in range(files):
            path = str(tmp_path / f"part-{file}.tfrecord{'.gz' if compression else ''}")
            with tf.io.TFRecordWriter(path, compression) as writer:
                for number in range(10 * file, 10 * file + 10):
                    value = tf.train.Feature(int64_list=tf.train.Int64List(value=[number]))
                    example = tf.train.Example(features=tf.train.Features(feature={"number": value}))
                    writer.write(example.SerializeToString())
            paths.append(path)
        return paths

    return write


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
        write_records(
            np.arange(6, dtype=np.int32), tmp_path / name, shards=3, compression=compression, shuffle_seed=None
        )
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
