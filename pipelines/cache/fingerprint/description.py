"""What a value is to a fingerprint: a kind, a text and the values it consists of; and the digests of such values."""

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

_CHUNK_BYTES = 16 * 2**20  # part of the result: another size would give another fingerprint

Part = tuple[str, Any]  # how the part is reached, for messages, and the part: a value or a Description


@dataclass(frozen=True, slots=True)
class Description:
    """One value, described without the parts of its parts."""

    kind: str  # such as "list"
    text: str = ""  # what is not a value itself, such as the name of a class
    parts: Iterable[Part] = ()  # messages leave out steps of ""
    ordered: bool = True  # whether the order of the parts counts


class RefusedError(Exception):
    """Raised inside this package for a value that cannot be fingerprinted; `fingerprint` adds where it was found.

    Args:
        found: What it is and why, such as "a tf.Variable, whose value may change".
    """


def leaf(value: Any) -> bytes | None:
    """Returns the digest of a value without parts, or None for any other value; types are told apart."""
    kind = type(value)
    if kind is str:
        data = value.encode("utf-8", "surrogatepass")
    elif kind is int:
        data = hex(value).encode()  # Python limits the length of decimal texts
    elif kind is float:
        data = value.hex().encode()  # -0.0 differs from 0.0; all NaNs are the same
    elif kind is complex:
        data = f"{value.real.hex()} {value.imag.hex()}".encode()
    elif kind is bytes:
        data = value
    elif value is None or kind is bool or value is Ellipsis or value is NotImplemented:
        data = repr(value).encode()
    else:
        return None
    return hashlib.sha256(kind.__name__.encode() + b":" + data).digest()


def digest(kind: str, text: str, parts: Iterable[bytes]) -> bytes:
    """Returns the digest of a value from those of its parts; lengths come first, so nothing is ambiguous."""
    result = hashlib.sha256()
    for piece in (kind.encode(), text.encode("utf-8", "surrogatepass")):
        result.update(len(piece).to_bytes(8, "big") + piece)
    result.update(b"".join(parts))  # 32 bytes each
    return result.digest()


def hash_array(array: Any) -> bytes:
    """Returns the SHA-256 of an array's dtype, shape and contents, on all cores and without copying the whole.

    The array must not hold Python objects. Its memory layout does not count; its bits do: 0.0 and -0.0 differ.
    """
    plain = np.asarray(array)
    header = f"{plain.dtype!r} {plain.shape}"
    if plain.dtype.names:
        # Field by field: the padding between fields is arbitrary.
        return digest("fields", header, [hash_array(plain[name]) for name in plain.dtype.names])
    rows = plain.reshape(1) if plain.ndim == 0 else plain
    step = max(1, _CHUNK_BYTES * len(rows) // max(1, rows.nbytes))
    chunks = [slice(start, start + step) for start in range(0, len(rows) if rows.nbytes else 0, step)]
    if len(chunks) < 2:
        return digest("array", header, [_hash_rows(rows, chunk) for chunk in chunks])
    with ThreadPoolExecutor() as threads:
        return digest("array", header, threads.map(partial(_hash_rows, rows), chunks))


def _hash_rows(array: Any, chosen: slice) -> bytes:
    """Hashes some rows in C order; copies them only if they are stored in another order."""
    rows: Any = np.ascontiguousarray(array[chosen]).reshape(-1).view(np.uint8)
    return hashlib.sha256(rows).digest()
