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

            return self._reading(lambda held: chosen, missed)

        return self._in_epochs(begin, reading)

    def in_order(self, begin: Begin, order: Callable[[Any, Any], Any]) -> Any:
        """Returns the examples in the order into which a function brings a dataset of any elements in an epoch."""

        def reading(epoch: Any) -> Any:
            def missed(given: Any) -> Any:
                return order(self.prepare(self.elements).enumerate(), epoch).skip(given)

            return self._reading(lambda held: order(tf.data.Dataset.range(held), epoch), missed)

        return self._in_epochs(begin, reading)

    def _in_epochs(self, begin: Begin, reading: Callable[[Any], Any]) -> Any:
        return begin(reading) if self.rows.size is None else from_batches(begin(reading), None)

    def _reading(self, positions: Callable[[Any], Any], missed: Callable[[Any], Any]) -> Any:
        """Returns examples, many at once if they have one shape.

        Args:
            positions: Given how many examples the cache holds, returns their positions, in the order of reading.
            missed: Given how many were read from the cache, returns the others and their positions, as pairs.
        """
        store, rows = self.store, self.rows
        around = tf.__internal__.autograph.control_status_ctx()  # users' functions are converted as outside
        reads, writes = _OTHERS, 1
        if rows.size is not None:
            fitting = max(1, _MOST_BYTES // rows.size)
            reads = min(fitting, self.batch_size * max(1, _LEAST_BYTES // (rows.size * self.batch_size)))
            writes = min(fitting, self.at_once)

        # TensorFlow sets up each function again in each epoch, node by node, which takes longer than to read a small
        # cache. So they have few nodes, and those that a whole cache does not need come last.
        @without_autograph
        def begun(_: Any) -> Any:
            session, held = tf.numpy_function(store.begin, [], [tf.int64, tf.int64])
            session.set_shape(())
            held.set_shape(())
            chunks = in_batches(positions(held), reads, full=False).take(tf.where(held < 0, tf.zeros_like(held), -1))
            found = chunks.map(read, **_PARALLEL).take_while(partial(is_good, session))
            rest = tf.data.Dataset.from_tensors((session, held)).flat_map(go_on)
            return unpacked(found).concatenate(rest)

        @without_autograph
        def read(chosen: Any) -> Any:
            found, sums = tf.numpy_function(partial(store.read, rows.size), [chosen], [rows.dtype, tf.uint8])
            found.set_shape((None,) if rows.size is None else (None, rows.size))
            return found, tf.reduce_all(tf.equal(tf.fingerprint(found), sums))

        @without_autograph
        def is_good(session: Any, found: Any, good: Any) -> Any:
            return tf.ensure_shape(tf.numpy_function(store.gives, [session, tf.shape(found)[0], good], tf.bool), ())

        def unpacked(found: Any) -> Any:
            if rows.size is not None:
                return found.map(without_autograph(lambda found, good: rows.unpack(found)), **_PARALLEL)
            alone = found.map(without_autograph(lambda found, good: found))
            return in_single_examples(alone).map(without_autograph(rows.unpack), **_PARALLEL)

        @without_autograph
        def go_on(session: Any, held: Any) -> Any:
            starts, writing = tf.numpy_function(store.go_on, [session, held], [tf.int64, tf.bool])
            starts.set_shape([None])  # one or none
            writing.set_shape(())
            left = tf.data.Dataset.from_tensor_slices(starts)
            return left.flat_map(lambda start: from_source(start, writing))

        @without_autograph
        def from_source(start: Any, writing: Any) -> Any:
            with around:
                pairs = missed(start)
            pairs = pairs if rows.size is None else pairs.batch(writes, name="cache")
            written = pairs.map(partial(write, writing), **_PARALLEL)
            if store.count is not None:
                return written
            end = tf.data.Dataset.from_tensors(0).flat_map(lambda _: written.take(ended()))
            return written.concatenate(end)

        @without_autograph
        def write(writing: Any, chosen: Any, examples: Any) -> Any:
            def packed() -> Any:
                found = rows.pack(examples)
                given = [tf.reshape(chosen, [-1]), found, tf.fingerprint(found)]
                return tf.numpy_function(store.write, given, tf.int64)

            done = tf.cond(writing, packed, lambda: tf.constant(0, tf.int64))
            with tf.control_dependencies([done]):
                return tf.nest.map_structure(tf.identity, examples, expand_composites=True)

        @without_autograph
        def ended() -> Any:
            return tf.ensure_shape(tf.numpy_function(store.end_of_source, [], tf.int64), ())

        if tf.executing_eagerly():
            return tf.data.Dataset.from_tensors(0).flat_map(begun, name="cache")
        return begun(0)  # in the graph of an epoch
