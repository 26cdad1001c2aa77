"""TFRecord files as a source: checked as it is made, by the index beside them or by the lengths of their records."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import tensorflow as tf

from tfopt.errors import PipelineError, unknown_name
from tfopt.pipelines.shared.elements import without_autograph
from tfopt.pipelines.shared.file_stamps import files as stamps
from tfopt.pipelines.shared.seeding import shuffle
from tfopt.pipelines.sources.images import decode_image
from tfopt.pipelines.sources.source import Source, absolute
from tfopt.pipelines.tfrecords.files import (
    Paths,
    RecordFile,
    check_files,
    common_kind,
    expect_all_shards,
    expect_compression,
    find_files,
)
from tfopt.pipelines.tfrecords.index import Index
from tfopt.pipelines.tfrecords.skip import read_segment, whole_records
from tfopt.pipelines.tfrecords.spec import unpack

_SIDE_BY_SIDE = 16  # files read at once; fixed, or the order under a seed would depend on the number of cores


def records(
    paths: Paths,
    *,
    features: dict[str, Any] | None = None,
    parse: Callable[[Any], Any] | None = None,
    compression: str | None = None,
    on_bad_record: str = "error",
) -> Source:
    """Returns the records of TFRecord files as a source.

    Files that `write_records` wrote are checked against the index beside them: none may be missing (not even
    where only some are given), and each must have its size, its number of records, and its first and last 64 KiB.
    Their examples come back as they were, without a description.

    Other uncompressed files are walked from length to length: a file cut inside a record is found, and the number of
    examples is known. The number is unknown for other compressed files; data of unknown length makes Keras count one
    optimizer iteration too many in each epoch. Without an index, a file cut exactly between two records cannot be
    told from a whole one, nor can a compressed one that is cut anywhere behind its first record.

    Data that does not fit its checksum ends the reading with TensorFlow's DataLossError; `verify_records` names the
    file and the record.

    Args:
        paths: A folder that `write_records` wrote, a path, a glob, or a list of paths.
        features: The description of a serialised `tf.train.Example`, as `tf.io.parse_single_example` takes it; the
            examples are then dicts of tensors.
        parse: In place of `features`, a deterministic function from a serialised record (scalar string tensor) to an
            example. Default, where neither is given: the examples that were written, or without an index the
            serialised records.
        compression: "GZIP" or "ZLIB". Default: what the index says, or else found from the first bytes (plain or gzip).
        on_bad_record: "error", or "skip": all files are read once as the source is made, damaged records are left
            out, and one warning says which. In a compressed file all behind the damage is lost. Default: "error".

    Returns:
        The source; in order of the list (a glob is sorted), or, where the pipeline shuffles, read side by side.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: Both `features` and `parse` are given, or an argument has an unknown value.
        PipelineError: Nothing matches, a file is missing, empty, cut inside a record, unlike its index or no TFRecord
            file, the index is damaged, or no record is left.

    Example:
        >>> spec = {"label": tf.io.FixedLenFeature([], tf.int64)}
        >>> source = records("train-*.tfrecord", features=spec)  # doctest: +SKIP
        >>> source = records("shards")  # doctest: +SKIP
    """
    _expect_arguments(features, parse, compression, on_bad_record)
    files = [replace(file, path=absolute(file.path)) for file in find_files(paths)]
    expect_all_shards(files)
    index = _common_index(files) if features is None and parse is None else None
    chosen = _whole_only(files, compression) if on_bad_record == "skip" else _all(files, compression)

    def reading(chosen: _Chosen) -> Source:
        return Source(
            name=f"records in {len(files)} file{'s' * (len(files) > 1)}{f' ({chosen.kind})' * bool(chosen.kind)}",
            dataset=partial(_in_order, chosen),
            count=chosen.count,
            decode=_decode(features, parse, index),
            shuffled=partial(_side_by_side, chosen),
            encoded=partial(unpack, index.spec) if index is not None and index.image else None,
            fingerprint=partial(_fingerprint, files, (features, parse, index, on_bad_record)),
            class_names=None if index is None else index.class_names,
            part=lambda number, parts: reading(chosen.part(number, parts)),
        )

    return reading(chosen)


@dataclass(frozen=True, slots=True)
class _Chosen:
    """What will be read.

    Args:
        kind: The compression.
        counts: How many records each piece has, None where unknown.
        pieces: Where the pieces lie: what `read` takes, each for all of them.
        read: Reads one.
    """

    kind: str
    counts: tuple[int | None, ...]
    pieces: tuple[Any, ...]
    read: Callable[..., Any]

    @property
    def count(self) -> int | None:
        known = [count for count in self.counts if count is not None]
        return sum(known) if len(known) == len(self.counts) else None

    def part(self, number: int, parts: int) -> "_Chosen":
        if len(self.counts) < parts:
            raise PipelineError(
                f"Expected at least a file of records for each of {parts} processes. Found: {len(self.counts)}. What "
                f"to do: write as many, of like sizes, such as with write_records(..., shards={8 * parts}), or train "
                "in fewer processes."
            )
        pieces = tuple(each[number::parts] for each in self.pieces)
        return replace(self, counts=self.counts[number::parts], pieces=pieces)


def _all(files: list[RecordFile], compression: str | None) -> _Chosen:
    counts = tuple(check_files([file], compression)[1] for file in files)
    kind = common_kind(files, compression)
    return _Chosen(kind, counts, ([file.path for file in files],), partial(_read, kind))


def _whole_only(files: list[RecordFile], compression: str | None) -> _Chosen:
    whole = whole_records(files, compression)
    if whole.problems:
        warnings.warn(whole.message(), UserWarning, stacklevel=3)
    counts = tuple(map(int, whole.pieces[2]))
    return _Chosen(whole.compression, counts, whole.pieces, partial(read_segment, whole.compression))


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
    """Returns an index that says what the examples of all files are; None where there is none."""
    first = files[0].index
    if first is None or any(file.index is None for file in files):
        return None
    kinds = [(file.index.spec, file.index.image, file.index.class_names) for file in files if file.index is not None]
    return first if all(kind == kinds[0] for kind in kinds) else None


def _decode(
    features: dict[str, Any] | None, parse: Callable[[Any], Any] | None, index: Index | None
) -> Callable[..., Any] | None:
    if features is not None:
        return partial(_parse_features, features)
    if index is None:
        return parse
    return partial(_unpack_image if index.image else unpack, index.spec)


def _parse_features(features: dict[str, Any], serialized: Any) -> Any:
    return tf.io.parse_single_example(serialized, features)


@without_autograph
def _unpack_image(spec: Any, record: Any) -> Any:
    contents, *rest = unpack(spec, record)
    return decode_image(contents), *rest


def _fingerprint(files: list[RecordFile], functions: Any) -> Any:
    """Returns what changes whenever the records, or what is made of them, may have changed."""
    features, parse, index, on_bad_record = functions
    return {
        "files": stamps(file.path for file in files),
        "sha256": [None if file.shard is None else file.shard.sha256 for file in files],
        "functions": [None if features is None else repr(sorted(features.items())), parse],
        "spec": None if index is None else [index.spec, index.image],
        "on_bad_record": on_bad_record,
    }


def _read(compression: str, path: Any) -> Any:
    return tf.data.TFRecordDataset(path, compression)


def _in_order(chosen: _Chosen) -> Any:
    if len(chosen.pieces) == 1:
        return chosen.read(*chosen.pieces)
    # Not flat_map, which TensorFlow 2.21 never ends on a tf.data service.
    return tf.data.Dataset.from_tensor_slices(chosen.pieces).interleave(chosen.read, cycle_length=1)


def _side_by_side(chosen: _Chosen, seed: int | None) -> Any:
    """Shuffles the pieces and interleaves their records; with a seed, in the same order on every iteration."""
    count = len(chosen.pieces[0])
    order = tf.data.Dataset.from_tensor_slices(chosen.pieces)
    order = shuffle(order, count, seed, reshuffle=seed is None)
    return order.interleave(chosen.read, cycle_length=min(count, _SIDE_BY_SIDE), num_parallel_calls=tf.data.AUTOTUNE)
