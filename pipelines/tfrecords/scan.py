"""Reads every record of a file with its checksums, finds which are damaged, and where whole ones begin again behind.

A search for the next whole record takes whatever reads as one: where the length of a record is damaged that itself
holds TFRecord data, records inside it would be found.
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow.python.lib.io import _pywrap_record_io as record_io  # reads at an offset, which nothing public does

from tfopt.pipelines.tfrecords.framing import FOOTER_BYTES, HEADER, header_offsets, is_header

_BLOCK_BYTES = 2**20
_WINDOW_BITS = {"GZIP": 31, "ZLIB": 15}


@dataclass(frozen=True, slots=True)
class Segment:
    """Whole records, one behind the other.

    Args:
        offset: The byte at which the first one begins.
        count: How many there are.
    """

    offset: int
    count: int


@dataclass(frozen=True, slots=True)
class Lost:
    """A part of a file that does not read as records.

    Args:
        record: The number of the record in the file, counted from 0; damaged parts before it count as one each.
        offset: The byte at which the part begins. None: unknown, in a compressed file.
        size_bytes: Its length. None: unknown, in a compressed file.
        why: What is wrong.
    """

    record: int
    offset: int | None
    size_bytes: int | None
    why: str


@dataclass(frozen=True, slots=True)
class Scan:
    """What a file holds.

    Args:
        segments: The whole records.
        lost: The rest.
    """

    segments: tuple[Segment, ...]
    lost: tuple[Lost, ...]

    @property
    def count(self) -> int:
        """The number of whole records."""
        return sum(segment.count for segment in self.segments)


def scan(path: str, compression: str) -> Scan:
    """Reads every record of a file.

    Args:
        path: The file.
        compression: "GZIP", "ZLIB", or "" for none.

    Raises:
        OSError, tf.errors.OpError: The file cannot be opened or read.
    """
    return _scan_compressed(path, compression) if compression else _scan_plain(path)


def _scan_plain(path: str) -> Scan:
    size, reader = tf.io.gfile.stat(path).length, record_io.RandomRecordReader(path)
    segments: list[Segment] = []
    lost: list[Lost] = []
    position = 0
    with tf.io.gfile.GFile(path, "rb") as file:
        while position < size:
            segment, end = _whole_records(reader, position)
            if segment.count:
                segments.append(segment)
            if end < size:
                number = sum(each.count for each in segments) + len(lost)
                position, why = _behind_damage(file, reader, end, size)
                lost.append(Lost(number, end, position - end, why))
            else:
                position = end
    return Scan(tuple(segments), tuple(lost))


def _whole_records(reader: Any, start: int) -> tuple[Segment, int]:
    """Reads up to the first record that is not whole, or to the end; returns where that is."""
    position, count = start, 0
    while True:
        try:
            _, position = reader.read(position)
        except (tf.errors.DataLossError, IndexError):  # IndexError: fewer bytes are left than a header takes
            return Segment(start, count), position
        count += 1


def _behind_damage(file: Any, reader: Any, position: int, size: int) -> tuple[int, str]:
    """Returns where whole records begin again behind a damaged one, and what is wrong with it."""
    head = _bytes_at(file, position, HEADER.size)
    if not is_header(head):
        cut = len(head) < HEADER.size
        why = "the file is cut inside its length" if cut else "its length, or the checksum of it, is altered"
        return _next_record(file, reader, position + 1, size), why
    end = position + HEADER.size + HEADER.unpack(head)[0] + FOOTER_BYTES
    if end == size or (end < size and is_header(_bytes_at(file, end, HEADER.size))):
        return end, "its data, or the checksum of it, is altered"
    following = _next_record(file, reader, position + 1, size)
    cut = following == size and end > size
    return following, "the file is cut inside it" if cut else "bytes inside it, or its end, are missing or altered"


def _next_record(file: Any, reader: Any, position: int, size: int) -> int:
    """Returns where the next whole record begins, or the size where there is none."""
    for start in range(position, size, _BLOCK_BYTES):
        block = _bytes_at(file, start, _BLOCK_BYTES + HEADER.size - 1)
        for offset in map(int, header_offsets(block)):
            end = start + offset + HEADER.size + HEADER.unpack_from(block, offset)[0] + FOOTER_BYTES
            # TensorFlow allocates any length that fits its checksum, before it looks at the file's size.
            if end <= size and _is_whole(reader, start + offset):
                return start + offset
    return size


def _is_whole(reader: Any, position: int) -> bool:
    try:
        reader.read(position)
    except (tf.errors.DataLossError, IndexError):
        return False
    return True


def _bytes_at(file: Any, position: int, count: int) -> bytes:
    file.seek(position)
    return bytes(file.read(count))


def _scan_compressed(path: str, compression: str) -> Scan:
    count = 0
    problem = _problem_of_stream(path, compression)
    try:
        for _ in record_io.RecordIterator(path, compression):
            count += 1
    except tf.errors.DataLossError as error:
        problem = problem or f"its data or checksums are altered ({error})"
    # TensorFlow may end without an error where the compressed stream is cut: only the stream itself tells.
    lost = () if problem is None else (Lost(count, None, None, f"{problem}; nothing behind it can be read"),)
    return Scan((Segment(0, count),) if count else (), lost)


def _problem_of_stream(path: str, compression: str) -> str | None:
    """Returns what is wrong with a compressed file."""
    stream, ended = zlib.decompressobj(_WINDOW_BITS[compression]), False
    try:
        for block in _blocks(path):
            while block:
                # gzip files may be joined end to end; zlib's, TensorFlow reads the first one only.
                if ended and compression == "ZLIB":
                    return "bytes follow the end of the compressed stream"
                if ended:
                    stream = zlib.decompressobj(_WINDOW_BITS[compression])
                stream.decompress(block, 16 * _BLOCK_BYTES)
                block, ended = stream.unused_data or stream.unconsumed_tail, stream.eof
    except zlib.error as error:
        return f"the compressed stream is altered ({error})"
    return None if ended else "the compressed stream is cut"


def _blocks(path: str) -> Iterator[bytes]:
    with tf.io.gfile.GFile(path, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            yield block
