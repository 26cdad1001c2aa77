"""Rows of a cache on disk: examples as bytes."""

from typing import Any

import numpy as np
import tensorflow as tf

_PLAIN = frozenset(
    [
        *("bfloat16", "float16", "float32", "float64", "complex64", "complex128", "bool"),
        *("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    ]
)


class Rows:
    """Packs examples of one spec into rows, and unpacks them, in a graph.

    Examples of one known shape are the bytes of their tensors, one after another, and come many at once. Any other is a
    header of int64, the dimensions of every tensor, and their bytes: ragged and sparse tensors by their parts, strings
    serialised.

    Raises:
        ValueError: If a tensor has unknown rank.
    """

    def __init__(self, spec: Any):
        self._spec = spec
        self._parts = tf.nest.flatten(spec, expand_composites=True)
        serialised = tf.TensorSpec([None], tf.uint8)
        self._stored = [part if part.dtype.name in _PLAIN else serialised for part in self._parts]
        for part in self._stored:
            if part.shape.rank is None:
                raise ValueError(f"Expected tensors of known rank, to cache them in a folder. Found {part}.")
        leaves = tf.nest.flatten(spec)
        dense = all(isinstance(leaf, tf.TensorSpec) and leaf.dtype.name in _PLAIN for leaf in leaves)
        sizes = [_size(leaf) for leaf in leaves] if dense else []
        # TensorFlow's slices of rows without values crash.
        self.size = sum(sizes) if sizes and all(sizes) else None
        """Bytes of a row; None if rows differ, or their examples cannot be stacked."""
        self.dtype = tf.string if self.size is None else tf.uint8
        """Of rows: strings, or bytes in shape (rows, size)."""

    def pack(self, example: Any) -> Any:
        """Returns the rows of a chunk of examples, uint8 of shape (rows, size); or that of an example, string (1,)."""
        tensors = tf.nest.flatten(example, expand_composites=True)
        if self.size is None:
            plain = [part if part.dtype.name in _PLAIN else _serialised(part) for part in tensors]
            return tf.ensure_shape(tf.numpy_function(_joined, plain, tf.string), (1,))
        rows = tf.shape(tensors[0])[0]
        return tf.concat([tf.reshape(_bytes_of(tensor), (rows, -1)) for tensor in tensors], axis=1)

    def unpack(self, rows: Any) -> Any:
        """Returns the chunk of examples in rows; or the example in a row, string ()."""
        return self._unpack_alone(rows) if self.size is None else self._unpack_chunk(rows)

    def _unpack_chunk(self, rows: Any) -> Any:
        sizes = [_size(part) for part in self._parts]
        columns = [rows] if len(sizes) == 1 else tf.split(rows, sizes, axis=1)
        tensors = [
            tf.reshape(_cast(column, part.dtype), (-1, *part.shape))
            for column, part in zip(columns, self._parts, strict=True)
        ]
        return tf.nest.pack_sequence_as(self._spec, tensors)

    def _unpack_alone(self, row: Any) -> Any:
        contents = tf.io.decode_raw(row, tf.uint8)
        start = 8 * sum(part.shape.rank for part in self._stored)
        header = _cast(contents[:start], tf.int64)
        at, tensors = 0, []
        for part, stored in zip(self._parts, self._stored, strict=True):
            shape = header[at : at + stored.shape.rank]
            size = tf.reduce_prod(shape) * stored.dtype.size
            if stored is part:
                tensor = tf.reshape(_cast(contents[start : start + size], part.dtype), shape)
            else:
                tensor = tf.io.parse_tensor(tf.strings.substr(row, tf.cast(start, tf.int64), size), part.dtype)
            tensors.append(tf.ensure_shape(tensor, part.shape))
            start, at = start + size, at + stored.shape.rank
        return tf.nest.pack_sequence_as(self._spec, tensors, expand_composites=True)


def _size(part: Any) -> int:
    """Bytes of a tensor of this spec; 0 if unknown."""
    return (part.shape.num_elements() or 0) * int(part.dtype.size)


def _joined(*tensors: Any) -> Any:
    """Returns the row of an example's tensors, given as NumPy arrays."""
    header = np.array([size for tensor in tensors for size in tensor.shape], "<i8")
    return np.array([b"".join(np.ascontiguousarray(part).tobytes() for part in (header, *tensors))], object)


def _serialised(tensor: Any) -> Any:
    return tf.io.decode_raw(tf.io.serialize_tensor(tensor), tf.uint8)


def _bytes_of(tensor: Any) -> Any:
    return tf.cast(tensor, tf.uint8) if tensor.dtype == tf.bool else tf.bitcast(tensor, tf.uint8)


def _cast(contents: Any, dtype: Any) -> Any:
    """Reinterprets bytes as numbers of a dtype, in one dimension."""
    if dtype == tf.bool:
        return tf.cast(contents, tf.bool)
    return tf.bitcast(tf.reshape(contents, (-1, dtype.size) if dtype.size > 1 else (-1,)), dtype)
