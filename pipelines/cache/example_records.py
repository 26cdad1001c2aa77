"""Examples as records: packed by Python as they are written, unpacked in the graph as they are read.

A record is a header of int64: the example's position, its cache's tag, and the dimensions of every tensor; then each
tensor's bytes. All parts begin at multiples of 64 bytes, so that TensorFlow can use them where they lie.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.pipelines.shared.elements import without_autograph

_ALIGNED = 64  # EIGEN_MAX_ALIGN_BYTES
_PLAIN = frozenset(
    [
        *("bfloat16", "float16", "float32", "float64", "complex64", "complex128", "bool"),
        *("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    ]
)


class Rows:
    """Packs and unpacks the examples of one element spec.

    Args:
        spec: The element spec. Ragged and sparse tensors are stored by their parts, texts serialised.
        tag: A number that no other cache has, so that a record of another one is known.

    Raises:
        ValueError: A tensor is of unknown rank.
    """

    def __init__(self, spec: Any, tag: int):
        self._spec, self._tag = spec, tag
        self._parts = tf.nest.flatten(spec, expand_composites=True)
        self._plain = [part.dtype.name in _PLAIN for part in self._parts]
        self._ranks = [part.shape.rank if plain else 1 for part, plain in zip(self._parts, self._plain, strict=True)]
        for part, rank in zip(self._parts, self._ranks, strict=True):
            if rank is None:
                raise ValueError(f"Expected tensors of known rank, to cache them in a folder. Found {part}.")
        self._header = 2 + sum(rank or 0 for rank in self._ranks)

    @property
    def dtypes(self) -> list[Any]:
        """Of the tensors that `flatten` gives."""
        return [part.dtype if plain else tf.uint8 for part, plain in zip(self._parts, self._plain, strict=True)]

    @without_autograph
    def flatten(self, example: Any) -> list[Any]:
        """Returns the tensors to store, in a graph."""
        parts = tf.nest.flatten(example, expand_composites=True)
        return [part if plain else _bytes_of(part) for part, plain in zip(parts, self._plain, strict=True)]

    def pack(self, position: int, tensors: Sequence[Any]) -> bytes:
        """Returns the record of an example, whose tensors came out of `flatten`, as NumPy arrays."""
        header = [position, self._tag, *(size for tensor in tensors for size in tensor.shape)]
        parts = [np.array(header, "<i8"), *tensors]
        return b"".join(_filled(np.ascontiguousarray(part).tobytes()) for part in parts)

    @without_autograph
    def is_at(self, record: Any, position: Any) -> Any:
        """Whether this is the record of that position of this cache, in a graph."""
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
        for part, plain, rank in zip(self._parts, self._plain, self._ranks, strict=True):
            known = part.shape if plain else tf.TensorShape([None])
            fixed = known.is_fully_defined()
            shape = known.as_list() if fixed else header[at : at + rank]
            dtype = part.dtype if plain else tf.uint8
            count = known.num_elements() if fixed else tf.cast(tf.reduce_prod(shape), tf.int64)
            size = count * dtype.size
            if plain:
                tensor = tf.reshape(_cast(contents[start : start + size], dtype), shape)
            else:
                tensor = tf.io.parse_tensor(tf.strings.substr(record, tf.cast(start, tf.int64), size), part.dtype)
            tensors.append(tf.ensure_shape(tensor, part.shape))
            start, at = start + _padded(size), at + rank
        return tf.nest.pack_sequence_as(self._spec, tensors, expand_composites=True)


def _filled(data: bytes) -> bytes:
    return data + bytes(-len(data) % _ALIGNED)


def _padded(size: Any) -> Any:
    return size + -size % _ALIGNED


def _cast(contents: Any, dtype: Any) -> Any:
    """The bytes as numbers of a type."""
    if dtype == tf.bool:
        return tf.cast(contents, tf.bool)
    if dtype.size == 1:
        return tf.bitcast(contents, dtype)
    return tf.bitcast(tf.reshape(contents, (-1, dtype.size)), dtype)


def _bytes_of(tensor: Any) -> Any:
    return tf.io.decode_raw(tf.io.serialize_tensor(tensor), tf.uint8)
