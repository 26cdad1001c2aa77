"""NumPy's .npy files as a source, read row by row through a memory map."""

import math
import os
import tokenize
import zipfile
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.pipelines.shared.paths import absolute, expect_reachable, expect_utf8, file_stamps
from tfopt.pipelines.sources.shapes import gathered
from tfopt.pipelines.sources.source import (
    Source,
    common_length,
    expect_unchanged,
    held_on_host,
    is_numeric,
    named_leaves,
)

_SHOWN = 4  # arrays of an archive
_ALIGNMENT = 64  # bytes (EIGEN_MAX_ALIGN_BYTES); TensorFlow crashes on a tensor that starts elsewhere
# Version 3.0 differs only in field names, and arrays with fields are refused.
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
_REMEDIES = {
    "U": "Pass strings in memory: arrays(np.load(path))",
    "S": "Pass strings in memory: arrays(np.load(path))",
    "V": "Save each field as a file of its own, and bfloat16 as array.view(np.uint16) with tf.bitcast in `transform`",
    "M": "Save it as numbers: array.astype(np.int64)",
    "m": "Save it as numbers: array.astype(np.int64)",
    "O": "Save numbers: np.stack or np.asarray(list, dtype) make such an array if rows have one shape",
}


def npy(paths: Any) -> Source:
    """Returns the rows of .npy files as a source of examples.

    Use it for arrays that are larger than memory, or that should not occupy it. The files are mapped read-only, so that
    a shuffle mixes all rows. Leave them as they are while a pipeline reads them: if a mapped file is cut, the operating
    system kills the process that reads beyond its new end.

    Args:
        paths: The path of a .npy file, or tuples and dicts of them, nested as the examples should be. All arrays have
            the same first dimension, the number of examples.

    Returns:
        A source whose examples have the structure of `paths`, without the first dimension: booleans, integers, floats
        and complex numbers, in C order and this machine's byte order.

    Raises:
        TypeError: If a leaf is not a path.
        PipelineError: If a file is missing, not .npy, cut, too long, without rows, or holds what cannot be mapped; or
            lengths differ.

    Example:
        >>> source = npy(("images.npy", "labels.npy"))  # doctest: +SKIP
        >>> source.count  # doctest: +SKIP
        60000
    """
    for name, leaf in named_leaves(paths, "paths"):
        if not isinstance(leaf, str | os.PathLike):
            raise TypeError(
                f"npy() expects paths in tuples and dicts. Received at {name}: {type(leaf).__name__}. Pass files whose "
                "rows belong together as a tuple, such as (images, labels)."
            )
    files = [_read_header(absolute(expect_utf8(expect_reachable(os.fspath(path))))) for path in tf.nest.flatten(paths)]
    count = common_length({repr(file.path): file.shape[0] for file in files})

    read = partial(_read_rows, files, paths)
    return gathered(
        f"npy {', '.join(file.path for file in files)}",
        count,
        read,
        read,
        fingerprint=lambda: [[file.stamp for file in files], file_stamps(file.path for file in files)],
        check=lambda: expect_unchanged([file.stamp for file in files]),
    )


@dataclass(frozen=True, slots=True)
class _File:
    """What a file's header says."""

    path: str
    offset: int  # of the first row, in bytes
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    stamp: list[str | int]

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape[1:])

    @property
    def aligned(self) -> bool:
        return self.offset % _ALIGNMENT == 0  # maps begin at a page

    @property
    def unit(self) -> int:
        """The largest number of bytes that divides every row's offset."""
        return math.gcd(self.offset, self.row_bytes)


class _Claimed:
    """A read-only array that NumPy takes for a writable one: DLPack has no read-only tensors; nothing writes to these.

    A copy-on-write map would do too, but Linux refuses those larger than memory.
    """

    def __init__(self, array: Any):
        self.array = array  # keeps the map alive
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}


def _read_rows(files: list[_File], structure: Any, index: Any) -> Any:
    mapped = held_on_host(lambda: tuple(map(_map, files)))
    with tf.device("CPU:0"):  # run eagerly, the whole file would go to the GPU where there is one
        read = [_rows(file, tensor, index) for file, tensor in zip(files, mapped, strict=True)]
    return tf.nest.pack_sequence_as(structure, read)


def _map(file: _File) -> Any:
    """Returns a tensor on the mapped file: its array, or all its bytes in units if the array is not aligned."""
    expect_unchanged([file.stamp])
    if file.aligned:
        array: Any = np.memmap(file.path, file.dtype, "r", file.offset, file.shape)
    else:
        array = np.memmap(file.path, np.uint8, "r").reshape(-1, file.unit)
    return tf.experimental.dlpack.from_dlpack(np.asarray(_Claimed(array)).__dlpack__())


def _rows(file: _File, mapped: Any, index: Any) -> Any:
    if file.aligned:
        return tf.gather(mapped, index)
    units = file.row_bytes // file.unit
    first = file.offset // file.unit + index * units
    contents = tf.gather(mapped, first[..., tf.newaxis] + tf.range(units, dtype=tf.int64))
    size = file.dtype.itemsize
    items = tf.reshape(contents, (-1, size) if size > 1 else (-1,))
    values = tf.cast(items, tf.bool) if file.dtype == bool else tf.bitcast(items, tf.as_dtype(file.dtype))
    values = tf.reshape(values, tf.concat([tf.shape(index), tf.constant(file.shape[1:], tf.int32)], 0))
    return tf.ensure_shape(values, index.shape.concatenate(file.shape[1:]))


def _read_header(path: str) -> _File:
    try:
        with open(path, "rb") as file:
            version = np.lib.format.read_magic(file)
            shape, fortran, dtype = _HEADERS.get(version, np.lib.format.read_array_header_2_0)(file)
            offset, size = file.tell(), os.fstat(file.fileno()).st_size
        if not all(type(length) is int and length >= 0 for length in shape):
            raise ValueError(f"it says the shape {shape}")
    except OSError as error:
        raise PipelineError(f"Expected a .npy file at {path!r}. {error.strerror}. Check the path.") from error
    except (ValueError, SyntaxError, tokenize.TokenError) as error:
        names = _names_in_archive(path)
        what = _archive(names) if names else f"Cannot read its header: {error}. Write it again."
        raise PipelineError(f"Expected a .npy file, as np.save writes it, at {path!r}. {what}") from error
    _expect_mappable(path, shape, fortran, dtype)
    found = _File(path, offset, dtype, shape, file_stamps([path])[0])
    expected = found.offset + shape[0] * found.row_bytes
    if size != expected:
        cut = "it is cut. Write or copy it again"
        longer = "something follows the array, and would not be read. Save each array as a file of its own"
        raise PipelineError(
            f"Expected {expected:,} bytes in {path!r}, as its header says. Found {size:,}: "
            f"{cut if size < expected else longer}."
        )
    return found


def _names_in_archive(path: str) -> list[str]:
    """Returns the names of the arrays in an .npz file, which cannot be mapped; none for other files."""
    try:
        with zipfile.ZipFile(path) as archive:
            return [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]
    except (zipfile.BadZipFile, OSError):
        return []


def _archive(names: list[str]) -> str:
    """Says what to do with an archive of arrays."""
    listed = ", ".join(f"file[{name!r}]" for name in names[:_SHOWN])
    return (
        f"Found an archive of {len(names):,} arrays. Load it with `file = np.load(path)`, and pass those that make up "
        f"an example, such as ({listed}), or save each with np.save."
    )


def _expect_mappable(path: str, shape: tuple[int, ...], fortran: bool, dtype: np.dtype[Any]) -> None:
    expected = f"Expected an array that can be mapped in {path!r}. Found"
    if not is_numeric(dtype):
        remedy = _REMEDIES.get(dtype.kind, "Save it as float64: array.astype(np.float64)")
        raise PipelineError(f"{expected} the type {dtype}. {remedy}.")
    if not dtype.isnative:
        raise PipelineError(
            f"{expected} the type {dtype.str}, of another byte order than this machine's. Save it again: "
            "np.save(path, array.astype(array.dtype.newbyteorder('=')))."
        )
    if not shape:
        raise PipelineError(f"{expected} a scalar. Save an array with a row for each example.")
    if fortran and len(shape) > 1:
        raise PipelineError(
            f"{expected} Fortran order, in which a row is not contiguous. Save it again: "
            "np.save(path, np.ascontiguousarray(array))."
        )
