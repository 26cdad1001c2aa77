"""Reads around damage: only the records that are whole, and an account of the others."""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.hardware import host
from tfopt.pipelines.shared.elements import without_autograph
from tfopt.pipelines.tfrecords.files import RecordFile, common_kind, expect_contents, unlike_index
from tfopt.pipelines.tfrecords.scan import Scan, scan
from tfopt.pipelines.tfrecords.verify import Problem, problem_of, sha256

_SHOWN = 50


@dataclass(frozen=True, slots=True)
class WholeRecords:
    """The records that are whole.

    Args:
        compression: "GZIP", "ZLIB", or "" for none.
        count: How many there are.
        pieces: Where they lie: paths, offsets in bytes, and numbers of records, each of shape (pieces,).
        problems: What was left out.
    """

    compression: str
    count: int
    pieces: tuple[Any, Any, Any]
    problems: tuple[Problem, ...]

    def message(self) -> str:
        """Returns what was left out, for the reader."""
        lines = [f"  {problem}" for problem in self.problems[:_SHOWN]]
        if len(self.problems) > _SHOWN:
            lines.append(f"  and {len(self.problems) - _SHOWN:,} more, which verify_records lists")
        return "\n".join(
            [f"on_bad_record='skip' leaves out what is damaged, and keeps {self.count:,} records:", *lines]
        )


def whole_records(files: list[RecordFile], compression: str | None) -> WholeRecords:
    """Reads all files, and returns which records are whole.

    Raises:
        ValueError: The index says another compression.
        PipelineError: No record is whole, a file is empty, or unlike its index though nothing in it is damaged, or
            compressions differ.
        OSError, tf.errors.OpError: A file cannot be read.
    """
    for file in files:
        expect_contents(file.path)
    kind = common_kind(files, compression)

    def look(file: RecordFile) -> tuple[Scan, list[Problem]]:
        found = scan(file.path, kind)
        return found, _problems(file, found)

    with ThreadPoolExecutor(max(1, math.ceil(host().cpus))) as threads:
        looked = list(threads.map(look, files))
    problems = [problem for _, some in looked for problem in some]
    pieces = [
        (file.path, each.offset, each.count)
        for file, (found, _) in zip(files, looked, strict=True)
        for each in found.segments
    ]
    if not pieces:
        raise PipelineError(
            f"Expected a whole record in {files[0].path!r}{' and its like' if len(files) > 1 else ''}. Found none. "
            "Check that they are TFRecord files."
        )
    paths, offsets, counts = zip(*pieces, strict=True)
    where = (np.array(paths, dtype=object), np.array(offsets, np.int64), np.array(counts, np.int64))
    return WholeRecords(kind, sum(counts), where, tuple(problems))


@without_autograph
def read_segment(compression: str, path: Any, offset: Any, count: Any) -> Any:
    """Returns the dataset of this many records from this byte on, in a graph."""
    # tf.data.TFRecordDataset starts at the beginning. The operation's own dataset works only inside another one's
    # function: TensorFlow 2.21 forgets byte_offsets where it writes a dataset down as a graph.
    variant = tf.raw_ops.TFRecordDatasetV2(
        filenames=[path], compression_type=compression, buffer_size=256 * 2**10, byte_offsets=[offset]
    )
    return tf.data.experimental.from_variant(variant, tf.TensorSpec((), tf.string)).take(count)


def _problems(file: RecordFile, found: Scan) -> list[Problem]:
    problems = [problem_of(file.path, lost) for lost in found.lost]
    if file.shard is None:
        return problems
    if found.count > file.shard.count:
        raise unlike_index(file, f"{file.shard.count:,} records", f"{found.count:,} whole ones")
    size = tf.io.gfile.stat(file.path).length
    missing = file.shard.count - found.count
    if not problems and missing and size < file.shard.size_bytes:
        what = f"the last {missing:,} of {file.shard.count:,} records are missing: cut between two records"
        return [Problem(file.path, "cut", what, found.count, size, file.shard.size_bytes - size)]
    if not problems and (missing or size != file.shard.size_bytes):
        raise unlike_index(file, f"{file.shard.count:,} records in {file.shard.size_bytes:,} bytes", f"{found.count:,}")
    if not problems and sha256(file.path) != file.shard.sha256:
        raise unlike_index(file, "the records that were written", "whole records of another SHA-256")
    # A damaged part may hold several records, and a cut between two leaves no damage behind.
    if problems and missing > len(problems):
        kind = "cut" if size < file.shard.size_bytes else "altered"
        problems.append(Problem(file.path, kind, f"{missing:,} of {file.shard.count:,} records are lost in all"))
    return problems
