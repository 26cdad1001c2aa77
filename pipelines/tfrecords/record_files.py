"""Finds the files that `records` and `verify_records` are given, and checks what a few bytes of each can tell.

A record is its length (8 bytes, little-endian), a checksum of those 8 bytes (4), the data, and a checksum of it (4).
Source: tensorflow/core/lib/io/record_writer.h.
"""

import os
import struct
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.internals.runtime import RecordIterator
from tfopt.pipelines.shared.paths import expect_reachable, expect_utf8, is_remote
from tfopt.pipelines.tfrecords.format import Index, Shard, ends_sha256, has_index, read_index

HEADER = struct.Struct("<QI")
FOOTER_BYTES = 4
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclass(frozen=True, slots=True)
class RecordFile:
    """A file of records, with what the index beside it says; None for both if no index names the file."""

    path: str
    shard: Shard | None = None
    index: Index | None = None


def find_files(paths: Any, read: Callable[[str], Index | None] = read_index) -> list[RecordFile]:
    """Returns the files that a folder with an index, a path, a glob or a list of paths stands for.

    `read` reads the index of a folder, and returns None to ignore it. Default: a damaged index is an error.
    """
    folders = cache(lambda folder: read(folder) if has_index(folder) else None)
    files = []
    for path in _expand(paths):
        if not tf.io.gfile.exists(expect_utf8(path)):
            raise PipelineError(f"Expected TFRecord files. There is no TFRecord file {path!r}. Check the path.")
        if tf.io.gfile.isdir(path):
            raise PipelineError(
                f"Expected a TFRecord file. {path!r} is a folder without an index: pass a glob such as {path + '/*'!r}."
            )
        index = folders(os.path.dirname(path) or ".")
        shards = {shard.name: shard for shard in index.shards} if index else {}
        shard = shards.get(os.path.basename(path))
        files.append(RecordFile(path, shard, index if shard else None))
    return files


def missing_shards(files: list[RecordFile]) -> list[RecordFile]:
    """Returns the shards that an index beside the files names but that do not exist."""
    indexes = {os.path.dirname(file.path): file.index for file in files if file.index is not None}
    named = [
        RecordFile(os.path.join(folder, shard.name), shard, index)
        for folder, index in indexes.items()
        for shard in index.shards
    ]
    return [file for file in named if not tf.io.gfile.exists(file.path)]


def expect_all_shards(files: list[RecordFile]) -> None:
    """Refuses files beside which a shard is missing, which a glob would silently skip."""
    missing = [file.path for file in missing_shards(files)]
    if missing:
        raise PipelineError(
            f"Expected every shard that the index beside {files[0].path!r} names, even if only some are given. "
            f"Missing: {', '.join(map(repr, missing[:5]))}{', …' * (len(missing) > 5)}. Copy or write them again."
        )


def expect_compression(compression: Any) -> None:
    """Refuses an unknown compression."""
    if compression is not None and compression not in ("GZIP", "ZLIB"):
        raise ValueError(
            f"Expected a compression: 'GZIP' or 'ZLIB'. Received: {compression!r}. Pass one of them, in capitals, or "
            "leave it out."
        )


def check_file(file: RecordFile, compression: str | None) -> tuple[int | None, Any]:
    """Checks a file without reading it whole; returns its number of records and `record_offsets`.

    Either is None if it takes more than the headers of a local file.
    """
    shard, kind = file.shard, kind_of(file, compression)
    if shard is not None:
        size = tf.io.gfile.stat(file.path).length
        if size != shard.size_bytes:
            raise index_mismatch(file, f"{shard.size_bytes:,} bytes", f"{size:,}")
    else:
        expect_contents(file.path)
        _expect_records(file.path, kind, guessed=compression is None)
    offsets = None if kind or is_remote(file.path) else record_offsets(file.path)
    count = None if offsets is None else len(offsets) - 1
    if shard is None:
        return count, offsets
    if count not in (None, shard.count):
        raise index_mismatch(file, f"{shard.count:,} records", f"{count:,}")
    if ends_sha256(file.path) != shard.ends_sha256:
        raise index_mismatch(file, "the records that were written", "others, or damaged ones, at its beginning or end")
    return shard.count, offsets


def common_kind(files: list[RecordFile], compression: str | None) -> str:
    """Returns the compression of all files, "" for none; refuses files that differ."""
    kinds = {kind_of(file, compression): file.path for file in files}
    if len(kinds) > 1:
        raise PipelineError(
            f"Expected files of one compression. Found different ones: {sorted(kinds.values())}. Make a source of each "
            "kind, or write them alike."
        )
    return next(iter(kinds))


def kind_of(file: RecordFile, compression: str | None) -> str:
    """Returns the compression of a file, "" for none; refuses an argument that differs from the index."""
    if file.index is None:
        return compression or compression_of(_head(file.path))
    if compression not in (None, file.index.compression):
        raise ValueError(
            f"Expected no `compression`, or {file.index.compression or None!r}, which the index beside {file.path!r} "
            f"names. Received: {compression!r}. Leave it out."
        )
    return file.index.compression


def index_mismatch(file: RecordFile, expected: str, found: str) -> PipelineError:
    """Returns the error for a file that does not match its index."""
    return PipelineError(
        f"Expected {expected} in {file.path!r}, as the index beside it says. Found {found}. Copy or write it again; "
        "verify_records says more."
    )


def expect_contents(path: str) -> None:
    """Refuses an empty file."""
    if tf.io.gfile.stat(path).length == 0:
        raise PipelineError(
            f"Expected records in every file. The TFRecord file {path!r} is empty; perhaps its writer was stopped. "
            "Write it again, or remove it."
        )


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


def record_offsets(path: str) -> Any:
    """Returns at which bytes the records of an uncompressed file begin, and the last one ends, int64; reads headers.

    Refuses a file that ends inside a record.
    """
    size, position, offsets = os.path.getsize(path), 0, array("q", [0])
    with open(path, "rb") as file:
        while position < size:
            file.seek(position)
            header = file.read(HEADER.size)
            if len(header) == HEADER.size:
                position += HEADER.size + HEADER.unpack(header)[0] + FOOTER_BYTES
            if len(header) < HEADER.size or position > size:
                raise PipelineError(
                    f"Expected whole records. The TFRecord file {path!r} is cut inside record {len(offsets) - 1} "
                    f"(counted from 0; the file ends at byte {size}), or its length there is altered. Write or copy it "
                    "again; verify_records says more."
                )
            offsets.append(position)
    return np.array(offsets)


def _expect_records(path: str, kind: str, *, guessed: bool) -> None:
    """Refuses a file that does not begin with a record; TensorFlow may take a compressed one for an empty one."""
    head = _head(path)
    if guessed and not kind and not is_header(head):
        raise PipelineError(
            f"Expected TFRecord files. {path!r} is no TFRecord file, or is cut inside its first record: it begins "
            f"with {head!r}. Write it again, leave it out, or pass its `compression`. Read images "
            "with images(), text with lines(), and other files with files()."
        )
    try:
        readable = not kind or next(RecordIterator(path, kind), None) is not None
    except tf.errors.DataLossError:
        readable = False
    if not readable:
        raise PipelineError(
            f"Expected a record in every file. None can be read from {path!r} as {kind}: it is cut, damaged, empty or "
            "of another compression. Write or copy it again, leave it out, or correct `compression`."
        )


def _head(path: str) -> bytes:
    with tf.io.gfile.GFile(path, "rb") as file:
        return bytes(file.read(HEADER.size))


def _expand(paths: Any) -> list[str]:
    if isinstance(paths, str | os.PathLike):
        path = expect_reachable(os.fspath(paths), by_tensorflow=True)
        if has_index(path):
            return [os.path.join(path, shard.name) for shard in read_index(path).shards]
        found = [path] if tf.io.gfile.exists(expect_utf8(path)) else _matching(path)
        if not found:
            raise PipelineError(f"Expected TFRecord files. Nothing matches {path!r}. Check the path.")
        return found
    if not isinstance(paths, Sequence) or not all(isinstance(path, str | os.PathLike) for path in paths):
        raise TypeError(
            f"Expected a path, a glob or a list of paths of records. Received: {paths!r}. Pass strings or pathlib "
            "paths."
        )
    if not paths:
        raise PipelineError("Expected TFRecord files. Received an empty list. Check what fills it.")
    return [expect_reachable(os.fspath(path), by_tensorflow=True) for path in paths]


def _matching(pattern: str) -> list[str]:
    try:
        return sorted(tf.io.gfile.glob(pattern))
    except UnicodeDecodeError as error:
        return [expect_utf8(error.object.decode(errors="surrogateescape"))]


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
