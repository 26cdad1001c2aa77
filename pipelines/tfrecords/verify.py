"""Reads files of records whole, for `verify_records` and for `records(on_bad_record="skip")`.

What reads as a record is searched for after a damaged one; if that held TFRecord data itself and its length is damaged,
records inside it are found.
"""

import math
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.hardware import host
from tfopt.internals.runtime import RandomRecordReader, RecordIterator
from tfopt.pipelines.shared.paths import is_remote, names_in
from tfopt.pipelines.shared.problems import Problem, Report, listed
from tfopt.pipelines.tfrecords.format import INDEX_NAME, Index, file_sha256, has_index, read_index
from tfopt.pipelines.tfrecords.record_files import (
    FOOTER_BYTES,
    HEADER,
    Paths,
    RecordFile,
    expect_compression,
    find_files,
    header_offsets,
    is_header,
    kind_of,
    missing_shards,
)

_BLOCK_BYTES = 2**20
_WINDOW_BITS = {"GZIP": 31, "ZLIB": 15}


@dataclass(frozen=True, slots=True)
class Scan:
    """The contents of a file: whole records, and what is lost."""

    runs: tuple[tuple[int, int], ...]  # of whole records: where each begins, in bytes, and how many they are
    lost: tuple[Problem, ...]  # each damaged part counts as one record in the numbers of those behind it

    @property
    def count(self) -> int:
        """Number of whole records."""
        return sum(count for _, count in self.runs)


@dataclass(frozen=True, slots=True, repr=False)
class RecordsReport(Report):
    """What `verify_records` found."""

    indexed: bool
    """Whether an index says what each file must be, so that nothing can be overlooked."""

    def __str__(self) -> str:
        files = f"{self.files:,} file{'s' * (self.files != 1)} of records"
        limit = "" if self.indexed else "; without an index, a cut between two records or a missing file goes unnoticed"
        if self.passed:
            return f"{files}: {'as the index says' if self.indexed else 'every checksum matches'}{limit}"
        count = f"{len(self.problems):,} problem{'s' * (len(self.problems) != 1)}"
        return f"{files}: {count}{limit}\n{listed(self.problems)}"


def verify_records(paths: Paths, *, compression: str | None = None) -> RecordsReport:
    """Reads files of records whole, and reports what is wrong with them.

    In a folder that `write_records` wrote, finds every altered, missing or added byte and file. Elsewhere the records'
    own checksums reveal every altered byte of a record and every cut inside one.

    Args:
        paths: A folder, a path, a glob, or a list of paths.
        compression: "GZIP" or "ZLIB". Default: what the index says, or else found from the first bytes (plain or gzip).

    Returns:
        The report; `passed` is the verdict, `print` shows the problems.

    Raises:
        TypeError: If `paths` is none of these.
        ValueError: If the compression is unknown, or differs from the index's.
        PipelineError: If there is nothing to verify.

    Example:
        >>> print(verify_records("shards"))  # doctest: +SKIP
        8 files of records: as the index says
    """
    expect_compression(compression)
    files, problems = _listed(paths)

    def check(file: RecordFile) -> list[Problem]:
        try:
            return _check(file, compression)
        except (OSError, tf.errors.OpError) as error:
            return [Problem(file.path, "unreadable", str(error))]

    # Hashing and reading records release the GIL.
    with ThreadPoolExecutor(max(1, math.ceil(host().cpus))) as threads:
        found = [problem for each in threads.map(check, files) for problem in each]
    return RecordsReport(len(files), (*problems, *found), all(file.shard for file in files))


def scan(path: str, compression: str) -> Scan:
    """Reads every record of a file with its checksums; raises OSError or OpError if the file cannot be read."""
    return _scan_compressed(path, compression) if compression else _scan_plain(path)


def _listed(paths: Any) -> tuple[list[RecordFile], list[Problem]]:
    """Returns the files to check, missing shards included, and the problems of the folder or index that lists them."""
    problems: list[Problem] = []

    def read(folder: str) -> Index | None:
        try:
            return read_index(folder)
        except PipelineError as error:
            problems.append(Problem(os.path.join(folder, INDEX_NAME), "index", str(error)))
            return None

    folder = os.fspath(paths) if isinstance(paths, str | os.PathLike) else ""
    if not (tf.io.gfile.isdir(folder) if is_remote(folder) else os.path.isdir(folder)):
        files = find_files(paths, read)
        return files + missing_shards(files), problems
    beside = {name: os.path.join(folder, name) for name in names_in(folder) if name != INDEX_NAME}
    index = read(folder) if has_index(folder) else None
    if index is not None:
        files = [RecordFile(os.path.join(folder, shard.name), shard, index) for shard in index.shards]
        extra = beside.keys() - {shard.name for shard in index.shards}
        return files, [Problem(beside[name], "extra", "the index does not name it") for name in sorted(extra)]
    plain = {name: path for name, path in beside.items() if is_remote(path) or os.path.isfile(path)}
    files = [RecordFile(path) for name, path in plain.items() if not name.startswith(".")]
    if not files and not problems:
        raise PipelineError(f"Expected files of records in {folder!r}. There are none. Check the path.")
    return files, problems


def _check(file: RecordFile, compression: str | None) -> list[Problem]:
    if not tf.io.gfile.exists(file.path):
        return [Problem(file.path, "missing", "the index names it, but it is not there")]
    size = tf.io.gfile.stat(file.path).length
    if size == 0:
        return [Problem(file.path, "empty", "it has no bytes", offset=0)]
    expected = size if file.shard is None else file.shard.size_bytes
    if file.shard is not None and size == expected and file_sha256(file.path) == file.shard.sha256:
        return []
    found = list(scan(file.path, kind_of(file, compression)).lost)
    if size != expected:
        what = f"{size:,} bytes, but the index says {expected:,}"
        found.insert(0, Problem(file.path, "cut" if size < expected else "longer", what, offset=min(size, expected)))
    if file.shard is not None and not found:
        # A file whose records all read may still be the wrong one.
        found = [Problem(file.path, "altered", "its SHA-256 is not the index's, though every record reads")]
    return found


def _scan_plain(path: str) -> Scan:
    size, reader = tf.io.gfile.stat(path).length, RandomRecordReader(path)
    runs: list[tuple[int, int]] = []
    lost: list[Problem] = []
    position = number = 0
    with tf.io.gfile.GFile(path, "rb") as file:
        while position < size:
            start, count = position, 0
            while (end := _end_of_record(reader, position)) is not None:
                position, count = end, count + 1
            runs += [(start, count)] * (count > 0)
            number += count
            if position < size:
                damaged = position
                position, why = _after_damage(file, reader, damaged, size)
                lost.append(_lost(path, number, why, damaged, position - damaged))
                number += 1
    return Scan(tuple(runs), tuple(lost))


def _lost(path: str, record: int, why: str, offset: int | None = None, size_bytes: int | None = None) -> Problem:
    at = "" if offset is None else f" (bytes {offset:,} to {offset + (size_bytes or 0):,})"
    what = f"record {record:,}, counted from 0{at}: {why}"
    return Problem(path, "altered" if "altered" in why else "cut", what, record, offset, size_bytes)


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
    end = position + HEADER.size + HEADER.unpack(head)[0] + FOOTER_BYTES
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
            end = start + offset + HEADER.size + HEADER.unpack_from(block, offset)[0] + FOOTER_BYTES
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
        for _ in RecordIterator(path, compression):
            count += 1
    except tf.errors.DataLossError as error:
        problem = problem or f"its data or checksums are altered ({error})"
    # TensorFlow may end without an error where the compressed stream is cut; only the stream itself tells.
    lost = () if problem is None else (_lost(path, count, f"{problem}; nothing after it can be read"),)
    return Scan(((0, count),) if count else (), lost)


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
