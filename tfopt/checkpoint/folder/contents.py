"""What an array to be saved is: its bytes, its dtype by name, and the hash that identifies it."""

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

_PLAIN = ("bool", "complex64", "complex128", "float16", "float32", "float64")
_INTEGERS = tuple(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64))
_ADDED = tuple(name for name in dir(ml_dtypes) if name.startswith(("bfloat", "float", "int", "uint")))
DTYPES = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in (*_PLAIN, *_INTEGERS, *_ADDED)}
"""The dtypes that can be saved, by name: NumPy's numbers, bfloat16, float8 and the other small ones."""


@dataclass(frozen=True, slots=True)
class Content:
    """What an array holds. Two that are equal are stored once."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str  # of its bytes

    @property
    def size_bytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def content_of(name: str, array: Any) -> Content:
    """Returns what an array holds; raises TypeError if it is not a NumPy array, or its dtype cannot be saved."""
    if not isinstance(array, np.ndarray | np.generic) or isinstance(array, np.ma.MaskedArray):
        raise TypeError(
            f"Expected NumPy arrays. Received for {name!r}: {type(array).__name__}. Convert it with `np.asarray`."
        )
    if DTYPES.get(array.dtype.name) is None:
        raise TypeError(
            f"Expected an array of numbers or bools. Received for {name!r}: dtype {array.dtype.name}. Store strings in "
            "the metadata."
        )
    # SHA-256 releases the GIL, and on current CPUs is faster than BLAKE2 (1.4 against 1.0 GiB/s on Sapphire Rapids).
    return Content(array.dtype.name, tuple(array.shape), hashlib.sha256(bytes_of(array)).hexdigest())


def bytes_of(array: Any) -> Any:
    """Returns the bytes of an array in C order, without a copy if they already are."""
    ordered = np.asarray(array, DTYPES[array.dtype.name], order="C")
    return ordered.reshape(-1).view(np.uint8).data
