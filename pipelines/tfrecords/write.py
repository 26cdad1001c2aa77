"""Writes a source's examples as TFRecord shards with an index, whole or not at all."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tfopt import checks
from tfopt.errors import PipelineError
from tfopt.pipelines.shared.elements import apply, element_of, first_line, leaves, size_bytes
from tfopt.pipelines.sources.dataset import as_source
from tfopt.pipelines.sources.images import expect_image_bytes
from tfopt.pipelines.sources.source import Source, expect_utf8
from tfopt.pipelines.tfrecords.files import expect_compression
from tfopt.pipelines.tfrecords.index import Index, write_index
from tfopt.pipelines.tfrecords.publish import published
from tfopt.pipelines.tfrecords.shards import ShardWriters
from tfopt.pipelines.tfrecords.spec import describe, features, pack, to_strings

# Large enough to be read in long runs, small enough that a shuffle of shards mixes:
# https://www.tensorflow.org/tutorials/load_data/tfrecord advises 100 MB or more.
_SHARD_BYTES = 128 * 2**20
_CHUNK_BYTES = 2**20  # examples cross from TensorFlow to Python together; one by one costs several times as much
_CHUNK = 256


def write_records(
    source: Any, folder: str | os.PathLike[str], *, shards: int | None = None, compression: str | None = None
) -> Index:
    """Writes the examples of a source into a folder of TFRecord files, which `records(folder)` reads back alike.

    Use it for data that is slow to read or to decode, or lies in many small files. Examples are read and decoded in
    parallel, and shards written in parallel, in the order of the source. Encoded images are written as they are, and
    decoded when read, where the source decodes them as `images` does. The folder appears whole when all is written,
    or not at all.

    Args:
        source: Anything that `build_pipeline` takes: a `Source`, arrays, a dataset, a path.
        folder: A new or empty folder.
        shards: How many files to write, of equal numbers of examples. Default: as many as 128 MiB each make.
        compression: "GZIP" or "ZLIB". Default: none, which is faster to write and to read.

    Returns:
        The index that lies beside the shards.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: `shards` is not possible, the compression is unknown, or the folder has no name.
        PipelineError: The folder is not empty or is being written, an example cannot be read or stored, the source is
            empty or endless, or the disk is full. Nothing is left then.

    Example:
        >>> import numpy as np
        >>> from tfopt.pipelines import records
        >>> index = write_records((np.zeros((10, 4)), np.arange(10)), "shards", shards=2)  # doctest: +SKIP
        >>> records("shards").count  # doctest: +SKIP
        10
    """
    expect_compression(compression)
    path = _folder(folder)
    stored = _stored(as_source(source))
    if shards is not None:
        shards = checks.integer("shards", shards, "Pass a number of files.", least=1)
    starts = None if shards is None else _starts(shards, stored.count)
    with published(path) as temporary:
        try:
            index = _write(stored, temporary, starts, compression or "")
        except (OSError, tf.errors.OpError) as error:
            raise PipelineError(
                f"Expected to write {path!r}. It failed, and nothing of it is left: {first_line(error)}. "
                "Check that the disk has room and may be written."
            ) from error
    return index


@dataclass(frozen=True, slots=True)
class _Stored:
    """What will be written.

    Args:
        source: Where the examples come from.
        spec: Their structure, as JSON values.
        strings: A dataset of vectors of texts: the bytes of each tensor of an example.
        count: The number of examples, None where unknown.
        encoded: Whether the first tensor is an encoded image.
    """

    source: Source
    spec: Any
    strings: Any
    count: int | None
    encoded: bool


def _stored(source: Source) -> _Stored:
    dataset = source.dataset()
    cardinality = int(dataset.cardinality())
    if cardinality == tf.data.INFINITE_CARDINALITY:
        raise PipelineError(
            f"Expected examples that end. {source.name} has no end. Take a part of it with the dataset's `take`."
        )
    raw, encoded = dataset.element_spec, _is_read_alike(source, dataset)
    function = source.encoded if encoded else source.decode

    # Not marked do_not_convert: AutoGraph must reach the user's functions, as in Dataset.map.
    def example(*arguments: Any) -> Any:
        element = element_of(arguments, raw)
        result = element if function is None else apply(function, element)
        if not encoded:
            return result
        name = source.name if source.origin is None else apply(source.origin, element)
        return expect_image_bytes(result[0], name), *result[1:]

    # One map, not two: for small examples the second costs a quarter of the time.
    def strings(*arguments: Any) -> Any:
        return to_strings(example(*arguments))

    spec = describe(dataset.map(example).element_spec)
    count = source.count if source.count is not None or cardinality < 0 else cardinality
    return _Stored(source, spec, dataset.map(strings, num_parallel_calls=tf.data.AUTOTUNE), count, encoded)


def _is_read_alike(source: Source, dataset: Any) -> bool:
    """Whether a source decodes its encoded images as `records` will: else they are written decoded."""
    if source.encoded is None or source.decode is None:
        return False
    decode, raw = source.decode, dataset.element_spec

    def decoded(*arguments: Any) -> Any:
        return apply(decode, element_of(arguments, raw))

    return bool(leaves(dataset.map(decoded).element_spec)[0] == tf.TensorSpec((None, None, 3), tf.uint8))


def _folder(folder: Any) -> str:
    """Returns the path of a folder, given as a text or a path."""
    if not isinstance(folder, str | os.PathLike) or not isinstance(os.fspath(folder), str):
        raise TypeError(f"Expected the path of a folder. Received: {folder!r}. Pass a text or a pathlib path.")
    path = os.fspath(folder)
    if not path or "\0" in path:
        raise ValueError(f"Expected the path of a new or empty folder. Received: {path!r}. Name one.")
    return expect_utf8(path)


def _starts(shards: int, count: int | None) -> frozenset[int]:
    """Returns the numbers of the examples with which shards begin."""
    if count is None or shards > count:
        known = "an unknown number of" if count is None else f"{count:,}"
        raise ValueError(
            f"Expected `shards` only for a known number of examples, and at most one for each. Received: {shards} "
            f"for {known} examples. Leave it out, for shards of 128 MiB."
        )
    return frozenset(shard * count // shards for shard in range(shards))


def _write(stored: _Stored, folder: str, starts: frozenset[int] | None, compression: str) -> Index:
    source, names = stored.source, features(stored.spec)
    written = filled_bytes = 0
    with _progress(stored) as advance, ShardWriters(folder, compression) as writers:
        for rows in _rows(stored):
            part: list[bytes] = []
            for record in (pack(names, row) for row in rows):
                if written in starts if starts else filled_bytes >= _SHARD_BYTES or not written:
                    writers.put(part)
                    writers.begin()
                    part, filled_bytes = [], 0
                part.append(record)
                written += 1
                filled_bytes += len(record)
            writers.put(part)
            advance(len(rows))
        _expect_count(stored, written)
        shards = writers.finish()
    classes = source.class_names
    index = Index(shards=shards, spec=stored.spec, compression=compression, image=stored.encoded, class_names=classes)
    write_index(folder, index)
    return index


def _rows(stored: _Stored) -> Iterator[list[list[bytes]]]:
    """Yields some examples at a time, each as the bytes of its tensors."""
    read = 0
    settings = tf.data.Options()
    settings.deterministic = True
    try:
        for first in stored.strings.take(1):
            together = max(1, min(_CHUNK, _CHUNK_BYTES // max(1, size_bytes(first))))
            for chunk in stored.strings.batch(together).prefetch(tf.data.AUTOTUNE).with_options(settings):
                rows = chunk.numpy().tolist()
                yield rows
                read += len(rows)
    except tf.errors.OpError as error:
        raise PipelineError(
            f"Expected to read {stored.source.name}. It failed behind {read:,} examples: {first_line(error)}. Mend "
            "or remove what it names."
        ) from error


def _expect_count(stored: _Stored, written: int) -> None:
    if not written:
        raise PipelineError(
            f"Expected at least one example in {stored.source.name}. Found none. Check where the source reads from."
        )
    if stored.count not in (None, written):
        raise PipelineError(
            f"Expected {stored.count:,} examples, as {stored.source.name} says. Found {written:,}. Correct the "
            "source's `count`, or leave it out."
        )


@contextlib.contextmanager
def _progress(stored: _Stored) -> Iterator[Callable[[int], None]]:
    """Shows a bar on standard error where that is a terminal; gives the function that moves it on."""
    console = Console(file=sys.stderr)
    columns = [BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}")]
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"writing {stored.source.name}", total=stored.count)
        yield lambda examples: bar.advance(task, examples)
