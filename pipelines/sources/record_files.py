"""Finds TFRecord files, and walks them from length to length to check and count their records.

A record is: its length (8 bytes, little-endian), a checksum of those 8 bytes (4), the data, a checksum of it (4).
Source: tensorflow/core/lib/io/record_writer.h.
"""

import os
import struct
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfopt.errors import PipelineError

_HEADER = struct.Struct("<QI")
_FOOTER_BYTES = 4


def find_files(paths: Any) -> list[str]:
    """Returns the files that a path, a glob or a list of paths stands for.

    Raises:
        TypeError: `paths` is none of these.
        PipelineError: Nothing matches, or a path is missing or a folder.
    """
    if isinstance(paths, str | os.PathLike):
        pattern = os.fspath(paths)
        found = [pattern] if tf.io.gfile.exists(pattern) else sorted(tf.io.gfile.glob(pattern))
        if not found:
            raise PipelineError(f"Expected TFRecord files. Nothing matches {pattern!r}.")
        return _only_files(found)
    if not isinstance(paths, Sequence) or not all(isinstance(path, str | os.PathLike) for path in paths):
        raise TypeError(f"records() expects a path, a glob or a list of paths. Received: {paths!r}")
    if not paths:
        raise PipelineError("Expected TFRecord files. Received an empty list.")
    return _only_files([os.fspath(path) for path in paths])


def check_records(files: Iterable[str], compression: str | None) -> tuple[str, int | None]:
    """Returns the compression ("" for none) and the number of records, None where it cannot be known cheaply.

    Raises:
        PipelineError: A file is empty, cut inside a record, no TFRecord file, or compressed unlike the others.
    """
    counts, kinds = [], {}
    for path in files:
        if tf.io.gfile.stat(path).length == 0:
            raise PipelineError(
                f"The TFRecord file {path!r} is empty. It was perhaps not written to its end; remove it."
            )
        with tf.io.gfile.GFile(path, "rb") as file:
            kind = compression or _compression_of(path, file.read(_HEADER.size))
        kinds[kind] = path
        counts.append(_count(path) if kind == "" and "://" not in path else None)
    if len(kinds) > 1:
        raise PipelineError(f"Expected files of one compression. Found unlike ones: {sorted(kinds.values())}.")
    known = [count for count in counts if count is not None]
    return next(iter(kinds)), sum(known) if len(known) == len(counts) else None


def _only_files(paths: list[str]) -> list[str]:
    for path in paths:
        if not tf.io.gfile.exists(path):
            raise PipelineError(f"There is no TFRecord file {path!r}.")
        if tf.io.gfile.isdir(path):
            raise PipelineError(f"Expected a TFRecord file. {path!r} is a folder: give a glob such as {path + '/*'!r}.")
    return paths


def _compression_of(path: str, head: bytes) -> str:
    # A plain file may begin with the bytes of gzip, as a length; its checksum settles it.
    if len(head) == _HEADER.size and _masked_crc32c(head[:8]) == _HEADER.unpack(head)[1]:
        return ""
    if head.startswith(b"\x1f\x8b\x08"):
        return "GZIP"
    raise PipelineError(f"{path!r} is no TFRecord file, or is cut inside its first record: it begins with {head!r}.")


def _count(path: str) -> int:
    """Counts the records of a plain file; reads their headers only."""
    size, position, count = os.path.getsize(path), 0, 0
    with open(path, "rb") as file:
        while position < size:
            file.seek(position)
            header = file.read(_HEADER.size)
            if len(header) < _HEADER.size:
                raise _cut(path, count, position)
            position += _HEADER.size + _HEADER.unpack(header)[0] + _FOOTER_BYTES
            if position > size:
                raise _cut(path, count, size)
            count += 1
    return count


def _cut(path: str, count: int, end: int) -> PipelineError:
    return PipelineError(
        f"The TFRecord file {path!r} is cut inside record {count} (counted from 0; the file ends at byte {end}). "
        "Write or copy it again."
    )


def _masked_crc32c(data: bytes) -> int:
    """Returns the checksum of a few bytes as TFRecord stores it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
