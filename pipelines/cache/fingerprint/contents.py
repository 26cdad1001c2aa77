"""Hashes what an array holds, at the speed of all cores and without a copy of the whole."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from tfopt.pipelines.cache.fingerprint.description import digest

_CHUNK_BYTES = 16 * 2**20  # part of the result: another size would be another fingerprint


def hash_array(array: Any) -> bytes:
    """Returns the SHA-256 of one NumPy array without Python objects, from its type, shape and contents.

    How it lies in memory (its strides, in a file or not) does not count; bits do: 0.0 and -0.0 differ.
    """
    plain = np.asarray(array)
    header = f"{plain.dtype!r} {plain.shape}"
    if plain.dtype.names:
        # Field by field: the bytes between them are arbitrary.
        return digest("fields", header, [hash_array(plain[name]) for name in plain.dtype.names])
    rows = plain.reshape(1) if plain.ndim == 0 else plain
    step = max(1, _CHUNK_BYTES * len(rows) // max(1, rows.nbytes))
    chunks = [slice(start, start + step) for start in range(0, len(rows) if rows.nbytes else 0, step)]
    if len(chunks) < 2:
        return digest("array", header, [_hash_rows(rows, chunk) for chunk in chunks])
    with ThreadPoolExecutor() as threads:
        return digest("array", header, threads.map(partial(_hash_rows, rows), chunks))


def _hash_rows(array: Any, chosen: slice) -> bytes:
    """Hashes some rows in C order; only those of an array that does not lie so are copied."""
    rows: Any = np.ascontiguousarray(array[chosen]).reshape(-1).view(np.uint8)
    return hashlib.sha256(rows).digest()
