"""`write_records`: writes a source's examples as TFRecord shards with an index, whole or not at all."""

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
from tfopt.errors import PipelineError, UnsupportedError
from tfopt.pipelines.as_source import as_source
from tfopt.pipelines.shared.elements import apply, element_of, first_line, size_bytes
from tfopt.pipelines.shared.epochs import Epoch, reduced
from tfopt.pipelines.shared.paths import as_path, expect_utf8
from tfopt.pipelines.shared.seeding import part_seed, permutation, shuffle
from tfopt.pipelines.sources.image_files import expect_image_bytes
from tfopt.pipelines.sources.source import Source
from tfopt.pipelines.tfrecords.format import Index, describe, features, pack, to_strings, write_index
from tfopt.pipelines.tfrecords.record_files import expect_compression
from tfopt.pipelines.tfrecords.shards import ShardWriters, published

# Large enough to be read in long runs, small enough that shuffling shards mixes:
# https://www.tensorflow.org/tutorials/load_data/tfrecord advises 100 MB or more.
_SHARD_BYTES = 128 * 2**20
_CHUNK_BYTES = 2**20  # examples cross from TensorFlow to Python in chunks; one by one costs several times as much
_CHUNK = 256
_MIXED_BYTES = 2**30  # of raw elements that the shuffle holds
_LEAST_BYTES = 256  # what it takes for a smaller element
_MOST_UNKNOWN = 1_000_000  # elements that it holds if their number is unknown
_SAMPLED = 32
_JPEG = b"\xff\xd8\xff"


def write_records(
    source: Any,
    folder: str | os.PathLike[str],
    *,
    shards: int | None = None,
    compression: str | None = None,
    shuffle_seed: int | None = 0,
) -> Index:
    """Writes the examples of a source into a folder of TFRecord files, which `records(folder)` reads back unchanged.

    Use it for data that is slow to read or decode, or scattered over many small files. The examples are shuffled, so
    that those read together are of many classes; encoded images stay encoded. The folder appears when everything is
    written, or not at all.

    Args:
        source: Anything that `build_pipeline` takes: a `Source`, arrays, a dataset, a path.
        folder: A new or empty local folder.
        shards: How many files to write, with equal numbers of examples. Default: one per 128 MiB.
        compression: "GZIP" or "ZLIB". Default: none, which is faster to write and to read.
        shuffle_seed: Names the order of the examples: with 0, the default, or any other seed, every call shuffles in
            the same way. The index records it. What does not fit into 1 GiB is mixed within as much; images and arrays
            are shuffled by their paths and row numbers, which do. None keeps the order of the source, for data that is
            compared with something else by position.

    Returns:
        The index that is written beside the shards.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If `shards` is not possible, `shuffle_seed` is negative, the compression is unknown, or the folder
            has no name or is remote.
        UnsupportedError: If the source makes whole batches.
        PipelineError: If the folder is not empty or is being written, an example cannot be read or stored, the source
            is empty or endless, or the disk is full. Nothing is left behind then.

    Example:
        >>> import numpy as np
        >>> from tfopt.pipelines import records
        >>> index = write_records((np.zeros((10, 4)), np.arange(10)), "shards", shards=2)  # doctest: +SKIP
        >>> records("shards").count  # doctest: +SKIP
        10
    """
    expect_compression(compression)
    if shuffle_seed is not None:
        remedy = "Pass another, or None to keep the source's order."
        shuffle_seed = checks.integer("shuffle_seed", shuffle_seed, remedy, least=0)
    path = as_path("the path of a folder", folder)
    if not path or "\0" in path:
        raise ValueError(f"Expected the path of a new or empty folder. Received: {path!r}. Name one.")
    if ":/" in path:  # a Path has one slash left of a URL's two
        raise ValueError(
            f"Expected the path of a local folder, which appears by one rename when everything is written. Received: "
            f"{path!r}. Write to a local folder and copy it there; records() reads it there too."
        )
    path = expect_utf8(path)
    encoding = _encoding(as_source(source), shuffle_seed)
    starts = None
    if shards is not None:
        starts = _starts(checks.integer("shards", shards, "Pass a number of files.", least=1), encoding.count)
    with published(path) as temporary:
        try:
            index = _write(encoding, temporary, starts, compression or "", shuffle_seed)
        except (OSError, tf.errors.OpError) as error:
            raise PipelineError(
                f"Expected to write {path!r}. It failed, and nothing of it is left: {first_line(error)}. "
                "Check that the disk has room and can be written."
            ) from error
    return index


@dataclass(frozen=True, slots=True)
class _Encoding:
    """A source's examples, ready to be written."""

    source: Source
    spec: Any  # of an example, as JSON values
    strings: Any  # a dataset of string vectors: the bytes of each tensor of an example
    count: int | None  # None if unknown
    image: bool  # whether the first tensor is an encoded image


def _encoding(source: Source, shuffle_seed: int | None) -> _Encoding:
    if source.batched:
        raise UnsupportedError(
            f"Expected single examples. {source.name} makes whole batches. What to do: pass loader(..., batched=False) "
            "of a loader that yields single examples."
        )
    dataset = source.dataset()
    cardinality = int(dataset.cardinality())
    if cardinality == tf.data.INFINITE_CARDINALITY:
        raise PipelineError(
            f"Expected examples that end. {source.name} has no end. Take a part of it with the dataset's `take`."
        )
    raw = dataset.element_spec

    # Not marked do_not_convert: AutoGraph must reach the user's functions, as in Dataset.map.
    def decoded(*arguments: Any) -> Any:
        element = element_of(arguments, raw)
        return element if source.decode is None else apply(source.decode, element)

    def encoded(*arguments: Any) -> Any:
        element = element_of(arguments, raw)
        contents, *rest = apply(source.encoded or decoded, element)
        name = source.name if source.origin is None else apply(source.origin, element)
        return expect_image_bytes(contents, name), *rest

    # An image that `records` would decode to something else is written decoded.
    image = source.encoded is not None and source.decode is not None
    image = image and tf.nest.flatten(dataset.map(decoded).element_spec)[0] == tf.TensorSpec((None, None, 3), tf.uint8)
    example = encoded if image else decoded

    # One map: for small examples a second one costs a quarter of the time.
    def strings(*arguments: Any) -> Any:
        return to_strings(example(*arguments))

    spec = describe(dataset.map(example).element_spec)
    count = source.count if source.count is not None or cardinality < 0 else cardinality
    if shuffle_seed is not None:
        dataset = _mixed(source, dataset, count, shuffle_seed)
    return _Encoding(source, spec, dataset.map(strings, num_parallel_calls=tf.data.AUTOTUNE), count, image)


def _mixed(source: Source, dataset: Any, count: int | None, seed: int) -> Any:
    """Returns the raw elements, which may be paths or row numbers, in an order shuffled as far as memory allows."""
    if source.at is not None and count is not None:
        return source.at(permutation(count, Epoch.first(reduced(seed)).lasting_key("mix")))
    try:
        sampled = source.sample(_SAMPLED) if source.sample else dataset.take(_SAMPLED)
        sizes = [size_bytes(element) for element in sampled]
    except tf.errors.OpError as error:
        raise _unread(source, 0, error) from error
    buffer = max(1, int(_MIXED_BYTES / max(sum(sizes) / max(1, len(sizes)), _LEAST_BYTES)))
    if source.shuffled is not None:
        dataset = source.shuffled(part_seed(seed, "files"))
    # The buffer's table is allocated at once.
    return shuffle(dataset, min(buffer, count or _MOST_UNKNOWN), Epoch.first(reduced(seed)).lasting_key("mix"))


def _starts(shards: int, count: int | None) -> frozenset[int]:
    """Returns the numbers of the examples that begin a shard."""
    if count is None or shards > count:
        known = "an unknown number of" if count is None else f"{count:,}"
        raise ValueError(
            f"Expected `shards` only for a known number of examples, and at most one for each. Received: {shards} "
            f"for {known} examples. Leave it out, for shards of 128 MiB."
        )
    return frozenset(shard * count // shards for shard in range(shards))


def _write(
    encoding: _Encoding, folder: str, starts: frozenset[int] | None, compression: str, shuffle_seed: int | None
) -> Index:
    name, names = encoding.source.name, features(encoding.spec)
    written = filled_bytes = 0
    only_jpeg = encoding.image
    with _progress(encoding) as advance, ShardWriters(folder, compression) as writers:
        for rows in _rows(encoding):
            part: list[bytes] = []
            only_jpeg = only_jpeg and all(row[0].startswith(_JPEG) for row in rows)
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
        if not written:
            raise PipelineError(f"Expected at least one example in {name}. Found none. Check where it reads from.")
        if encoding.count not in (None, written):
            raise PipelineError(
                f"Expected {encoding.count:,} examples, as {name} says. Found {written:,}. Correct the source's "
                "`count`, or leave it out."
            )
        shards = writers.finish()
    index = Index(
        shards=shards,
        spec=encoding.spec,
        compression=compression,
        image=encoding.image,
        only_jpeg=only_jpeg,
        class_names=encoding.source.class_names,
        shuffle_seed=shuffle_seed,
    )
    write_index(folder, index)
    return index


def _rows(encoding: _Encoding) -> Iterator[list[list[bytes]]]:
    """Yields chunks of examples, each as the bytes of its tensors."""
    read = 0
    settings = tf.data.Options()
    settings.deterministic = True
    try:
        for first in encoding.strings.take(1):
            chunk_size = max(1, min(_CHUNK, _CHUNK_BYTES // max(1, size_bytes(first))))
            for chunk in encoding.strings.batch(chunk_size).prefetch(tf.data.AUTOTUNE).with_options(settings):
                rows = chunk.numpy().tolist()
                yield rows
                read += len(rows)
    except tf.errors.OpError as error:
        raise _unread(encoding.source, read, error) from error


def _unread(source: Source, read: int, error: tf.errors.OpError) -> PipelineError:
    return PipelineError(
        f"Expected to read {source.name}. It failed after {read:,} examples: {first_line(error)}. Fix or remove what "
        "it names."
    )


@contextlib.contextmanager
def _progress(encoding: _Encoding) -> Iterator[Callable[[int], None]]:
    """Shows a bar if standard error is a terminal; yields the function that advances it."""
    console = Console(file=sys.stderr)
    columns = [BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}")]
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"writing {encoding.source.name}", total=encoding.count)
        yield lambda examples: bar.advance(task, examples)
