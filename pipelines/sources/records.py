"""TFRecord files as a source."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from tfopt.errors import unknown_name
from tfopt.pipelines.seeds import shuffle
from tfopt.pipelines.sources.record_files import check_records, find_files
from tfopt.pipelines.sources.source import Source

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

_SIDE_BY_SIDE = 16  # files read at once; fixed, or the order under a seed would depend on the number of cores


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
        raise TypeError(f"records() expects a dict of features. Received: {type(features).__name__}")
    if compression is not None and compression not in ("GZIP", "ZLIB"):
        raise unknown_name("compression", compression, ("GZIP", "ZLIB"))
    files = find_files(paths)
    compression, count = check_records(files, compression)
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
