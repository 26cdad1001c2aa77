"""Plain values: containers, arrays, tensors, and objects of Python's own compiled types."""

import os
import re
import types
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from functools import partial
from pathlib import PurePath
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.pipelines.cache.fingerprint.description import Description, Part, RefusedError, hash_array

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
    if kind in CONTENTS or kind is np.memmap:
        return CONTENTS[np.ndarray if kind is np.memmap else kind](value)
    if kind in _EXACT:
        return _EXACT[kind](value)
    found = (describe(value) for known, describe in _SUBCLASSED.items() if issubclass(kind, known))
    return next(found, None)


def elements(values: Iterable[Any]) -> Iterator[Part]:
    """Yields the elements of a sequence as parts."""
    return ((f"[{index}]", value) for index, value in enumerate(values))


def named(values: Iterable[tuple[str, Any]], step: str = "`{}`") -> Iterator[Part]:
    """Yields named values as parts, sorted by name."""
    for name, value in sorted(values, key=lambda item: str(item[0])):
        yield from (("", name), (step.format(name), value))


def reduced(value: Any) -> Description:
    """Describes an object of one of Python's own compiled types by what pickle would rebuild it from.

    Raises:
        RefusedError: If it cannot be pickled.
    """
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


def _pairs(items: Iterable[tuple[Any, Any]]) -> Iterator[Part]:
    for key, value in items:
        yield "a key", key
        yield f"[{key!r}]" if type(key) in (str, int) else "a value", value


def _array(array: Any) -> Description:
    if array.dtype.hasobject or array.dtype.kind == "T":  # T: variable-length texts, stored elsewhere
        text = f"{array.dtype!r} {array.shape}"
        return Description("array of objects", text, elements(np.asarray(array).ravel().tolist()))
    return Description("array", hash_array(array).hex())


def _scalar(value: Any) -> Description:
    return Description("NumPy scalar", parts=[("", np.asarray(value))])


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


# Their subclasses may behave differently, and are described as objects.
_EXACT: dict[type, Callable[[Any], Description]] = {
    np.ufunc: _ufunc,
    tf.RaggedTensor: _composite,
    tf.SparseTensor: _composite,
    tf.IndexedSlices: _composite,
    tf.DType: lambda value: Description("DType", value.name),
    tf.TensorShape: _shape,
    partial: _partial,
    re.Pattern: lambda value: Description("pattern", parts=[("", value.pattern), ("", value.flags)]),
    types.MappingProxyType: lambda value: Description("mappingproxy", parts=[("", dict(value))]),
    types.CellType: lambda value: Description("cell", parts=[] if _empty(value) else [("", value.cell_contents)]),
}
_SUBCLASSED: dict[type, Callable[[Any], Description]] = {
    np.generic: _scalar,
    np.dtype: lambda value: Description("dtype", repr(value)),
    tf.Tensor: _tensor,
    Enum: _enum,
    PurePath: lambda value: Description("path", os.fspath(value), [("", type(value))]),
}


def _empty(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return True
    return False
