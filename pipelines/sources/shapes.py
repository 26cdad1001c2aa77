"""The two shapes of sources, and how each is divided: rows by their numbers, and rows in order from shards."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.pipelines.shared.elements import without_autograph
from tfopt.pipelines.shared.seeding import from_batches, renumbered, sequence
from tfopt.pipelines.sources.source import Source


def gathered(
    name: str,
    count: int,
    read: Callable[[Any], Any],
    read_many: Callable[[Any], Any] | None,
    *,
    fingerprint: Callable[[], list[Any]],
    check: Callable[[], None] | None = None,
    encoded: Callable[[Any], Any] | None = None,
    resident: bool = True,
    **fields: Any,
) -> Source:
    """Returns a source that reads its examples by their numbers.

    Shuffles of all examples, a position in an epoch, `split`, and parts for processes that read nothing else follow.

    Args:
        name: As in `Source`, as are `encoded`, which takes a number, `resident` and the other fields.
        count: Number of examples.
        read: Given a number below `count` (int64 scalar), returns the example, in a graph.
        read_many: Given numbers (int64, (n,)), returns the batch of their examples; None if they do not batch.
        fingerprint: Returns what changes whenever the examples may have changed.
        check: Raises an error if they have; called whenever a dataset of them is made. Errors that are raised while
            `read` is traced or runs are buried in TensorFlow's.
    """

    def numbered(numbers: range) -> Source:
        def of_part(function: Callable[[Any], Any] | None) -> Any:
            if function is None:
                return None
            is_whole = (numbers.start, numbers.step) == (0, 1)
            return without_autograph(lambda at: function(at if is_whole else numbers.start + numbers.step * at))

        def checked(positions: Any) -> Any:
            if check is not None:
                check()
            return positions

        return Source(
            name=name,
            dataset=lambda: checked(tf.data.Dataset.range(len(numbers))),
            count=len(numbers),
            decode=of_part(read),
            decode_batch=of_part(read_many),
            at=checked,
            encoded=of_part(encoded),
            fingerprint=lambda: [str(numbers), *fingerprint()],
            resident=resident,
            part=lambda index, parts: numbered(numbers[index::parts]),
            **fields,
        )

    return numbered(range(count))


def sharded(
    name: str,
    spans: Any,
    read: Callable[..., Any],
    *,
    mixing: Callable[[Any], dict[str, Any]],
    fingerprint: Callable[[], list[Any]],
    readers: int = 1,
    check: Callable[[], None] | None = None,
    **fields: Any,
) -> Source:
    """Returns a source that reads shards, stretches of neighbouring rows, one after the other.

    A part for one of several processes is a stretch of all rows, whose first and last shard are cut where it ends.

    Args:
        name: As in `Source`, as are the other fields.
        spans: The first row of each shard, and the row behind its last: int64 (shards, 2).
        read: Given such a pair inside one shard (int64 scalars), returns the batch of its rows, in a graph.
        mixing: Given spans, returns the fields of `Source` by which a pipeline shuffles them.
        fingerprint: Returns what changes whenever the rows may have changed, their division in shards included.
        readers: How many shards are read at once, in order.
        check: As for `gathered`.
    """

    def spanning(spans: Any) -> Source:
        sizes = np.diff(spans)[:, 0]
        before, count = np.cumsum(sizes) - sizes, int(sizes.sum())

        def in_order() -> Any:
            if check is not None:
                check()
            # Prefetched by one, so that reading a shard overlaps with using the one before.
            return from_batches(in_shards(spans).map(read, num_parallel_calls=readers).prefetch(1), count)

        def part(index: int, parts: int) -> Source:
            ends = [count * number // parts for number in (index, index + 1)]
            own = spans[:, :1] + np.stack([np.clip(end - before, 0, sizes) for end in ends], axis=1)
            return spanning(own[own[:, 0] < own[:, 1]])

        return Source(
            name=name,
            dataset=in_order,
            count=count,
            fingerprint=lambda: [*fingerprint(), spans.tolist()],
            part=part,
            **mixing(spans),
            **fields,
        )

    return spanning(spans)


def in_shards(spans: Any) -> Any:
    """Returns the dataset of the pairs that `read` of `sharded` takes."""
    return tf.data.Dataset.from_tensor_slices((spans[:, 0], spans[:, 1]))


def in_python(read: Callable[..., Sequence[Any]], rows: Sequence[tf.TensorSpec], name: str) -> Callable[..., Any]:
    """Returns a function for graphs that calls `read` with integers and returns its arrays, batches of such rows."""

    @without_autograph
    def call(*numbers: Any) -> tuple[Any, ...]:
        types = [row.dtype for row in rows]
        arrays = tf.numpy_function(
            lambda *given: read(*map(int, given)), list(numbers), types, stateful=False, name=name
        )
        for array, row in zip(arrays, rows, strict=True):
            array.set_shape((None, *row.shape))
        return tuple(arrays)

    return call


def some_of(source: Source, count: int, place: Callable[[Any], Any], belongs: Callable[[Any], Any]) -> Source:
    """Returns `count` elements of a source, at ascending positions; without `at`, all raw elements are read for it.

    Args:
        source: Its `fingerprint`, `files`, `part` and `packed` are those of all elements, and are the caller's to set.
        count: How many elements belong to it.
        place: Given the number of one, returns its position in the source, in a graph.
        belongs: Given a position in the source, returns whether its element is one of them.
    """
    at = source.at

    def filtered() -> Any:
        kept = source.dataset().enumerate().filter(without_autograph(lambda number, _: belongs(number)))
        return kept.map(without_autograph(lambda _, element: element))

    def read(positions: Any) -> Any:
        return positions if at is None else at(renumbered(positions, without_autograph(place)))

    return replace(
        source,
        dataset=filtered if at is None else lambda: read(sequence(count)),
        count=count,
        sample=None if at is None else lambda limit: read(tf.data.Dataset.range(0, count, -(-count // limit))),
        at=None if at is None else read,
        shuffled=None,
        pools=None,
        checked=None,
    )
