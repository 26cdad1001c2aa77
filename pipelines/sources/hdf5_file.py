"""Opens HDF5 files and looks up datasets in them, without leaving the file: links may lead anywhere on the disk."""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np

from tfopt.errors import PipelineError

_MAX_SOFT_LINKS = 16  # on the way to a dataset; more are taken for a circle
_TEXT_BYTES = 1024  # assumed of a text whose length HDF5 does not state; a block of them is then 4,096 rows


@dataclass(frozen=True, slots=True)
class Column:
    """A dataset of a file.

    Args:
        name: Its full name, with soft links followed.
        dtype: What its rows are read as, of this machine's byte order; object for texts.
        shape: Its shape; the first dimension counts the rows.
        row_bytes: The size of a row in memory, estimated for texts of any length.
        chunk_rows: How many rows a chunk holds, 1 without chunks.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    row_bytes: int
    chunk_rows: int


def stamp_of(path: str) -> tuple[int, int]:
    """Returns the size in bytes and the time of the last change in nanoseconds.

    Raises:
        PipelineError: There is no such file.
    """
    if not os.path.isfile(path):
        raise PipelineError(f"Expected an HDF5 file. There is no file {path!r}. Check the path.")
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns


@contextmanager
def opened(path: str, stamp: tuple[int, int]) -> Iterator[Any]:
    """Opens a file for one use: a handle must not pass to a forked process.

    Args:
        path: The file.
        stamp: What `stamp_of` returned when the pipeline was made.

    Raises:
        PipelineError: The file has changed, is cut or no HDF5 file.
    """
    if stamp_of(path) != stamp:
        raise PipelineError(
            f"Expected {path!r} as it was when the pipeline was made. It has changed since. Make the pipeline again."
        )
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        raise PipelineError(
            f"Expected a whole HDF5 file at {path!r}. HDF5 cannot open it: {error}. Write or copy it again, or wait "
            "for the program that writes it."
        ) from error
    with file:
        yield file


def names_in(path: str) -> list[str]:
    """Returns the names of the datasets in a file, sorted, without those behind links.

    Raises:
        PipelineError: The file is missing, cut or no HDF5 file.
    """
    with opened(path, stamp_of(path)) as file:
        return _datasets_in(file)


def find_column(file: Any, name: str) -> Column:
    """Looks at a dataset without reading it.

    Args:
        file: The open file.
        name: The name of the dataset.

    Raises:
        PipelineError: It is missing, lies in another file, has no rows or no values in them, or is of a type that no
            tensor has.
    """
    found = _follow(file, name, _MAX_SOFT_LINKS)
    expected = f"Expected a dataset with a row for each example at {name!r} in {file.filename!r}. Found"
    if not isinstance(found, h5py.Dataset):
        raise PipelineError(f"{expected} a group. Name a dataset: {_listed(file)}.")
    if not found.shape:
        raise PipelineError(f"{expected} a scalar or an empty dataset. Name another: {_listed(file)}.")
    if not math.prod(found.shape[1:]):
        # TensorFlow's unbatch ends the process on these.
        raise PipelineError(f"{expected} the shape {found.shape}: no row holds a value. Leave it out.")
    if found.external or found.is_virtual:
        kind = "a virtual dataset" if found.is_virtual else "data in external files"
        raise PipelineError(f"{expected} {kind}, which may lie anywhere. Copy the data into the file itself.")
    dtype = _readable_dtype(found.dtype)
    if dtype is None:
        raise PipelineError(
            f"{expected} the type {found.dtype}, which no tensor has. Write each field as a dataset of its own, and "
            "rows of unlike lengths padded to one."
        )
    text = h5py.check_string_dtype(found.dtype)
    item_bytes = dtype.itemsize if text is None else text.length or _TEXT_BYTES
    row_bytes = max(1, item_bytes * math.prod(found.shape[1:]))
    return Column(found.name, dtype, found.shape, row_bytes, found.chunks[0] if found.chunks else 1)


def _readable_dtype(dtype: np.dtype[Any]) -> np.dtype[Any] | None:
    if h5py.check_string_dtype(dtype) is not None:
        return np.dtype(object)
    if dtype.kind in "biufc" and dtype.itemsize <= (16 if dtype.kind == "c" else 8):
        return dtype.newbyteorder("=")
    return None


def _follow(file: Any, name: str, links_left: int) -> Any:
    """Returns what a name leads to inside the file; an external link is not opened, wherever it points."""
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
    except UnicodeEncodeError:  # not in UTF-8, as all names in a file are
        return None


def _datasets_in(file: Any) -> list[str]:
    names: list[str] = []
    # visititems follows neither soft nor external links.
    file.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
    return sorted(names)


def _listed(file: Any) -> str:
    return ", ".join(map(repr, _datasets_in(file))) or "none"
