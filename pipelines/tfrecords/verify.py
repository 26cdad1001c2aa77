"""`verify_records`: reads files of records whole, and compares them with the index beside them or their checksums."""

import math
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.hardware import host
from tfopt.pipelines.tfrecords.format import INDEX_NAME, Index, file_sha256, has_index, read_index
from tfopt.pipelines.tfrecords.record_files import (
    Paths,
    RecordFile,
    expect_compression,
    find_files,
    kind_of,
    missing_shards,
)
from tfopt.pipelines.tfrecords.scan import Lost, scan

_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a file."""

    file: str
    """Its path."""
    kind: str
    """"missing", "empty", "cut", "altered", "longer", "extra", "index" or "unreadable"."""
    what: str
    """The problem in words."""
    record: int | None = None
    """Number of the record, from 0; None for the whole file, or if unknown."""
    offset: int | None = None
    """Byte at which the damage, or the damaged record, begins; None if unknown."""
    size_bytes: int | None = None
    """How many bytes do not read as records; None if unknown."""

    def __str__(self) -> str:
        return f"{self.kind}: {self.file}: {self.what}"


@dataclass(frozen=True, slots=True)
class RecordsReport:
    """What `verify_records` found."""

    files: int
    """How many files were looked for."""
    indexed: bool
    """Whether an index says what each of them must be, so that nothing can be overlooked."""
    problems: tuple[Problem, ...]

    @property
    def passed(self) -> bool:
        """Whether there is no problem."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as JSON values."""
        return asdict(self) | {"passed": self.passed, "problems": [asdict(problem) for problem in self.problems]}

    def __str__(self) -> str:
        files = f"{self.files:,} file{'s' * (self.files != 1)} of records"
        limit = "" if self.indexed else "; without an index, a cut between two records or a missing file goes unnoticed"
        if self.passed:
            return f"{files}: {'as the index says' if self.indexed else 'every checksum matches'}{limit}"
        lines = [f"{files}: {len(self.problems):,} problem{'s' * (len(self.problems) != 1)}{limit}"]
        lines += [f"  {problem}" for problem in self.problems[:_SHOWN]]
        return "\n".join(lines + [f"  and {len(self.problems) - _SHOWN:,} more"] * (len(self.problems) > _SHOWN))


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
    return RecordsReport(len(files), all(file.shard for file in files), (*problems, *found))


def problem_of(path: str, lost: Lost) -> Problem:
    """Returns the problem that a lost part of a file is."""
    at = "" if lost.offset is None else f" (bytes {lost.offset:,} to {lost.offset + (lost.size_bytes or 0):,})"
    what = f"record {lost.record:,}, counted from 0{at}: {lost.why}"
    return Problem(path, "altered" if "altered" in lost.why else "cut", what, lost.record, lost.offset, lost.size_bytes)


def _listed(paths: Any) -> tuple[list[RecordFile], list[Problem]]:
    """Returns the files to check, missing shards included, and the problems of the folder or index that lists them."""
    problems: list[Problem] = []

    def read(folder: str) -> Index | None:
        try:
            return read_index(folder)
        except PipelineError as error:
            problems.append(Problem(os.path.join(folder, INDEX_NAME), "index", str(error)))
            return None

    if not isinstance(paths, str | os.PathLike) or not os.path.isdir(paths):
        files = find_files(paths, read)
        return files + missing_shards(files), problems
    folder = os.fspath(paths)
    beside = {name: os.path.join(folder, name) for name in sorted(os.listdir(folder)) if name != INDEX_NAME}
    index = read(folder) if has_index(folder) else None
    if index is not None:
        files = [RecordFile(os.path.join(folder, shard.name), shard, index) for shard in index.shards]
        extra = beside.keys() - {shard.name for shard in index.shards}
        return files, [Problem(beside[name], "extra", "the index does not name it") for name in sorted(extra)]
    files = [RecordFile(path) for name, path in beside.items() if not name.startswith(".") and os.path.isfile(path)]
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
    found = [problem_of(file.path, lost) for lost in scan(file.path, kind_of(file, compression)).lost]
    if size != expected:
        what = f"{size:,} bytes, but the index says {expected:,}"
        found.insert(0, Problem(file.path, "cut" if size < expected else "longer", what, offset=min(size, expected)))
    if file.shard is not None and not found:
        # A file whose records all read may still be the wrong one.
        found = [Problem(file.path, "altered", "its SHA-256 is not the index's, though every record reads")]
    return found
