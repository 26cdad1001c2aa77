"""TFRecord files as a source; they are walked from length to length to check and count their records.

A record is: its length (8 bytes, little-endian), a checksum of those 8 bytes (4), the data, a checksum of it (4).
Source: tensorflow/core/lib/io/record_writer.h.
"""

import os
import struct
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from tfopt.errors import PipelineError, unknown_name
from tfopt.pipelines.seeds import shuffle
from tfopt.pipelines.sources.source import Source, expect_utf8

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

_SIDE_BY_SIDE = 16  # files read at once; fixed, or the order under a seed would depend on the number of cores
_HEADER = struct.Struct("<QI")
_FOOTER_BYTES = 4


def records(
    paths: Paths,
    *,
    features: dict[str, Any] | None = None,
    parse: Callable[[Any], Any] | None = None,
    compression: str | None = None,
) -> Source:
    """Returns the records of TFRecord files as a source.

    Uncompressed files are walked from length to length when the source is made: a file cut inside a record is found,
    and the number of examples is known. The number is unknown for compressed files; data of unknown length makes
    Keras count one optimizer iteration too many in each epoch, so prefer uncompressed ones for training.

    A file cut exactly between two records cannot be told from a whole one.

    Args:
        paths: A path, a glob, or a list of paths.
        features: The description of a serialised `tf.train.Example`, as `tf.io.parse_single_example` takes it; the
            examples are then dicts of tensors.
        parse: In place of `features`, a deterministic function from a serialised record (scalar string tensor) to an
            example. Default, where neither is given: the examples are the serialised records.
        compression: "GZIP" or "ZLIB". Default: found from the first bytes (plain or gzip).

    Returns:
        The source; in order of the list (a glob is sorted), or, where the pipeline shuffles, read side by side.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: Both `features` and `parse` are given, or the compression is unknown.
        PipelineError: Nothing matches, or a file is empty, cut inside a record, or no TFRecord file.

    Example:
        >>> spec = {"label": tf.io.FixedLenFeature([], tf.int64)}
        >>> source = records("train-*.tfrecord", features=spec)  # doctest: +SKIP
    """
    if features is not None and parse is not None:
        raise ValueError("records() expects `features` or `parse`. Received both: parse the features in `parse`.")
    if features is not None and not isinstance(features, dict):
        raise TypeError(
            f"records() expects a dict of features. Received: {type(features).__name__}. Pass names with their "
            "description, such as {'label': tf.io.FixedLenFeature([], tf.int64)}."
        )
    if compression is not None and compression not in ("GZIP", "ZLIB"):
        raise unknown_name("compression", compression, ("GZIP", "ZLIB"))
    files = _find_files(paths)
    compression, count = _check_records(files, compression)
    read = partial(tf.data.TFRecordDataset, compression_type=compression)
    return Source(
        name=f"records in {len(files)} file{'s' * (len(files) > 1)}{' (' + compression + ')' if compression else ''}",
        dataset=lambda: read(files),
        count=count,
        decode=partial(_parse_features, features) if features is not None else parse,
        shuffled=partial(_side_by_side, files, read),
    )


def _parse_features(features: dict[str, Any], serialized: Any) -> Any:
    return tf.io.parse_single_example(serialized, features)


def _side_by_side(files: list[str], read: Callable[[Any], Any], seed: int | None) -> Any:
    """Shuffles the files and interleaves their records; with a seed, in the same order on every iteration."""
    order = tf.data.Dataset.from_tensor_slices(files)
    order = shuffle(order, len(files), seed, reshuffle=seed is None)
    return order.interleave(read, cycle_length=min(len(files), _SIDE_BY_SIDE), num_parallel_calls=tf.data.AUTOTUNE)


def _find_files(paths: Any) -> list[str]:
    """Returns the files that a path, a glob or a list of paths stands for."""
    if isinstance(paths, str | os.PathLike):
        pattern = os.fspath(paths)
        found = [pattern] if tf.io.gfile.exists(expect_utf8(pattern)) else _matching(pattern)
        if not found:
            raise PipelineError(f"Expected TFRecord files. Nothing matches {pattern!r}. Check the path.")
        return _only_files(found)
    if not isinstance(paths, Sequence) or not all(isinstance(path, str | os.PathLike) for path in paths):
        raise TypeError(
            f"records() expects a path, a glob or a list of paths. Received: {paths!r}. Pass texts or pathlib paths."
        )
    if not paths:
        raise PipelineError("Expected TFRecord files. Received an empty list. Check what fills it.")
    return _only_files([os.fspath(path) for path in paths])


def _check_records(files: Iterable[str], compression: str | None) -> tuple[str, int | None]:
    """Returns the compression ("" for none) and the number of records, None where it cannot be known cheaply."""
    counts, kinds = [], {}
    for path in files:
        if tf.io.gfile.stat(path).length == 0:
            raise PipelineError(
                f"Expected records in every file. The TFRecord file {path!r} is empty. It was perhaps not written to "
                "its end: write it again, or remove it."
            )
        with tf.io.gfile.GFile(path, "rb") as file:
            kind = compression or _compression_of(path, file.read(_HEADER.size))
        kinds[kind] = path
        counts.append(_count(path) if kind == "" and "://" not in path else None)
    if len(kinds) > 1:
        raise PipelineError(
            f"Expected files of one compression. Found unlike ones: {sorted(kinds.values())}. Make a source of each "
            "kind, or write them alike."
        )
    known = [count for count in counts if count is not None]
    return next(iter(kinds)), sum(known) if len(known) == len(counts) else None


def _matching(pattern: str) -> list[str]:
    try:
        return sorted(tf.io.gfile.glob(pattern))
    except UnicodeDecodeError as error:
        return [expect_utf8(error.object.decode(errors="surrogateescape"))]


def _only_files(paths: list[str]) -> list[str]:
    for path in paths:
        if not tf.io.gfile.exists(expect_utf8(path)):
            raise PipelineError(f"Expected TFRecord files. There is no TFRecord file {path!r}. Check the path.")
        if tf.io.gfile.isdir(path):
            raise PipelineError(f"Expected a TFRecord file. {path!r} is a folder: give a glob such as {path + '/*'!r}.")
    return paths


def _compression_of(path: str, head: bytes) -> str:
    # A plain file may begin with the bytes of gzip, as a length; its checksum settles it.
    if len(head) == _HEADER.size and _masked_crc32c(head[:8]) == _HEADER.unpack(head)[1]:
        return ""
    if head.startswith(b"\x1f\x8b\x08"):
        return "GZIP"
    raise PipelineError(
        f"Expected TFRecord files. {path!r} is no TFRecord file, or is cut inside its first record: it begins with "
        f"{head!r}. Write it again, leave it out, or say its `compression`."
    )


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
        f"Expected whole records. The TFRecord file {path!r} is cut inside record {count} (counted from 0; the file "
        f"ends at byte {end}). Write or copy it again."
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
