"""The dataset of a cache on disk: its rows, read by position, and examples of the source where it is not whole."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import tensorflow as tf

from tfopt.pipelines.cache.rows import Rows
from tfopt.pipelines.cache.store import Store
from tfopt.pipelines.shared.elements import in_single_examples, without_autograph
from tfopt.pipelines.shared.seeding import from_batches, in_batches

_LEAST_BYTES, _MOST_BYTES = 2**18, 2**23  # of rows read at once: for few bytes, the call takes longer than the reading
_OTHERS = 32  # rows of any length, read at once
_PARALLEL = {"num_parallel_calls": tf.data.AUTOTUNE, "deterministic": True, "name": "cache"}

Begin = Callable[..., Any]  # makes a dataset of what a function gives for each epoch, as `Flow.begin` does


@dataclass(frozen=True, slots=True)
class Cached:
    """Examples in a cache on disk, or on their way there. Each reading gives every example once."""

    store: Store
    elements: Any  # raw ones, in the same order on every iteration: their numbers are the positions
    at: Callable[[Any], Any] | None  # given a dataset of positions, returns the raw elements there; None if it cannot
    prepare: Callable[[Any], Any]  # makes examples of raw elements, in the same order
    rows: Rows  # of these examples
    batch_size: int
    at_once: int  # examples that wait for each other, to be written together

    def by_position(self, begin: Begin, positions: Callable[[Any], Any]) -> Any:
        """Returns the examples at the positions that a function gives for each epoch; the source has them by `at`."""

        def reading(epoch: Any) -> Any:
            chosen = positions(epoch)

            def missed(given: Any) -> Any:
                left = chosen.skip(given)
                return tf.data.Dataset.zip(left, self.prepare(self.at(left)))  # type: ignore[misc]

            return _Reading(self, lambda held: chosen, missed, epoch).examples()

        return self._in_epochs(begin, reading)

    def in_order(self, begin: Begin, order: Callable[[Any, Any], Any]) -> Any:
        """Returns the examples in the order into which a function brings a dataset of any elements in an epoch."""

        def reading(epoch: Any) -> Any:
            def missed(given: Any) -> Any:
                return order(self.prepare(self.elements).enumerate(), epoch).skip(given)

            return _Reading(self, lambda held: order(tf.data.Dataset.range(held), epoch), missed, epoch).examples()

        return self._in_epochs(begin, reading)

    def _in_epochs(self, begin: Begin, reading: Callable[[Any], Any]) -> Any:
        return begin(reading) if self.rows.size is None else from_batches(begin(reading), None)


class _Reading:
    """One reading of cached examples, in the graph of an epoch.

    TensorFlow sets up each function again in each epoch, node by node, which takes longer than reading a small cache.
    So they have few nodes, and those that a whole cache does not need come last.

    Args:
        cached: What is read.
        positions: Given how many examples the cache holds, returns their positions, in the order of reading.
        missed: Given how many were read from the cache, returns the others and their positions, as pairs.
        epoch: The epoch.
    """

    def __init__(self, cached: Cached, positions: Callable[[Any], Any], missed: Callable[[Any], Any], epoch: Any):
        self._store, self._rows = cached.store, cached.rows
        self._positions, self._missed, self._epoch = positions, missed, epoch
        self._around = tf.__internal__.autograph.control_status_ctx()  # users' functions are converted as outside
        self._reads, self._writes = _OTHERS, 1  # examples at once
        if cached.rows.size is not None:
            size, batch = cached.rows.size, cached.batch_size
            fitting = max(1, _MOST_BYTES // size)
            self._reads = min(fitting, batch * max(1, _LEAST_BYTES // (size * batch)))
            self._writes = min(fitting, cached.at_once)

    def examples(self) -> Any:
        """Returns the examples, many at once if they have one shape."""
        if tf.executing_eagerly():
            return tf.data.Dataset.from_tensors(0).flat_map(self._begun, name="cache")
        return self._begun(0)

    @without_autograph
    def _begun(self, _: Any) -> Any:
        session, held = tf.numpy_function(self._store.begin, [], [tf.int64, tf.int64])
        session.set_shape(())
        held.set_shape(())
        chunks = in_batches(self._positions(held), self._reads, full=False)
        chunks = chunks.take(tf.where(held < 0, tf.zeros_like(held), -1))
        found = chunks.map(self._read, **_PARALLEL).take_while(partial(self._is_good, session))
        rest = tf.data.Dataset.from_tensors((session, held)).flat_map(self._go_on)
        return self._unpacked(found).concatenate(rest)

    @without_autograph
    def _read(self, chosen: Any) -> Any:
        rows = self._rows
        found, sums = tf.numpy_function(partial(self._store.read, rows.size), [chosen], [rows.dtype, tf.uint8])
        found.set_shape((None,) if rows.size is None else (None, rows.size))
        return found, tf.reduce_all(tf.equal(tf.fingerprint(found), sums))

    @without_autograph
    def _is_good(self, session: Any, found: Any, good: Any) -> Any:
        given = [session, tf.shape(found)[0], good]
        return tf.ensure_shape(tf.numpy_function(self._store.gives, given, tf.bool), ())

    def _unpacked(self, found: Any) -> Any:
        rows = self._rows
        if rows.size is not None:
            return found.map(without_autograph(lambda found, good: rows.unpack(found)), **_PARALLEL)
        alone = found.map(without_autograph(lambda found, good: found))
        return in_single_examples(alone).map(without_autograph(rows.unpack), **_PARALLEL)

    @without_autograph
    def _go_on(self, session: Any, held: Any) -> Any:
        starts, writing = tf.numpy_function(self._store.go_on, [session, held], [tf.int64, tf.bool])
        starts.set_shape([None])  # one or none
        writing.set_shape(())
        left = tf.data.Dataset.from_tensor_slices(starts)
        return left.flat_map(without_autograph(lambda start: self._from_source(session, start, writing)))

    def _from_source(self, session: Any, start: Any, writing: Any) -> Any:
        with self._around:
            pairs = self._missed(start)
        pairs = pairs if self._rows.size is None else pairs.batch(self._writes, name="cache")
        written = pairs.map(partial(self._write, session, writing), **_PARALLEL)
        if self._store.count is not None:
            return written
        # Only a reading that left nothing out knows how many examples there are.
        skipped = tf.cast(self._epoch.readings.skipped, tf.int64) + start
        ended = tf.data.Dataset.from_tensors((session, skipped)).map(without_autograph(self._end))
        return written.concatenate(ended.flat_map(written.take))

    @without_autograph
    def _write(self, session: Any, writing: Any, chosen: Any, examples: Any) -> Any:
        def packed() -> Any:
            found = self._rows.pack(examples)
            given = [session, tf.reshape(chosen, [-1]), found, tf.fingerprint(found)]
            return tf.numpy_function(self._store.write, given, tf.int64)

        done = tf.cond(writing, packed, lambda: tf.constant(0, tf.int64))
        with tf.control_dependencies([done]):
            return tf.nest.map_structure(tf.identity, examples, expand_composites=True)

    def _end(self, session: Any, skipped: Any) -> Any:
        return tf.ensure_shape(tf.numpy_function(self._store.end_of_source, [session, skipped], tf.int64), ())
