"""What a file of records holds, read from its bytes: headers, offsets, and what is whole of a damaged one."""

import random

import numpy as np
import pytest
import tensorflow as tf

from tfopt.pipelines.shared.problems import Problem
from tfopt.pipelines.tfrecords import verify as module
from tfopt.pipelines.tfrecords.record_files import (
    _masked_crc32c,
)
from tfopt.pipelines.tfrecords.verify import Scan, scan

RECORDS = [b"first", b"", b"third " * 9, b"\x00" * 30, b"fifth"]
STARTS = [0, 21, 37, 107, 153, 174]  # 16 bytes around each record


def read(path):
    """The records that are whole."""
    contents, found = path.read_bytes(), []
    for position, count in scan(str(path), "").runs:
        for _ in range(count):
            end = position + 12 + int.from_bytes(contents[position : position + 8], "little")
            found.append(contents[position + 12 : end])
            position = end + 4
    return found


def test_every_cut_loses_what_is_behind_it(plain_file):
    path = plain_file(RECORDS)
    whole = path.read_bytes()
    for length in range(1, len(whole)):
        path.write_bytes(whole[:length])
        kept = sum(end <= length for end in STARTS[1:])
        found = scan(str(path), "")
        assert found.count == kept
        if length not in STARTS:
            why = "the file is cut inside its length" if length < STARTS[kept] + 12 else "the file is cut inside it"
            what = f"record {kept}, counted from 0 (bytes {STARTS[kept]} to {length}): {why}"
            assert found.lost == (Problem(str(path), "cut", what, kept, STARTS[kept], length - STARTS[kept]),)


def test_bytes_taken_out_of_the_middle(plain_file):
    path = plain_file(RECORDS)
    whole = path.read_bytes()
    for start in range(STARTS[1], STARTS[-2]):
        path.write_bytes(whole[:start] + whole[start + 3 :])
        # Three bytes touch one record or two; all others are kept, in order.
        touched = {number for number in range(5) if STARTS[number] < start + 3 and start < STARTS[number + 1]}
        assert read(path) == [record for number, record in enumerate(RECORDS) if number not in touched]


def test_the_search_reaches_over_its_blocks(plain_file, flip, monkeypatch):
    monkeypatch.setattr(module, "_BLOCK_BYTES", 7)
    path = plain_file(RECORDS)
    flip(path, STARTS[2])
    (lost,) = scan(str(path), "").lost
    assert lost.size_bytes == STARTS[3] - STARTS[2]


def test_a_length_that_cannot_be_is_never_allocated(plain_file):
    path = plain_file([b"x" * 100])
    contents = bytearray(path.read_bytes())
    # The header of a record of 2**62 bytes, with the right checksum, inside a record whose length is altered.
    contents[0] ^= 1
    length = np.frombuffer((2**62).to_bytes(8, "little"), np.uint8)
    contents[50:62] = length.tobytes() + _masked_crc32c(length[None])[0].tobytes()
    path.write_bytes(contents)
    assert scan(str(path), "").count == 0


@pytest.mark.parametrize("compression", ["GZIP", "ZLIB"])
def test_a_compressed_file_keeps_what_is_before_a_cut_or_damage(plain_file, flip, compression):
    path = plain_file(RECORDS, compression=compression)
    whole = path.read_bytes()
    for length in range(1, len(whole)):
        path.write_bytes(whole[:length])
        found = scan(str(path), compression)
        (lost,) = found.lost
        assert lost.record == found.count
        assert "the compressed stream is cut; nothing after it" in lost.what
    rows = [random.Random(number).randbytes(40_000) for number in range(20)]
    path = plain_file(rows, compression=compression)
    flip(path, path.stat().st_size // 2, bit=4)
    found = scan(str(path), compression)
    assert 0 < found.lost[0].record == found.count < 20
    kept = tf.data.TFRecordDataset([str(path)], compression).take(found.count)
    assert [record.numpy() for record in kept] == rows[: found.count]


def test_a_compressed_file_that_is_much_larger_inside(plain_file, monkeypatch):
    monkeypatch.setattr(module, "_BLOCK_BYTES", 64)
    assert scan(str(plain_file([bytes(200_000)], compression="GZIP")), "GZIP") == Scan(((0, 1),), ())


def test_compressed_files_that_were_joined(plain_file):
    path = plain_file(RECORDS, compression="GZIP")
    path.write_bytes(path.read_bytes() * 2)
    assert scan(str(path), "GZIP") == Scan(((0, 10),), ())
    # TensorFlow reads the first of two zlib streams only.
    path = plain_file(RECORDS, compression="ZLIB")
    path.write_bytes(path.read_bytes() * 2)
    assert "bytes follow the end" in scan(str(path), "ZLIB").lost[0].what
