"""The dataset of a cache: its file where there is one, the source where there is none or where the file ends early."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.pipelines.cache.example_records import Rows
from tfopt.pipelines.cache.store import Store
from tfopt.pipelines.shared.elements import without_autograph

_READ_AHEAD = 4 * 2**20  # bytes; small reads of network disks are slow


def cached(store: Store, spec: Any, elements: Any, prepare: Callable[[Any], Any]) -> Any:
    """Returns a dataset of examples that is read from a cache, or written to it.

    The file's records carry a checksum and their position. Where one is damaged or missing, the dataset goes on with
    the source at that position, so that every iteration gives every example once and in one order.

    Args:
        store: The cache.
        spec: The element spec of its examples.
        elements: A dataset of raw elements, in the same order on every iteration.
        prepare: Makes a dataset of examples out of one of raw elements, and keeps their order.
    """
    rows = Rows(spec, store.tag)

    @without_autograph
    def iteration(session: Any, files: Any, held: Any) -> Any:
        files.set_shape([None])
        rest = tf.data.Dataset.from_tensors((session, held)).flat_map(from_source)
        return _from_file(store, rows, session, files).concatenate(rest)

    @without_autograph
    def from_source(session: Any, held: Any) -> Any:
        start, writes = tf.numpy_function(store.go_on, [session, held], [tf.int64, tf.bool])
        start.set_shape(())
        left = tf.where(start < 0, tf.constant(0, tf.int64), -1)
        examples = prepare(elements.skip(tf.maximum(start, 0)).take(left)).enumerate(start)
        end = tf.data.Dataset.from_tensors(session).flat_map(lambda session: examples.take(_ended(store, session)))
        return examples.map(_writer(store, rows, session, writes), name="cache").concatenate(end.map(_example))

    begun = tf.data.Dataset.from_tensors(0).map(partial(_begin, store))
    dataset = begun.flat_map(iteration, name="cache")
    return dataset if store.count is None else dataset.apply(tf.data.experimental.assert_cardinality(store.count))


@without_autograph
def _begin(store: Store, _: Any) -> Any:
    def begin() -> Any:
        session, files, held = store.begin()
        return np.int64(session), np.array(files, dtype=object), np.int64(held)

    session, files, held = tf.numpy_function(begin, [], [tf.int64, tf.string, tf.int64])
    session.set_shape(())
    held.set_shape(())
    return session, files, held


def _from_file(store: Store, rows: Rows, session: Any, files: Any) -> Any:
    """The examples of the file up to the first record that is damaged, missing or in another's place."""

    @without_autograph
    def checked(position: Any, record: Any) -> Any:
        return rows.is_at(record, position), position, record

    @without_autograph
    def good(right: Any, position: Any, record: Any) -> Any:
        def end() -> Any:
            return tf.numpy_function(store.end_of_rows, [session, position], tf.bool)

        keeps = tf.cond(right, lambda: True, end)
        keeps.set_shape(())
        return keeps

    @without_autograph
    def example(right: Any, position: Any, record: Any) -> Any:
        return rows.unpack(record)

    # A damaged record ends the file; the record at no position, behind it, then ends the reading.
    records = tf.data.TFRecordDataset(files, buffer_size=_READ_AHEAD).ignore_errors(log_warning=False)
    records = records.concatenate(tf.data.Dataset.from_tensors(rows.nowhere())).enumerate()
    parallel = {"num_parallel_calls": tf.data.AUTOTUNE, "deterministic": True}
    return records.map(checked, **parallel).take_while(good).map(example, **parallel, name="cache")


def _writer(store: Store, rows: Rows, session: Any, writes: Any) -> Callable[..., Any]:
    """A function of position and example that writes the example and returns it."""

    def write(number: Any, position: Any, *tensors: Any) -> Any:
        store.write(int(number), rows.pack(int(position), tensors))
        return np.int64(0)

    @without_autograph
    def written(position: Any, example: Any) -> Any:
        tensors = [session, position, *rows.flatten(example)]
        done = tf.cond(writes, lambda: tf.numpy_function(write, tensors, tf.int64), lambda: tf.constant(0, tf.int64))
        with tf.control_dependencies([done]):
            return tf.nest.map_structure(tf.identity, example, expand_composites=True)

    return written


@without_autograph
def _ended(store: Store, session: Any) -> Any:
    """Says that the source has ended; returns 0."""

    def end(number: Any) -> Any:
        store.end_of_source(int(number))
        return np.int64(0)

    zero = tf.numpy_function(end, [session], tf.int64)
    zero.set_shape(())
    return zero


@without_autograph
def _example(position: Any, example: Any) -> Any:
    del position
    return example
