"""Reads TFRecord framing: counts records by their headers, finds damaged ones, and where whole ones begin again.

A record is its length (8 bytes, little-endian), a checksum of those 8 bytes (4), the data, and a checksum of it (4).
Source: tensorflow/core/lib/io/record_writer.h.

The search for the next whole record takes whatever reads as one: if a record that holds TFRecord data itself has a
damaged length, records inside it are found.
"""

import os
import struct
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.lib.io import _pywrap_record_io as record_io  # reads at an offset, which nothing public does

from tfopt.errors import PipelineError

HEADER = struct.Struct("<QI")
_FOOTER_BYTES = 4
_BLOCK_BYTES = 2**20
_WINDOW_BITS = {"GZIP": 31, "ZLIB": 15}


@dataclass(frozen=True, slots=True)
class Segment:
    """Whole records, one after the other."""

    offset: int  # of the first one, in bytes
    count: int


@dataclass(frozen=True, slots=True)
class Lost:
    """A part of a file that does not read as records."""

    record: int  # number of the record in the file, from 0; damaged parts before it count as one each
    offset: int | None  # in bytes; None in a compressed file
    size_bytes: int | None  # None in a compressed file
    why: str


@dataclass(frozen=True, slots=True)
class Scan:
    """The contents of a file: whole records, and what is lost."""

    segments: tuple[Segment, ...]
    lost: tuple[Lost, ...]

    @property
    def count(self) -> int:
        """Number of whole records."""
        return sum(segment.count for segment in self.segments)


def compression_of(head: bytes) -> str:
    """Returns the compression of a file, "GZIP" or "" for none, from its first bytes."""
    # A plain file may begin with the bytes of gzip, as a length; the checksum tells.
    return "GZIP" if head.startswith(b"\x1f\x8b\x08") and not is_header(head) else ""


def is_header(head: bytes) -> bool:
    """Whether bytes are the header of a record."""
    return len(head) == HEADER.size and bool(header_offsets(head).size)


def header_offsets(data: bytes) -> Any:
    """Returns where headers may begin in `data`: wherever 12 bytes are a length and its checksum."""
    if len(data) < HEADER.size:
        return np.empty(0, np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(np.frombuffer(data, np.uint8), HEADER.size)
    stored = windows[:, 8:].astype("<u4") @ np.array([1, 1 << 8, 1 << 16, 1 << 24], "<u4")
    return np.flatnonzero(_masked_crc32c(windows[:, :8]) == stored)


def count_records(path: str) -> int:
    """Counts the records of an uncompressed file by their headers; refuses one that ends inside a record."""
    size, position, count = os.path.getsize(path), 0, 0
    with open(path, "rb") as file:
        while position < size:
            file.seek(position)
            header = file.read(HEADER.size)
            if len(header) < HEADER.size:
                raise _cut(path, count, position)
            position += HEADER.size + HEADER.unpack(header)[0] + _FOOTER_BYTES
            if position > size:
                raise _cut(path, count, size)
            count += 1
    return count


def scan(path: str, compression: str) -> Scan:
    """Reads every record of a file with its checksums; raises OSError or OpError if the file cannot be read."""
    return _scan_compressed(path, compression) if compression else _scan_plain(path)


def _cut(path: str, count: int, end: int) -> PipelineError:
    return PipelineError(
        f"Expected whole records. The TFRecord file {path!r} is cut inside record {count} (counted from 0; the file "
        f"ends at byte {end}), or its length there is altered. Write or copy it again; verify_records says more."
    )


def _masked_crc32c(rows: Any) -> Any:
    """Returns the checksum of each row of bytes as TFRecord stores it."""
    crc = np.full(len(rows), 0xFFFFFFFF, np.uint32)
    for column in rows.T:
        crc = _TABLE[(crc ^ column) & 0xFF] ^ (crc >> 8)
    crc = ~crc
    return ((crc >> 15) | (crc << 17)) + np.uint32(0xA282EAD8)


def _crc32c_table() -> Any:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(0x82F63B78), table >> 1)
    return table


_TABLE = _crc32c_table()


def _scan_plain(path: str) -> Scan:
    size, reader = tf.io.gfile.stat(path).length, record_io.RandomRecordReader(path)
    segments: list[Segment] = []
    lost: list[Lost] = []
    position = 0
    with tf.io.gfile.GFile(path, "rb") as file:
        while position < size:
            start, count = position, 0
            while (end := _end_of_record(reader, position)) is not None:
                position, count = end, count + 1
            if count:
                segments.append(Segment(start, count))
            if position < size:
                number, damaged = sum(each.count for each in segments) + len(lost), position
                position, why = _after_damage(file, reader, damaged, size)
                lost.append(Lost(number, damaged, position - damaged, why))
    return Scan(tuple(segments), tuple(lost))


def _end_of_record(reader: Any, position: int) -> int | None:
    """Returns where the record at `position` ends; None if it is not whole."""
    try:
        return int(reader.read(position)[1])
    except (tf.errors.DataLossError, IndexError):  # IndexError: fewer bytes are left than a header takes
        return None


def _after_damage(file: Any, reader: Any, position: int, size: int) -> tuple[int, str]:
    """Returns where whole records begin again after the damaged one at `position`, and what is wrong with that."""
    head = _bytes_at(file, position, HEADER.size)
    if not is_header(head):
        cut = len(head) < HEADER.size
        why = "the file is cut inside its length" if cut else "its length, or the checksum of it, is altered"
        return _next_record(file, reader, position + 1, size), why
    end = position + HEADER.size + HEADER.unpack(head)[0] + _FOOTER_BYTES
    if end == size or (end < size and is_header(_bytes_at(file, end, HEADER.size))):
        return end, "its data, or the checksum of it, is altered"
    following = _next_record(file, reader, position + 1, size)
    cut = following == size and end > size
    return following, "the file is cut inside it" if cut else "bytes inside it, or its end, are missing or altered"


def _next_record(file: Any, reader: Any, position: int, size: int) -> int:
    """Returns where the next whole record begins; `size` if there is none."""
    for start in range(position, size, _BLOCK_BYTES):
        block = _bytes_at(file, start, _BLOCK_BYTES + HEADER.size - 1)
        for offset in map(int, header_offsets(block)):
            end = start + offset + HEADER.size + HEADER.unpack_from(block, offset)[0] + _FOOTER_BYTES
            # TensorFlow allocates any length that matches its checksum before it looks at the file's size.
            if end <= size and _end_of_record(reader, start + offset) is not None:
                return start + offset
    return size


def _bytes_at(file: Any, position: int, count: int) -> bytes:
    file.seek(position)
    return bytes(file.read(count))


def _scan_compressed(path: str, compression: str) -> Scan:
    count = 0
    problem = _stream_problem(path, compression)
    try:
        for _ in record_io.RecordIterator(path, compression):
            count += 1
    except tf.errors.DataLossError as error:
        problem = problem or f"its data or checksums are altered ({error})"
    # TensorFlow may end without an error where the compressed stream is cut; only the stream itself tells.
    lost = () if problem is None else (Lost(count, None, None, f"{problem}; nothing after it can be read"),)
    return Scan((Segment(0, count),) if count else (), lost)


def _stream_problem(path: str, compression: str) -> str | None:
    """Returns what is wrong with a compressed stream, None if nothing is."""
    stream = zlib.decompressobj(_WINDOW_BITS[compression])
    try:
        with tf.io.gfile.GFile(path, "rb") as file:
            while block := stream.unused_data or stream.unconsumed_tail or file.read(_BLOCK_BYTES):
                # gzip files may be joined end to end; of joined zlib streams TensorFlow reads only the first.
                if stream.eof and compression == "ZLIB":
                    return "bytes follow the end of the compressed stream"
                if stream.eof:
                    stream = zlib.decompressobj(_WINDOW_BITS[compression])
                stream.decompress(block, 16 * _BLOCK_BYTES)
    except zlib.error as error:
        return f"the compressed stream is altered ({error})"
    return None if stream.eof else "the compressed stream is cut"
