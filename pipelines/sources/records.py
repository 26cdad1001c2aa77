"""TFRecord files as a source, checked when it is made: by the index beside them, or by the lengths of their records."""

import math
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.errors import PipelineError, unknown_name
from tfopt.hardware import host
from tfopt.pipelines.shared.elements import without_autograph
from tfopt.pipelines.shared.paths import absolute, file_stamps
from tfopt.pipelines.shared.problems import Problem
from tfopt.pipelines.sources.image_files import decode_image
from tfopt.pipelines.sources.source import Source, side_by_side
from tfopt.pipelines.tfrecords.format import Index, file_sha256, unpack, unpack_batch, unpacks_in_batches
from tfopt.pipelines.tfrecords.record_files import (
    Paths,
    RecordFile,
    check_file,
    common_kind,
    expect_all_shards,
    expect_compression,
    expect_contents,
    find_files,
    index_mismatch,
)
from tfopt.pipelines.tfrecords.verify import Scan, scan

_BLOCK = 8  # small records that are taken of one file in turn
_SIDE_BY_SIDE = 16  # files read at once; fixed, or the order under a seed would depend on the number of cores
_RUN_BYTES = 2**20  # of neighbouring records that are read together: long enough for any disk
# Of a record on average. To open the file for each smaller one takes longer than to read it; larger ones would be
# copied once more if a batch of them was parsed at once.
_LARGE_BYTES = 32 * 2**10
_GROUP = 32  # records that one thread reads by their offsets
_SHOWN = 50  # problems that the warning lists


def records(
    paths: Paths,
    *,
    features: dict[str, Any] | None = None,
    parse: Callable[[Any], Any] | None = None,
    compression: str | None = None,
    on_bad_record: str = "error",
) -> Source:
    """Returns the records of TFRecord files as a source.

    Files that `write_records` wrote need no description, and are checked against the index beside them. Other
    uncompressed files are walked from length to length, which counts the examples and finds a file cut inside a record;
    other compressed files are not counted. docs/records.md lists what is checked when, and what goes unnoticed.

    Args:
        paths: A folder that `write_records` wrote, a path, a glob, or a list of paths.
        features: The description of a serialised `tf.train.Example`, as `tf.io.parse_single_example` takes it; examples
            are then dicts of tensors. If all are `tf.io.FixedLenFeature`, small records are parsed a batch at a time.
        parse: Instead of `features`, a deterministic function from a serialised record (scalar string tensor) to an
            example. Default, without either: the examples that were written, or the serialised records if there is no
            index.
        compression: "GZIP" or "ZLIB". Default: what the index says, or else found from the first bytes (plain or gzip).
        on_bad_record: "error", or "skip": read all files once when the source is made, leave out damaged records, and
            name them in one warning. Default: "error".

    Returns:
        The source: in the order of the list (globs are sorted). If the pipeline shuffles, records of 32 KiB and more on
        average are read one by one, in a permutation of all; smaller ones in runs of 1 MiB, and compressed or remote
        files whole, 16 side by side.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If both `features` and `parse` are given, or an argument has an unknown value.
        PipelineError: If nothing matches; a file is missing, empty, cut inside a record, not TFRecord, or does not
            match its index; the index is damaged; or no record is left.

    Example:
        >>> spec = {"label": tf.io.FixedLenFeature([], tf.int64)}
        >>> source = records("train-*.tfrecord", features=spec)  # doctest: +SKIP
        >>> source = records("shards")  # doctest: +SKIP
    """
    _expect_arguments(features, parse, compression, on_bad_record)
    files = [replace(file, path=absolute(file.path)) for file in find_files(paths)]
    expect_all_shards(files)
    index = _common_index(files) if features is None and parse is None else None
    decode, decode_batch = _decoding(features, parse, index)
    chosen = _whole_only(files, compression) if on_bad_record == "skip" else _all(files, compression)

    large = chosen.mean_bytes >= _LARGE_BYTES

    def reading(chosen: _Chosen) -> Source:
        runs = chosen.in_runs()
        kind = f" ({chosen.kind}, which cannot be read by offset)" if chosen.kind else ""
        return Source(
            name=f"records in {len(files)} file{'s' * (len(files) > 1)}{kind}",
            dataset=partial(_in_order, chosen),
            count=chosen.count,
            decode=decode,
            decode_batch=None if large else decode_batch,
            shuffled=lambda seed: side_by_side(runs.dataset(), runs.read, _SIDE_BY_SIDE, seed, block=_BLOCK),
            keyed=True,
            at=partial(_read_at, chosen) if large and chosen.offsets else None,
            encoded=partial(unpack, index.spec) if index is not None and index.image else None,
            only_jpeg=all(file.index is not None and file.index.only_jpeg for file in files),
            fingerprint=partial(_fingerprint, files, on_bad_record),
            class_names=None if index is None else index.class_names,
            part=lambda number, parts: reading(chosen.part(number, parts)),
        )

    return reading(chosen)


@dataclass(frozen=True, slots=True)
class _Chosen:
    """The pieces to read: whole files, or segments of whole records."""

    kind: str  # the compression
    counts: tuple[int | None, ...]  # records of each piece, None if unknown
    pieces: tuple[Any, ...]  # the arguments of `read`, each a sequence over the pieces
    read: Callable[..., Any]  # returns the dataset of one piece
    offsets: tuple[Any, ...] = ()  # `record_offsets` of each piece, if pieces are files that have them

    @property
    def count(self) -> int | None:
        return None if None in self.counts else sum(count or 0 for count in self.counts)

    @property
    def mean_bytes(self) -> float:
        """Of a record; 0 without offsets."""
        return sum(int(each[-1]) for each in self.offsets) / sum(len(each) - 1 for each in self.offsets or [[0, 0]])

    def in_runs(self) -> "_Chosen":
        """Cuts files into runs of records, so that a shuffle of the pieces mixes more than the order of the files."""
        if not self.offsets:
            return self
        length = max(1, round(_RUN_BYTES / self.mean_bytes))
        return _in_segments(
            self.kind,
            [
                (path, int(offsets[first]), min(length, len(offsets) - 1 - first))
                for path, offsets in zip(*self.pieces, self.offsets, strict=True)
                for first in range(0, len(offsets) - 1, length)
            ],
        )

    def dataset(self) -> Any:
        with tf.init_scope():
            return tf.data.Dataset.from_tensor_slices(self.pieces)

    def part(self, number: int, parts: int) -> "_Chosen":
        """Returns an equal part of each file's records where they can be read by offset, else some of the files."""
        if self.offsets:
            return self._stretches(number, parts)
        if len(self.counts) < parts:
            raise PipelineError(
                f"Expected at least a file of records for each of {parts} processes. Found: {len(self.counts)}. What "
                f"to do: write as many, of similar sizes, for example with write_records(..., shards={8 * parts}), or "
                "train in fewer processes."
            )
        pieces = tuple(each[number::parts] for each in self.pieces)
        counts, offsets = self.counts[number::parts], self.offsets[number::parts]
        return replace(self, counts=counts, pieces=pieces, offsets=offsets)

    def _stretches(self, number: int, parts: int) -> "_Chosen":
        """Takes stretch `number` of each file, cut into `parts`; those left over go to the parts in turn."""
        segments, before = [], 0
        for path, offsets in zip(*self.pieces, self.offsets, strict=True):
            count = len(offsets) - 1
            # The part i has every record whose place among all files leaves i, were they dealt in turn.
            sizes = [len(range((part - before) % parts, count, parts)) for part in range(parts)]
            first = sum(sizes[:number])
            length = max(1, round(_RUN_BYTES / self.mean_bytes))
            end = first + sizes[number]
            segments += [(path, int(offsets[at]), min(length, end - at)) for at in range(first, end, length)]
            before += count
        return _in_segments(self.kind, segments)


def _all(files: list[RecordFile], compression: str | None) -> _Chosen:
    counts, offsets = zip(*(check_file(file, compression) for file in files), strict=True)
    kind = common_kind(files, compression)
    return _Chosen(
        kind,
        counts,
        ([file.path for file in files],),
        partial(tf.data.TFRecordDataset, compression_type=kind),
        () if any(each is None for each in offsets) else offsets,
    )


def _in_segments(kind: str, segments: list[tuple[str, int, int]]) -> _Chosen:
    """Returns segments, each given by its file's path, its first byte and its number of records."""
    paths, offsets, counts = zip(*segments, strict=True)
    pieces = np.array(paths, dtype=object), np.array(offsets, np.int64), np.array(counts, np.int64)
    return _Chosen(kind, counts, pieces, partial(_read_segment, kind))


def _whole_only(files: list[RecordFile], compression: str | None) -> _Chosen:
    """Reads all files; chooses the records that are whole, and warns about the others."""
    for file in files:
        expect_contents(file.path)
    kind = common_kind(files, compression)
    with ThreadPoolExecutor(max(1, math.ceil(host().cpus))) as threads:
        scans = list(threads.map(lambda file: scan(file.path, kind), files))
        problems = [problem for some in threads.map(_problems, files, scans) for problem in some]
    segments = [
        (file.path, each.offset, each.count)
        for file, found in zip(files, scans, strict=True)
        for each in found.segments
    ]
    if not segments:
        raise PipelineError(
            f"Expected a whole record in {files[0].path!r}{' and the other files' if len(files) > 1 else ''}. Found "
            "none. Check that they are TFRecord files."
        )
    chosen = _in_segments(kind, segments)
    if problems:
        warnings.warn(_message(problems, chosen.count or 0), UserWarning, stacklevel=3)
    return chosen


def _problems(file: RecordFile, found: Scan) -> list[Problem]:
    """Returns what is lost of a file; raises if it is not the file that its index names."""
    problems = list(found.lost)
    if file.shard is None:
        return problems
    if found.count > file.shard.count:
        raise index_mismatch(file, f"{file.shard.count:,} records", f"{found.count:,} whole ones")
    size = tf.io.gfile.stat(file.path).length
    missing = file.shard.count - found.count
    if not problems and missing and size < file.shard.size_bytes:
        what = f"the last {missing:,} of {file.shard.count:,} records are missing: cut between two records"
        return [Problem(file.path, "cut", what, found.count, size, file.shard.size_bytes - size)]
    if not problems and (missing or size != file.shard.size_bytes):
        expected = f"{file.shard.count:,} records in {file.shard.size_bytes:,} bytes"
        raise index_mismatch(file, expected, f"{found.count:,}")
    if not problems and file_sha256(file.path) != file.shard.sha256:
        raise index_mismatch(file, "the records that were written", "whole records of another SHA-256")
    # A damaged part may span several records, and a cut between two shows no damage.
    if problems and missing > len(problems):
        kind = "cut" if size < file.shard.size_bytes else "altered"
        problems.append(Problem(file.path, kind, f"{missing:,} of {file.shard.count:,} records are lost in all"))
    return problems


def _message(problems: list[Problem], kept: int) -> str:
    lines = [f"on_bad_record='skip' leaves out what is damaged, and keeps {kept:,} records:"]
    lines += [f"  {problem}" for problem in problems[:_SHOWN]]
    if len(problems) > _SHOWN:
        lines.append(f"  and {len(problems) - _SHOWN:,} more, which verify_records lists")
    return "\n".join(lines)


def _expect_arguments(features: object, parse: object, compression: object, on_bad_record: object) -> None:
    if features is not None and parse is not None:
        raise ValueError("records() expects `features` or `parse`. Received both: parse the features in `parse`.")
    if features is not None and not isinstance(features, dict):
        raise TypeError(
            f"records() expects a dict of features. Received: {type(features).__name__}. Pass names with their "
            "description, such as {'label': tf.io.FixedLenFeature([], tf.int64)}."
        )
    expect_compression(compression)
    if on_bad_record not in ("error", "skip"):
        raise unknown_name("value for `on_bad_record`", on_bad_record, ("error", "skip"))


def _common_index(files: list[RecordFile]) -> Index | None:
    """Returns an index that describes the examples of all files; None if there is none."""
    indexes = [file.index for file in files if file.index is not None]
    kinds = [(index.spec, index.image, index.class_names) for index in indexes]
    return indexes[0] if len(kinds) == len(files) and all(kind == kinds[0] for kind in kinds) else None


def _decoding(
    features: dict[str, Any] | None, parse: Callable[[Any], Any] | None, index: Index | None
) -> tuple[Callable[..., Any] | None, Callable[..., Any] | None]:
    """Returns `decode` and `decode_batch` of the source."""
    if features is not None:
        # Of other kinds, parse_example gives something else than a batch of what parse_single_example gives.
        fixed = all(isinstance(feature, tf.io.FixedLenFeature) for feature in features.values())
        together = partial(tf.io.parse_example, features=features) if fixed else None
        return partial(tf.io.parse_single_example, features=features), together
    if index is None or index.image:
        return parse if index is None else partial(_unpack_image, index.spec), None
    together = partial(unpack_batch, index.spec) if unpacks_in_batches(index.spec) else None
    return partial(unpack, index.spec), together


@without_autograph
def _unpack_image(spec: Any, record: Any) -> Any:
    contents, *rest = unpack(spec, record)
    return decode_image(contents), *rest


def _fingerprint(files: list[RecordFile], on_bad_record: str) -> Any:
    """Returns what changes whenever the records may have changed."""
    return {
        "files": file_stamps(file.path for file in files),
        "sha256": [None if file.shard is None else file.shard.sha256 for file in files],
        "on_bad_record": on_bad_record,
    }


def _read_at(chosen: _Chosen, positions: Any) -> Any:
    """Returns the records at these positions, as `Source.at` does."""
    firsts = np.cumsum([0, *(len(offsets) - 1 for offsets in chosen.offsets)])[:-1]  # in each file
    with tf.init_scope(), tf.device("CPU:0"):  # captured, not copied into the graph
        begins = tf.constant(np.concatenate([offsets[:-1] for offsets in chosen.offsets]))
    (paths,) = chosen.pieces

    @without_autograph
    def read(path: Any, begin: Any) -> Any:
        return _read_segment("", path, begin, 1, buffer=0)

    @without_autograph
    def read_all(some: Any) -> Any:
        files = tf.searchsorted(firsts, some, side="right") - 1
        where = tf.gather(paths, files), tf.gather(begins, some)
        return tf.data.Dataset.from_tensor_slices(where).flat_map(read)

    # In groups: one by one, threads would cost more than the reading.
    parallel = {"cycle_length": _SIDE_BY_SIDE, "block_length": _GROUP, "num_parallel_calls": tf.data.AUTOTUNE}
    return positions.batch(_GROUP).interleave(read_all, **parallel)


@without_autograph
def _read_segment(compression: str, path: Any, offset: Any, count: Any, buffer: int = 256 * 2**10) -> Any:
    """Returns the dataset of `count` records from byte `offset` on, in a graph."""
    # tf.data.TFRecordDataset starts at the beginning. The raw operation works only inside another dataset's function:
    # TensorFlow 2.21 loses byte_offsets when it serialises a dataset to a graph.
    variant = tf.raw_ops.TFRecordDatasetV2(
        filenames=[path], compression_type=compression, buffer_size=buffer, byte_offsets=[offset]
    )
    return tf.data.experimental.from_variant(variant, tf.TensorSpec((), tf.string)).take(count)


def _in_order(chosen: _Chosen) -> Any:
    if len(chosen.pieces) == 1:
        return chosen.read(*chosen.pieces)
    # TensorFlow 2.21 never ends a flat_map on a tf.data service.
    return chosen.dataset().interleave(chosen.read, cycle_length=1)
