"""Datasets of an HDF5 file as a source: read in blocks, and without leaving the file, whose links may lead anywhere."""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import h5py
import numpy as np
import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.pipelines.shared.elements import without_autograph
from tfopt.pipelines.shared.paths import absolute, as_path, expect_reachable, expect_utf8, file_stamps
from tfopt.pipelines.sources.shapes import in_python, in_shards, sharded
from tfopt.pipelines.sources.source import (
    Source,
    common_length,
    expect_unchanged,
    is_numeric,
    named_leaves,
    side_by_side,
)

_BLOCK_BYTES = 4 * 2**20  # reading a block then costs more than opening the file for it
_MIXED_BYTES = 256 * 2**20  # blocks that a shuffle mixes are in memory together
_MIXED_BLOCKS = 16  # at most; fixed, or the order under a seed would depend on the machine
_MAX_SOFT_LINKS = 16  # on the way to a dataset; more are taken for a cycle
_STRING_BYTES = 1024  # assumed for strings of variable length; a block of them is then 4,096 rows


def hdf5(path: str | os.PathLike[str], datasets: Any) -> Source:
    """Returns the rows of datasets in an HDF5 file as a source of examples.

    The file is read in blocks of whole chunks, one at a time; a shuffle takes them in random order and mixes up to 16.
    If decompression is the bottleneck, write TFRecords or .npy files.

    Args:
        path: The file.
        datasets: The name of a dataset in it, such as "train/images", or tuples and dicts of names, nested as the
            examples should be. All have the same first dimension, the number of examples.

    Returns:
        A source whose examples have the structure of `datasets`, without the first dimension: numbers, booleans and
        strings (tf.string).

    Raises:
        TypeError: If `path` is not a path, or `datasets` holds anything but names.
        PipelineError: If the file is missing, cut or not HDF5; a dataset is missing, a scalar, without values, of a
            type that no tensor has, or stored in another file; or lengths differ.

    Example:
        >>> source = hdf5("digits.h5", ("images", "labels"))  # doctest: +SKIP
        >>> source.count  # doctest: +SKIP
        60000
    """
    file_path = absolute(expect_utf8(expect_reachable(as_path("the path of a file", path))))
    for name, leaf in named_leaves(datasets, "datasets"):
        if not isinstance(leaf, str):
            raise TypeError(
                f"hdf5() expects names of datasets in tuples and dicts. Received at {name}: {type(leaf).__name__}. "
                'Pass names, such as ("images", "labels").'
            )
    if not os.path.isfile(file_path):
        raise PipelineError(f"Expected an HDF5 file. There is no file {file_path!r}. Check the path.")
    stamps = file_stamps([file_path])
    with _opened(file_path) as file:
        columns = [_find_column(file, name) for name in tf.nest.flatten(datasets)]
    count = common_length({repr(column.name): column.shape[0] for column in columns}, f" in {file_path!r}")
    row_bytes = sum(column.row_bytes for column in columns)
    # Whole chunks of the dataset with the largest rows.
    chunk = max(columns, key=lambda column: column.row_bytes).chunk_rows
    rows = chunk * max(1, round(_BLOCK_BYTES / row_bytes / chunk))
    firsts = np.arange(0, count, rows)
    read = in_python(partial(_read_rows, file_path, stamps, columns), [column.spec for column in columns], "read_hdf5")

    @without_autograph
    def block(first: Any, end: Any) -> Any:
        return tf.nest.pack_sequence_as(datasets, read(first, end))

    def rows_of_block(first: Any, end: Any) -> Any:
        return tf.data.Dataset.from_tensor_slices(block(first, end))

    def mixing(spans: Any) -> dict[str, Any]:
        most = max(1, min(_MIXED_BLOCKS, _MIXED_BYTES // (rows * row_bytes)))
        return {"shuffled": partial(side_by_side, in_shards(spans), rows_of_block, most), "keyed": True}

    return sharded(
        f"hdf5 {file_path}",
        np.stack([firsts, np.minimum(firsts + rows, count)], axis=1),
        block,
        mixing=mixing,
        fingerprint=lambda: [*stamps, file_stamps([file_path]), [column.name for column in columns]],
    )


def dataset_names(path: str) -> list[str]:
    """Returns the names of the datasets in a file, sorted, without those behind links."""
    with _opened(path) as file:
        return _names_in(file)


@dataclass(frozen=True, slots=True)
class _Column:
    """A dataset of a file."""

    name: str  # in full, with soft links followed
    dtype: np.dtype[Any]  # of its rows once read, in this machine's byte order; object for strings
    shape: tuple[int, ...]
    row_bytes: int  # in memory; estimated for strings of variable length
    chunk_rows: int  # 1 without chunks

    @property
    def spec(self) -> tf.TensorSpec:
        """The spec of a row."""
        return tf.TensorSpec(self.shape[1:], tf.string if self.dtype.kind in "OS" else self.dtype)


def _read_rows(
    path: str, stamps: list[list[str | int]], columns: list[_Column], first: int, end: int
) -> list[np.ndarray[Any, Any]]:
    expect_unchanged(stamps)
    with _opened(path) as file:
        try:
            return [np.asarray(file[column.name][first:end], dtype=column.dtype) for column in columns]
        except (OSError, KeyError) as error:
            raise PipelineError(
                f"Expected to read rows {first} to {end - 1} of {path!r}. HDF5 cannot: {error}. Copy or write the "
                "file again."
            ) from error


@contextmanager
def _opened(path: str) -> Iterator[Any]:
    """Opens a file for one use: a handle must not pass to a forked process."""
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        raise PipelineError(
            f"Expected a whole HDF5 file at {path!r}. HDF5 cannot open it: {error}. Write or copy it again, or wait "
            "for the program that writes it."
        ) from error
    with file:
        yield file


def _find_column(file: Any, name: str) -> _Column:
    """Looks up a dataset without reading it."""
    found = _follow(file, name, _MAX_SOFT_LINKS)
    expected = f"Expected a dataset with a row for each example at {name!r} in {file.filename!r}. Found"
    if not isinstance(found, h5py.Dataset):
        raise PipelineError(f"{expected} a group. Name a dataset: {_listed(file)}.")
    if not found.shape:
        raise PipelineError(f"{expected} a scalar or an empty dataset. Name another: {_listed(file)}.")
    if not math.prod(found.shape[1:]):
        # TensorFlow's unbatch would crash the process.
        raise PipelineError(f"{expected} the shape {found.shape}: no row holds a value. Leave it out.")
    if found.external or found.is_virtual:
        kind = "a virtual dataset" if found.is_virtual else "data in external files"
        raise PipelineError(f"{expected} {kind}, which may be anywhere. Copy the data into the file itself.")
    string = h5py.check_string_dtype(found.dtype)
    if string is None and not is_numeric(found.dtype):
        raise PipelineError(
            f"{expected} the type {found.dtype}, which no tensor has. Write each field as a dataset of its own, and "
            "pad rows of different lengths to one."
        )
    dtype = found.dtype.newbyteorder("=") if string is None else np.dtype(object)
    item_bytes = dtype.itemsize if string is None else string.length or _STRING_BYTES
    row_bytes = max(1, item_bytes * math.prod(found.shape[1:]))
    return _Column(found.name, dtype, found.shape, row_bytes, found.chunks[0] if found.chunks else 1)


def _follow(file: Any, name: str, links_left: int) -> Any:
    """Returns what a name leads to inside the file; never opens an external link."""
    place = file
    for part in name.strip("/").split("/"):
        link = _link(place, part)
        if isinstance(link, h5py.ExternalLink):
            raise PipelineError(
                f"Expected {name!r} in {file.filename!r} itself. Found a link to {link.filename!r}. Pass that file, if "
                "you trust it, or copy the dataset."
            )
        if link is None or links_left == 0:
            raise PipelineError(
                f"Expected a dataset {name!r} in {file.filename!r}. Found none. There are: {_listed(file)}."
            )
        if isinstance(link, h5py.SoftLink):
            target = link.path if link.path.startswith("/") else f"{place.name}/{link.path}"
            place = _follow(file, target, links_left - 1)
        else:
            place = place[part]
    return place


def _link(place: Any, part: str) -> Any:
    if not isinstance(place, h5py.Group) or "\0" in part:  # HDF5 would read up to the NUL
        return None
    try:
        return place.get(part, getlink=True)
    except UnicodeEncodeError:  # names in a file are UTF-8
        return None


def _names_in(file: Any) -> list[str]:
    names: list[str] = []
    # visititems follows neither soft nor external links.
    file.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
    return sorted(names)


def _listed(file: Any) -> str:
    return ", ".join(map(repr, _names_in(file))) or "none"
