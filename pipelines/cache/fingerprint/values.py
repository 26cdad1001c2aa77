"""What a value is to a fingerprint, and the plain ones: containers, arrays, tensors, Python's own compiled types."""

import hashlib
import mmap
import os
import re
import types
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import PurePath
from typing import Any

import numpy as np
import tensorflow as tf

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
    """Says what cannot be fingerprinted and why, for `fingerprint`, which adds where it was found."""


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


# Read through the built-in type's methods: a subclass's may do anything.
CONTENTS: dict[type, Callable[[Any], Description]] = {
    dict: lambda value: Description("dict", parts=_pairs(dict.items(value))),
    list: lambda value: Description("list", parts=elements(list.__iter__(value))),
    tuple: lambda value: Description("tuple", parts=elements(tuple.__iter__(value))),
    set: lambda value: Description("set", parts=elements(set.__iter__(value)), ordered=False),
    frozenset: lambda value: Description("frozenset", parts=elements(frozenset.__iter__(value)), ordered=False),
    str: lambda value: Description("str", str.__str__(value)),
    int: lambda value: Description("int", hex(int.__int__(value))),
    float: lambda value: Description("float", float.hex(value)),
    bytes: lambda value: Description("bytes", bytes.hex(value)),
    np.ndarray: lambda value: _array(value),
}


def describe_value(value: Any) -> Description | None:
    """Returns the description of a plain value, or None for anything else."""
    kind = type(value)
    if _is_of_arrow(kind):
        return Description("Arrow type", str(value))
    describe = CONTENTS.get(kind) or _EXACT.get(kind)
    if describe is None:
        describe = next((each for known, each in _SUBCLASSED.items() if issubclass(kind, known)), None)
    return None if describe is None else describe(value)


def elements(values: Iterable[Any]) -> Iterator[Part]:
    """Yields the elements of a sequence as parts."""
    return ((f"[{index}]", value) for index, value in enumerate(values))


def named(values: Iterable[tuple[str, Any]], step: str = "`{}`") -> Iterator[Part]:
    """Yields named values as parts, sorted by name."""
    for name, value in sorted(values, key=lambda item: str(item[0])):
        yield from (("", name), (step.format(name), value))


def reduced(value: Any) -> Description:
    """Describes an object of one of Python's own compiled types by what pickle would rebuild it from."""
    kind = type(value)
    try:
        made: Any = value.__reduce_ex__(4)
    except (TypeError, ValueError) as error:
        raise RefusedError(
            f"an object of type {kind.__module__}.{kind.__qualname__}, whose state cannot be read"
        ) from error
    if isinstance(made, str):
        return Description("named", f"{kind.__module__}.{made}")
    contents = [list(part) if isinstance(part, Iterator) else part for part in made]
    return Description("made", parts=[("", part) for part in contents])


def _is_of_arrow(kind: type) -> bool:
    """Whether this is a data type of pyarrow's own, which is not imported for it."""
    return kind.__module__ == "pyarrow.lib" and any(base.__name__ == "DataType" for base in kind.__mro__)


def _pairs(items: Iterable[tuple[Any, Any]]) -> Iterator[Part]:
    for key, value in items:
        yield "a key", key
        yield f"[{key!r}]" if type(key) in (str, int) else "a value", value


def _array(array: Any) -> Description:
    base = array
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    if isinstance(base, mmap.mmap) and getattr(array, "mode", "r+") != "c" and not memoryview(base).readonly:
        raise RefusedError("a memory map that may be written to, here or by another process (map it with mode 'r')")
    if array.dtype.hasobject or array.dtype.kind == "T":  # T: variable-length texts, stored elsewhere
        text = f"{array.dtype!r} {array.shape}"
        return Description("array of objects", text, elements(np.asarray(array).ravel().tolist()))
    return Description("array", hash_array(array).hex())


def _ufunc(value: Any) -> Description:
    """Describes NumPy's own ufuncs by name; one from np.frompyfunc hides its function."""
    name: str = value.__name__
    if vars(np).get(name) is not value:
        raise RefusedError(f"the universal function {name!r}, which is not NumPy's own")
    return Description("ufunc", name, [("", np.ufunc)])


def _tensor(value: Any) -> Description:
    if not hasattr(value, "numpy"):
        raise RefusedError("a symbolic tensor, whose value is known only where its graph runs")
    if value.dtype in (tf.resource, tf.variant):
        raise RefusedError(f"a tensor of type {value.dtype.name}, a handle to something that may change")
    return Description("tensor", value.dtype.name, [("", value.numpy())])


def _composite(value: Any) -> Description:
    parts = elements(tf.nest.flatten(value, expand_composites=True))
    return Description("composite tensor", type(value).__name__, parts)


def _shape(value: Any) -> Description:
    return Description("TensorShape", str(value.rank), elements(value.as_list() if value.rank else []))


def _partial(value: Any) -> Description:
    function, arguments, keywords = value.func, value.args, value.keywords
    given = [(f"argument {index} of a partial", item) for index, item in enumerate(arguments)]
    held = Description("keywords", parts=named(keywords.items(), "argument `{}` of a partial"))
    return Description("partial", str(len(given)), [("function of a partial", function), *given, ("", held)])


def _enum(value: Any) -> Description:
    return Description("member", value._name_, [("", type(value)), ("its value", value._value_)])


def _cell(value: types.CellType) -> Description:
    try:
        return Description("cell", parts=[("", value.cell_contents)])
    except ValueError:  # not yet assigned
        return Description("cell")


# Their subclasses may behave differently, and are described as objects.
_EXACT: dict[type, Callable[[Any], Description]] = {
    np.memmap: _array,
    np.ufunc: _ufunc,
    tf.RaggedTensor: _composite,
    tf.SparseTensor: _composite,
    tf.IndexedSlices: _composite,
    tf.DType: lambda value: Description("DType", value.name),
    tf.TensorShape: _shape,
    partial: _partial,
    re.Pattern: lambda value: Description("pattern", parts=[("", value.pattern), ("", value.flags)]),
    types.MappingProxyType: lambda value: Description("mappingproxy", parts=[("", dict(value))]),
    types.CellType: _cell,
}
_SUBCLASSED: dict[type, Callable[[Any], Description]] = {
    np.generic: lambda value: Description("NumPy scalar", parts=[("", np.asarray(value))]),
    np.dtype: lambda value: Description("dtype", repr(value)),
    tf.Tensor: _tensor,
    Enum: _enum,
    PurePath: lambda value: Description("path", os.fspath(value), [("", type(value))]),
}
