"""The dataset of a cache on disk: read from its file, and from the source where there is none or it ends early.

Examples of one known shape are stacked, many to a record: alone, a small one would take far longer to read. Others have
a record each. A record is a header of int64 (its mark, and the dimensions of every tensor), then each tensor's bytes.
The mark is the position of its first example plus its cache's tag. All parts start at multiples of 64 bytes, so that
TensorFlow can use them in place.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.pipelines.cache.store import Store
from tfopt.pipelines.shared.elements import without_autograph

_READ_AHEAD = 4 * 2**20  # bytes, of small records; small reads from network disks are slow
_RECORD = 2**20  # bytes of stacked examples; twice as much reads no faster
_ALIGNED_BYTES = 64  # EIGEN_MAX_ALIGN_BYTES
_PLAIN = frozenset(
    [
        *("bfloat16", "float16", "float32", "float64", "complex64", "complex128", "bool"),
        *("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    ]
)


def cached(store: Store, spec: Any, elements: Any, prepare: Callable[[Any], Any], *, at_once: int) -> Any:
    """Returns a dataset of examples that reads from a cache, or writes to it.

    Records carry a checksum and their position. If one is damaged or missing, the dataset goes on with the source at
    that position, so that every iteration gives every example once, in one order. `elements` gives raw elements in the
    same order on every iteration, of which `prepare` makes examples of the spec, in the same order; up to `at_once`
    of them are collected for one record.
    """
    most = _stackable(spec)
    rows = min(at_once, most)
    stacked = most > 1  # whatever `at_once` is: a run of another batch size or speed reads the same file
    records = RecordFormat(tf.nest.map_structure(_stack, spec) if stacked else spec, store.tag)

    # TensorFlow sets up each function again in each epoch, node by node, which takes longer than reading a small cache.
    # So there are few functions, with few nodes, and those that a whole cache does not need come last.
    @without_autograph
    def iteration(_: Any) -> Any:
        session, files, held, end, step = tf.numpy_function(
            store.begin, [], [tf.int64, tf.string, tf.int64, tf.int64, tf.int64]
        )
        for scalar in (session, held, end, step):
            scalar.set_shape(())
        files.set_shape([None])
        rest = tf.data.Dataset.from_tensors((session, held)).flat_map(go_on)
        return _from_file(store, records, session, files, end, step, stacked=stacked).concatenate(rest)

    @without_autograph
    def go_on(session: Any, held: Any) -> Any:
        starts, writes = tf.numpy_function(store.go_on, [session, held], [tf.int64, tf.bool])
        starts.set_shape([None])
        writes.set_shape(())
        left = tf.data.Dataset.from_tensor_slices(starts)  # one or none
        return left.flat_map(lambda start: tf.data.Dataset.from_tensors((session, start, writes)).flat_map(from_source))

    @without_autograph
    def from_source(session: Any, start: Any, writes: Any) -> Any:
        examples = prepare(elements.skip(start))
        examples = (examples.batch(rows, name="cache") if stacked else examples).enumerate()
        end = tf.data.Dataset.from_tensors(session).flat_map(lambda session: examples.take(_ended(store, session)))
        written = _writer(store, records, session, writes, rows, stacked=stacked)
        return examples.map(written, name="cache").concatenate(end.map(last))

    @without_autograph
    def last(index: Any, example: Any) -> Any:
        return example

    dataset = tf.data.Dataset.from_tensors(0).flat_map(iteration, name="cache")
    if stacked:
        # Copies each example. Slices would share the record's memory, and one in a shuffle's buffer hold all of it.
        dataset = dataset.unbatch(name="cache")
    return dataset if store.count is None else dataset.apply(tf.data.experimental.assert_cardinality(store.count))


class RecordFormat:
    """Packs and unpacks elements of one spec, an example or several stacked: ragged and sparse tensors by their parts,
    texts serialised.

    `tag` is a number of the cache's own, far from any other's, which tells its records from theirs. Raises ValueError
    if a tensor has unknown rank.
    """

    def __init__(self, spec: Any, tag: int):
        self._spec, self._tag = spec, tag
        self._parts = tf.nest.flatten(spec, expand_composites=True)
        serialised = tf.TensorSpec([None], tf.uint8)
        self._stored = [part if part.dtype.name in _PLAIN else serialised for part in self._parts]
        for part in self._stored:
            if part.shape.rank is None:
                raise ValueError(f"Expected tensors of known rank, to cache them in a folder. Found {part}.")
        self._header = 1 + sum(part.shape.rank for part in self._stored)

    @without_autograph
    def flatten(self, example: Any) -> list[Any]:
        """Returns the tensors to store, in a graph."""
        tensors = tf.nest.flatten(example, expand_composites=True)
        return [tensor if tensor.dtype.name in _PLAIN else _bytes_of(tensor) for tensor in tensors]

    def pack(self, position: int, tensors: Sequence[Any]) -> bytes:
        """Returns the record at a position, from the tensors `flatten` returned, as NumPy arrays."""
        header = [self._tag + position, *(size for tensor in tensors for size in tensor.shape)]
        parts: list[Any] = []
        for part in (np.array(header, "<i8"), *tensors):
            parts += [np.ascontiguousarray(part).reshape(-1).view(np.uint8), bytes(-part.nbytes % _ALIGNED_BYTES)]
        return b"".join(parts)

    @without_autograph
    def is_at(self, record: Any, mark: Any) -> Any:
        """Whether this is the record of this mark, in a graph."""
        return tf.reduce_all(tf.equal(tf.io.decode_raw(tf.strings.substr(record, 0, 8), tf.int64), mark))

    def nowhere(self) -> bytes:
        """Returns a record that is at no position."""
        return np.array([-1], "<i8").tobytes()

    @without_autograph
    def unpack(self, record: Any) -> Any:
        """Returns the example of a record, in a graph."""
        contents = tf.io.decode_raw(record, tf.uint8)
        header = _cast(tf.slice(contents, [0], [8 * self._header]), tf.int64)
        start, at, tensors = _padded(8 * self._header), 1, []
        for part, stored in zip(self._parts, self._stored, strict=True):
            shape: Any = stored.shape.as_list()
            if None not in shape:
                size = stored.shape.num_elements() * stored.dtype.size
            elif None not in shape[1:] and 0 not in shape:
                size = header[at] * (stored.shape[1:].num_elements() * stored.dtype.size)
                shape[0] = -1
            else:
                shape = header[at : at + len(shape)]
                size = tf.reduce_prod(shape) * stored.dtype.size
            if stored is part:
                tensor = tf.reshape(_cast(tf.slice(contents, [start], [size]), part.dtype), shape)
            else:
                tensor = tf.io.parse_tensor(tf.strings.substr(record, tf.cast(start, tf.int64), size), part.dtype)
            if tensor.shape != part.shape:
                tensor = tf.ensure_shape(tensor, part.shape)
            tensors.append(tensor)
            start, at = start + _padded(size), at + stored.shape.rank
        return tf.nest.pack_sequence_as(self._spec, tensors, expand_composites=True)


def _stackable(spec: Any) -> int:
    """Returns how many examples fit into a record; 1 if they cannot be stacked."""
    leaves = tf.nest.flatten(spec)
    plain = [leaf for leaf in leaves if isinstance(leaf, tf.TensorSpec) and leaf.dtype.name in _PLAIN]
    # `unbatch` crashes on rows of size zero.
    if not leaves or len(plain) < len(leaves) or not all(leaf.shape.num_elements() for leaf in plain):
        return 1
    return max(1, _RECORD // sum(leaf.shape.num_elements() * leaf.dtype.size for leaf in plain))


def _stack(leaf: Any) -> Any:
    return tf.TensorSpec((None, *leaf.shape), leaf.dtype)


def _from_file(
    store: Store, form: RecordFormat, session: Any, files: Any, end: Any, step: Any, *, stacked: bool
) -> Any:
    """Returns the elements of the file up to the first record that is damaged, missing or out of place.

    The records of a whole file have the marks from the store's tag up to `end`, `step` apart.
    """

    @without_autograph
    def good(mark: Any, record: Any) -> Any:
        def damaged() -> Any:
            return tf.numpy_function(store.end_of_rows, [session, mark], tf.bool)

        keeps = tf.cond(form.is_at(record, mark), lambda: True, damaged)
        keeps.set_shape(())
        return keeps

    @without_autograph
    def element(mark: Any, record: Any) -> Any:
        return form.unpack(record)

    # A damaged record ends the file; the record at no position after it then ends the reading.
    records = tf.data.TFRecordDataset(files, buffer_size=0 if stacked else _READ_AHEAD).ignore_errors(log_warning=False)
    records = records.concatenate(tf.data.Dataset.from_tensors(form.nowhere()))
    marked = tf.data.Dataset.zip(tf.data.Dataset.range(store.tag, end, step), records)
    return marked.take_while(good).map(element, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True, name="cache")


def _writer(
    store: Store, form: RecordFormat, session: Any, writes: Any, rows: int, *, stacked: bool
) -> Callable[..., Any]:
    """Returns a function of index and element that writes the element, of up to `rows` examples, and returns it."""

    def write(number: Any, index: Any, *tensors: Any) -> Any:
        count = len(tensors[0]) if stacked else 1
        store.write(number, form.pack(rows * index, tensors), count)
        return 0

    @without_autograph
    def written(index: Any, element: Any) -> Any:
        tensors = [session, index, *form.flatten(element)]
        done = tf.cond(writes, lambda: tf.numpy_function(write, tensors, tf.int64), lambda: tf.constant(0, tf.int64))
        with tf.control_dependencies([done]):
            return tf.nest.map_structure(tf.identity, element, expand_composites=True)

    return written


@without_autograph
def _ended(store: Store, session: Any) -> Any:
    """Tells the store that the source has ended; returns 0."""
    zero = tf.numpy_function(store.end_of_source, [session], tf.int64)
    zero.set_shape(())
    return zero


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
