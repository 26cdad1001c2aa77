"""The dataset of a cache on disk: read from its file, and from the source where there is none or it ends early.

A record is a header of int64 (the example's position, its cache's tag, and the dimensions of every tensor), then each
tensor's bytes. All parts start at multiples of 64 bytes, so that TensorFlow can use them in place.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.pipelines.cache.store import Store
from tfopt.pipelines.shared.elements import without_autograph

_READ_AHEAD = 4 * 2**20  # bytes; small reads from network disks are slow
_ALIGNED_BYTES = 64  # EIGEN_MAX_ALIGN_BYTES
_PLAIN = frozenset(
    [
        *("bfloat16", "float16", "float32", "float64", "complex64", "complex128", "bool"),
        *("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    ]
)


def cached(store: Store, spec: Any, elements: Any, prepare: Callable[[Any], Any]) -> Any:
    """Returns a dataset of examples that reads from a cache, or writes to it.

    Records carry a checksum and their position. If one is damaged or missing, the dataset goes on with the source at
    that position, so that every iteration gives every example once, in one order. `elements` gives raw elements in the
    same order on every iteration, of which `prepare` makes examples of the spec, in the same order.
    """
    records = RecordFormat(spec, store.tag)

    @without_autograph
    def iteration(session: Any, files: Any, held: Any) -> Any:
        files.set_shape([None])
        rest = tf.data.Dataset.from_tensors((session, held)).flat_map(from_source)
        return _from_file(store, records, session, files).concatenate(rest)

    @without_autograph
    def from_source(session: Any, held: Any) -> Any:
        start, writes = tf.numpy_function(store.go_on, [session, held], [tf.int64, tf.bool])
        start.set_shape(())
        left = tf.where(start < 0, tf.constant(0, tf.int64), -1)
        examples = prepare(elements.skip(tf.maximum(start, 0)).take(left)).enumerate(start)
        end = tf.data.Dataset.from_tensors(session).flat_map(lambda session: examples.take(_ended(store, session)))
        return examples.map(_writer(store, records, session, writes), name="cache").concatenate(end.map(last))

    @without_autograph
    def last(position: Any, example: Any) -> Any:
        return example

    begun = tf.data.Dataset.from_tensors(0).map(partial(_begin, store))
    dataset = begun.flat_map(iteration, name="cache")
    return dataset if store.count is None else dataset.apply(tf.data.experimental.assert_cardinality(store.count))


class RecordFormat:
    """Packs and unpacks the examples of one element spec: ragged and sparse tensors by their parts, texts serialised.

    `tag` is a number unique to the cache, which tells its records from another's. Raises ValueError if a tensor has
    unknown rank.
    """

    def __init__(self, spec: Any, tag: int):
        self._spec, self._tag = spec, tag
        self._parts = tf.nest.flatten(spec, expand_composites=True)
        serialised = tf.TensorSpec([None], tf.uint8)
        self._stored = [part if part.dtype.name in _PLAIN else serialised for part in self._parts]
        for part in self._stored:
            if part.shape.rank is None:
                raise ValueError(f"Expected tensors of known rank, to cache them in a folder. Found {part}.")
        self._header = 2 + sum(part.shape.rank for part in self._stored)

    @without_autograph
    def flatten(self, example: Any) -> list[Any]:
        """Returns the tensors to store, in a graph."""
        tensors = tf.nest.flatten(example, expand_composites=True)
        return [tensor if tensor.dtype.name in _PLAIN else _bytes_of(tensor) for tensor in tensors]

    def pack(self, position: int, tensors: Sequence[Any]) -> bytes:
        """Returns the record of an example from the tensors `flatten` returned, as NumPy arrays."""
        header = [position, self._tag, *(size for tensor in tensors for size in tensor.shape)]
        parts = [np.array(header, "<i8"), *tensors]
        return b"".join(_filled(np.ascontiguousarray(part).tobytes()) for part in parts)

    @without_autograph
    def is_at(self, record: Any, position: Any) -> Any:
        """Whether this is the record at that position of this cache, in a graph."""
        found = tf.io.decode_raw(tf.strings.substr(record, 0, 16), tf.int64)
        return tf.reduce_all(tf.equal(found, tf.stack([tf.cast(position, tf.int64), tf.constant(self._tag, tf.int64)])))

    def nowhere(self) -> bytes:
        """Returns a record that is at no position."""
        return _filled(np.array([-1, self._tag], "<i8").tobytes())

    @without_autograph
    def unpack(self, record: Any) -> Any:
        """Returns the example of a record, in a graph."""
        contents = tf.io.decode_raw(record, tf.uint8)
        header = _cast(contents[: 8 * self._header], tf.int64)
        start, at, tensors = _padded(8 * self._header), 2, []
        for part, stored in zip(self._parts, self._stored, strict=True):
            fixed, rank = stored.shape.is_fully_defined(), stored.shape.rank
            shape = stored.shape.as_list() if fixed else header[at : at + rank]
            count = stored.shape.num_elements() if fixed else tf.cast(tf.reduce_prod(shape), tf.int64)
            size = count * stored.dtype.size
            if stored is part:
                tensor = tf.reshape(_cast(contents[start : start + size], part.dtype), shape)
            else:
                tensor = tf.io.parse_tensor(tf.strings.substr(record, tf.cast(start, tf.int64), size), part.dtype)
            tensors.append(tf.ensure_shape(tensor, part.shape))
            start, at = start + _padded(size), at + rank
        return tf.nest.pack_sequence_as(self._spec, tensors, expand_composites=True)


@without_autograph
def _begin(store: Store, _: Any) -> Any:
    session, files, held = tf.numpy_function(store.begin, [], [tf.int64, tf.string, tf.int64])
    session.set_shape(())
    held.set_shape(())
    return session, files, held


def _from_file(store: Store, form: RecordFormat, session: Any, files: Any) -> Any:
    """Returns the examples of the file up to the first record that is damaged, missing or out of place."""

    @without_autograph
    def checked(position: Any, record: Any) -> Any:
        return form.is_at(record, position), position, record

    @without_autograph
    def good(right: Any, position: Any, record: Any) -> Any:
        def end() -> Any:
            return tf.numpy_function(store.end_of_rows, [session, position], tf.bool)

        keeps = tf.cond(right, lambda: True, end)
        keeps.set_shape(())
        return keeps

    @without_autograph
    def example(right: Any, position: Any, record: Any) -> Any:
        return form.unpack(record)

    # A damaged record ends the file; the record at no position after it then ends the reading.
    records = tf.data.TFRecordDataset(files, buffer_size=_READ_AHEAD).ignore_errors(log_warning=False)
    records = records.concatenate(tf.data.Dataset.from_tensors(form.nowhere())).enumerate()
    parallel = {"num_parallel_calls": tf.data.AUTOTUNE, "deterministic": True}
    return records.map(checked, **parallel).take_while(good).map(example, **parallel, name="cache")


def _writer(store: Store, form: RecordFormat, session: Any, writes: Any) -> Callable[..., Any]:
    """Returns a function of position and example that writes the example and returns it."""

    def write(number: Any, position: Any, *tensors: Any) -> Any:
        store.write(number, form.pack(position, tensors))
        return 0

    @without_autograph
    def written(position: Any, example: Any) -> Any:
        tensors = [session, position, *form.flatten(example)]
        done = tf.cond(writes, lambda: tf.numpy_function(write, tensors, tf.int64), lambda: tf.constant(0, tf.int64))
        with tf.control_dependencies([done]):
            return tf.nest.map_structure(tf.identity, example, expand_composites=True)

    return written


@without_autograph
def _ended(store: Store, session: Any) -> Any:
    """Tells the store that the source has ended; returns 0."""
    zero = tf.numpy_function(store.end_of_source, [session], tf.int64)
    zero.set_shape(())
    return zero


def _filled(data: bytes) -> bytes:
    return data + bytes(-len(data) % _ALIGNED_BYTES)


def _padded(size: Any) -> Any:
    return size + -size % _ALIGNED_BYTES


def _cast(contents: Any, dtype: Any) -> Any:
    """Reinterprets bytes as numbers of a dtype."""
    if dtype == tf.bool:
        return tf.cast(contents, tf.bool)
    if dtype.size == 1:
        return tf.bitcast(contents, dtype)
    return tf.bitcast(tf.reshape(contents, (-1, dtype.size)), dtype)


def _bytes_of(tensor: Any) -> Any:
    return tf.io.decode_raw(tf.io.serialize_tensor(tensor), tf.uint8)
