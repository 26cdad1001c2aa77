"""Hashes plain values, such as what a source's `fingerprint` returns."""

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import PurePath
from typing import Any

import numpy as np
import tensorflow as tf

_CHUNK_BYTES = 16 * 2**20  # part of the result: another size would give another fingerprint


def hash_value(value: Any, *, name: str) -> str:
    """Returns a text that is the same in every process for the same values, and different for others.

    Types count, and so does the order of a dict's items.

    Args:
        value: Numbers, strings, paths, arrays and eager tensors, in lists, tuples and dicts.
        name: What messages call the value, such as "source".

    Returns:
        A SHA-256 as 64 hexadecimal digits.

    Raises:
        ValueError: If it holds anything else, such as a function.

    Example:
        >>> hash_value({"size": 2}, name="source") == hash_value({"size": 2.0}, name="source")
        False
    """
    return _of(value, name).hex()


def digest(parts: Iterable[bytes | str]) -> bytes:
    """Returns the SHA-256 of parts; their lengths come first, so that nothing is ambiguous."""
    result = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else part.encode("utf-8", "surrogatepass")
        result.update(len(data).to_bytes(8, "big") + data)
    return result.digest()


def _of(value: Any, name: str) -> bytes:
    kind = type(value)
    if kind in (str, bytes):
        return digest([kind.__name__, value])
    if kind is int:
        return digest(["int", hex(value)])  # Python limits the length of decimal texts
    if value is None or kind in (bool, float, complex, range):
        return digest([kind.__name__, repr(value)])  # -0.0 differs from 0.0; all NaNs are the same
    if isinstance(value, PurePath):
        return digest([kind.__name__, str(value)])
    if isinstance(value, list | tuple):
        return digest([kind.__name__, *(_of(part, name) for part in value)])
    if isinstance(value, dict):
        return digest([kind.__name__, *(_of(part, name) for item in value.items() for part in item)])
    if kind in (np.ndarray, np.memmap) or isinstance(value, np.generic):
        return _array(np.asarray(value), name)
    if isinstance(value, tf.Tensor) and hasattr(value, "numpy") and value.dtype not in (tf.resource, tf.variant):
        return digest(["tensor", value.dtype.name, _array(np.asarray(value.numpy()), name)])
    if isinstance(value, tf.RaggedTensor | tf.SparseTensor):
        return digest([kind.__name__, _of(tf.nest.flatten(value, expand_composites=True), name)])
    raise ValueError(
        f"Expected plain values in {name!r}, for a cache on disk: numbers, strings, paths and arrays, in lists, tuples "
        f"and dicts. Found {_described(value)}. Leave it out, and pass cache_key='…', a text that you change whenever "
        "it would give other examples."
    )


def _described(value: Any) -> str:
    if callable(value):
        return f"the function {getattr(value, '__qualname__', type(value).__qualname__)}, whose code cannot be compared"
    return f"an object of type {type(value).__module__}.{type(value).__qualname__}"


def _array(array: Any, name: str) -> bytes:
    """Hashes an array's dtype, shape and contents, on all cores and without copying the whole.

    Its memory layout does not count; its bits do: 0.0 and -0.0 differ.
    """
    header = f"{array.dtype!r} {array.shape}"
    if array.dtype.names:  # field by field: the padding between fields is arbitrary
        return digest(["fields", header, *(_array(array[field], name) for field in array.dtype.names)])
    if array.dtype.hasobject or array.dtype.kind == "T":  # T: variable-length texts, stored elsewhere
        return digest(["objects", header, _of(array.ravel().tolist(), name)])
    rows = array.reshape(1) if array.ndim == 0 else array
    step = max(1, _CHUNK_BYTES * len(rows) // max(1, rows.nbytes))
    chunks = [slice(start, start + step) for start in range(0, len(rows) if rows.nbytes else 0, step)]
    if len(chunks) < 2:
        return digest(["array", header, *(_rows(rows, chunk) for chunk in chunks)])
    with ThreadPoolExecutor() as threads:
        return digest(["array", header, *threads.map(partial(_rows, rows), chunks)])


def _rows(array: Any, chosen: slice) -> bytes:
    """Hashes some rows in C order; copies them only if they are stored in another order."""
    rows: Any = np.ascontiguousarray(array[chosen]).reshape(-1).view(np.uint8)
    return hashlib.sha256(rows).digest()
