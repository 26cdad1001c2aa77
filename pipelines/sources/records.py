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
from tfopt.pipelines.shared.problems import Problem, listed
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

    def reading(chosen: _Pieces) -> Source:
        runs = chosen.in_runs()
        kind = f" ({chosen.kind}, which cannot be read by offset)" if chosen.kind else ""
        return Source(
            name=f"records in {len(files)} file{'s' * (len(files) > 1)}{kind}",
            dataset=chosen.in_order,
            count=chosen.count,
            decode=decode,
            decode_batch=None if large else decode_batch,
            shuffled=lambda seed: side_by_side(runs.dataset(), runs.read, _SIDE_BY_SIDE, seed, block=_BLOCK),
            keyed=True,
            at=chosen.at if large and chosen.offsets else None,
            encoded=partial(unpack, index.spec) if index is not None and index.image else None,
            only_jpeg=all(file.index is not None and file.index.only_jpeg for file in files),
            fingerprint=partial(_fingerprint, files, on_bad_record),
            class_names=None if index is None else index.class_names,
            part=lambda number, parts: reading(chosen.part(number, parts)),
        )

    return reading(chosen)


@dataclass(frozen=True, slots=True)
class _Pieces:
    """What is read: whole files, or runs of whole records inside them."""

    kind: str  # the compression
    paths: Any  # of each piece, as the others a sequence over the pieces
    begins: Any  # at which bytes
    counts: Any  # of records; -1 if unknown
    whole: bool = False  # whether the pieces are files, each to be read to its end
    offsets: tuple[Any, ...] = ()  # `record_offsets` of each file, if they are known

    @classmethod
    def of(cls, kind: str, pieces: list[tuple[str, int, int]], **others: Any) -> "_Pieces":
        """Returns pieces, given their paths, first bytes and numbers of records."""
        paths, begins, counts = zip(*pieces, strict=True)
        return cls(kind, np.array(paths, object), np.array(begins, np.int64), np.array(counts, np.int64), **others)

    @property
    def count(self) -> int | None:
        return None if -1 in self.counts else sum(map(int, self.counts))

    @property
    def mean_bytes(self) -> float:
        """Of a record; 0 without offsets."""
        return sum(int(each[-1]) for each in self.offsets) / sum(len(each) - 1 for each in self.offsets or [[0, 0]])

    def dataset(self) -> Any:
        limits = np.full_like(self.counts, -1) if self.whole else self.counts
        with tf.init_scope():
            return tf.data.Dataset.from_tensor_slices((self.paths, self.begins, limits))

    def in_order(self) -> Any:
        if self.whole:
            return tf.data.TFRecordDataset(self.paths, compression_type=self.kind)
        # TensorFlow 2.21 never ends a flat_map on a tf.data service.
        return self.dataset().interleave(self.read, cycle_length=1)

    @without_autograph
    def read(self, path: Any, begin: Any, count: Any, buffer_bytes: int = 256 * 2**10) -> Any:
        """Returns the dataset of the records of a piece, in a graph."""
        # tf.data.TFRecordDataset starts at the beginning. The raw operation works only inside another dataset's
        # function: TensorFlow 2.21 loses byte_offsets when it serialises a dataset to a graph.
        variant = tf.raw_ops.TFRecordDatasetV2(
            filenames=[path], compression_type=self.kind, buffer_size=buffer_bytes, byte_offsets=[begin]
        )
        return tf.data.experimental.from_variant(variant, tf.TensorSpec((), tf.string)).take(count)

    def at(self, positions: Any) -> Any:
        """Returns the records at these positions, as `Source.at` does."""
        firsts = np.cumsum([0, *(len(offsets) - 1 for offsets in self.offsets)])[:-1]  # in each file
        with tf.init_scope(), tf.device("CPU:0"):  # captured, not copied into the graph
            begins = tf.constant(np.concatenate([offsets[:-1] for offsets in self.offsets]))

        @without_autograph
        def read_all(some: Any) -> Any:
            files = tf.searchsorted(firsts, some, side="right") - 1
            where = tf.gather(self.paths, files), tf.gather(begins, some)
            each = tf.data.Dataset.from_tensor_slices(where).flat_map(partial(self.read, count=1, buffer_bytes=0))
            # A file that was cut since gives no record there, and no error either.
            return each.apply(tf.data.experimental.assert_cardinality(tf.size(some, tf.int64)))

        # In groups: one by one, threads would cost more than the reading.
        parallel = {"cycle_length": _SIDE_BY_SIDE, "block_length": _GROUP, "num_parallel_calls": tf.data.AUTOTUNE}
        return positions.batch(_GROUP).interleave(read_all, **parallel)

    def in_runs(self) -> "_Pieces":
        """Cuts files into runs of records, so that a shuffle of the pieces mixes more than the order of the files."""
        return self._cut([(0, len(offsets) - 1) for offsets in self.offsets]) if self.offsets else self

    def part(self, number: int, parts: int) -> "_Pieces":
        """Returns an equal part of each file's records where they can be read by offset, else some of the files."""
        if not self.offsets:
            if len(self.paths) < parts:
                raise PipelineError(
                    f"Expected at least a file of records for each of {parts} processes. Found: {len(self.paths)}. "
                    f"What to do: write as many, of similar sizes, for example with write_records(..., "
                    f"shards={8 * parts}), or train in fewer processes."
                )
            paths, begins, counts = (each[number::parts] for each in (self.paths, self.begins, self.counts))
            return replace(self, paths=paths, begins=begins, counts=counts)
        stretches, before = [], 0
        for offsets in self.offsets:
            count = len(offsets) - 1
            # The part i has every record whose place among all files leaves i, were they dealt in turn.
            sizes = [len(range((part - before) % parts, count, parts)) for part in range(parts)]
            stretches.append((sum(sizes[:number]), sum(sizes[: number + 1])))
            before += count
        return self._cut(stretches)

    def _cut(self, stretches: list[tuple[int, int]]) -> "_Pieces":
        """Cuts a stretch of each file, given by its first record and the one after its last, into runs."""
        length = max(1, round(_RUN_BYTES / self.mean_bytes))
        runs = [
            (path, int(offsets[at]), min(length, end - at))
            for path, offsets, (first, end) in zip(self.paths, self.offsets, stretches, strict=True)
            for at in range(first, end, length)
        ]
        return _Pieces.of(self.kind, runs)


def _all(files: list[RecordFile], compression: str | None) -> _Pieces:
    counts, offsets = zip(*(check_file(file, compression) for file in files), strict=True)
    kind = common_kind(files, compression)
    known = () if any(each is None for each in offsets) else offsets
    pieces = [(file.path, 0, -1 if count is None else count) for file, count in zip(files, counts, strict=True)]
    return _Pieces.of(kind, pieces, whole=True, offsets=known)


def _whole_only(files: list[RecordFile], compression: str | None) -> _Pieces:
    """Reads all files; chooses the records that are whole, and warns about the others."""
    for file in files:
        expect_contents(file.path)
    kind = common_kind(files, compression)
    with ThreadPoolExecutor(max(1, math.ceil(host().cpus))) as threads:
        scans = list(threads.map(lambda file: scan(file.path, kind), files))
        problems = [problem for some in threads.map(_problems, files, scans) for problem in some]
    runs = [(file.path, *run) for file, found in zip(files, scans, strict=True) for run in found.runs]
    if not runs:
        raise PipelineError(
            f"Expected a whole record in {files[0].path!r}{' and the other files' if len(files) > 1 else ''}. Found "
            "none. Check that they are TFRecord files."
        )
    chosen = _Pieces.of(kind, runs)
    if problems:
        message = (
            f"on_bad_record='skip' leaves out what is damaged, and keeps {chosen.count:,} records:\n"
            f"{listed(problems)}\nverify_records says more."
        )
        warnings.warn(message, UserWarning, stacklevel=3)
    return chosen


def _problems(file: RecordFile, found: Scan) -> list[Problem]:
    """Returns what is lost of a file; raises if it is not the file that its index names."""
    shard, lost = file.shard, list(found.lost)
    if shard is None:
        return lost
    size, missing = tf.io.gfile.stat(file.path).length, shard.count - found.count
    if missing < 0:
        raise index_mismatch(file, f"{shard.count:,} records", f"{found.count:,} whole ones")
    if lost:
        # A damaged part may span several records, and a cut between two shows no damage.
        if missing > len(lost):
            kind = "cut" if size < shard.size_bytes else "altered"
            lost.append(Problem(file.path, kind, f"{missing:,} of {shard.count:,} records are lost in all"))
        return lost
    if missing and size < shard.size_bytes:
        what = f"the last {missing:,} of {shard.count:,} records are missing: cut between two records"
        return [Problem(file.path, "cut", what, found.count, size, shard.size_bytes - size)]
    if missing or size != shard.size_bytes:
        raise index_mismatch(file, f"{shard.count:,} records in {shard.size_bytes:,} bytes", f"{found.count:,}")
    if file_sha256(file.path) != shard.sha256:
        raise index_mismatch(file, "the records that were written", "whole records of another SHA-256")
    return []


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
