"""Datasets of an HDF5 file as a source; rows are read in blocks, since HDF5 reads one thing at a time."""

import os
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.pipelines.shared.elements import without_autograph
from tfopt.pipelines.shared.file_stamps import files
from tfopt.pipelines.shared.seeding import shuffle
from tfopt.pipelines.sources.hdf5_file import Column, find_column, opened, stamp_of
from tfopt.pipelines.sources.source import Source, absolute, expect_utf8
from tfopt.pipelines.sources.structures import common_length, named_leaves

_BLOCK_BYTES = 4 * 2**20  # reading a block then costs more than opening the file for it
_MIXED_BYTES = 256 * 2**20  # blocks that are mixed by a shuffle lie in memory together
_SIDE_BY_SIDE = 16  # such blocks at most; fixed, or the order under a seed would depend on the machine


def hdf5(path: str | os.PathLike[str], datasets: Any) -> Source:
    """Returns the rows of datasets in an HDF5 file as a source of examples.

    The file is read in blocks of whole chunks, 4 MiB or more, and is never held open. A shuffle takes the blocks in
    random order and mixes up to 16 of them, and then what the pipeline's shuffle buffer holds. HDF5 reads one block at
    a time: where decompression is what is slow, write TFRecords or .npy files.

    Args:
        path: The file.
        datasets: The name of a dataset in it, such as "train/images", or tuples and dicts of names, nested as the
            examples shall be. All have the same first dimension, the number of examples.

    Returns:
        A source whose examples have the structure of `datasets`, without the first dimension: numbers, booleans and
        texts (tf.string).

    Raises:
        TypeError: `path` is no path, or `datasets` holds something else than names.
        PipelineError: The file is missing, cut or no HDF5 file; a dataset is missing, a scalar, without values or of a
            type that is no tensor's; its data lies in another file; or lengths differ.

    Example:
        >>> source = hdf5("digits.h5", ("images", "labels"))  # doctest: +SKIP
        >>> source.count  # doctest: +SKIP
        60000
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"hdf5() expects the path of a file. Received: {type(path).__name__}. Pass a text or a Path.")
    _expect_names(datasets)
    file_path = absolute(expect_utf8(os.fspath(path)))
    stamp = stamp_of(file_path)
    with opened(file_path, stamp) as file:
        columns = [find_column(file, name) for name in tf.nest.flatten(datasets)]
    count = common_length({repr(column.name): column.shape[0] for column in columns}, f" in {file_path!r}")
    rows = _rows_of_block(columns)
    read = partial(_read_block, _Block(file_path, stamp, columns, datasets, min(rows, count), count))
    # One block ahead, so that reading it takes no time from those who use the one before.
    in_order = tf.data.Dataset.range(0, count, rows)
    return Source(
        name=f"hdf5 {file_path}",
        dataset=lambda: in_order.map(read, num_parallel_calls=1).prefetch(1).unbatch(),
        count=count,
        shuffled=partial(_side_by_side, in_order, read, _mixed_blocks(columns, rows)),
        fingerprint=lambda: [list(stamp), files([file_path]), [column.name for column in columns]],
    )


@dataclass(frozen=True, slots=True)
class _Block:
    """What is needed to read any block: `rows` rows of each column of the file that had this stamp, of `count`."""

    path: str
    stamp: tuple[int, int]
    columns: list[Column]
    structure: Any
    rows: int
    count: int


@without_autograph
def _read_block(block: _Block, start: Any) -> Any:
    """Returns the rows from `start` on, in a graph."""

    def read(first: Any) -> list[Any]:
        rows = slice(int(first), min(int(first) + block.rows, block.count))
        with opened(block.path, block.stamp) as file:
            try:
                return [np.asarray(file[column.name][rows], dtype=column.dtype) for column in block.columns]
            except (OSError, KeyError) as error:
                raise PipelineError(
                    f"Expected to read rows {rows.start} to {rows.stop - 1} of {block.path!r}. HDF5 cannot: {error}. "
                    "Copy or write the file again."
                ) from error

    types = [tf.string if column.dtype.kind in "OS" else tf.as_dtype(column.dtype) for column in block.columns]
    arrays = tf.numpy_function(read, [start], types, stateful=False, name="read_hdf5")
    for array, column in zip(arrays, block.columns, strict=True):
        array.set_shape((None, *column.shape[1:]))
    return tf.nest.pack_sequence_as(block.structure, arrays)


def _side_by_side(in_order: Any, read: Any, cycle_length: int, seed: int | None) -> Any:
    """Shuffles the blocks and interleaves their rows; with a seed, in the same order on every iteration."""
    order = shuffle(in_order, int(in_order.cardinality()), seed, reshuffle=seed is None)
    return order.interleave(
        lambda start: tf.data.Dataset.from_tensor_slices(read(start)),
        cycle_length=cycle_length,
        num_parallel_calls=tf.data.AUTOTUNE,
    )


def _rows_of_block(columns: list[Column]) -> int:
    """Returns how many rows to read at once: whole chunks of the dataset with the largest rows."""
    chunk = max(columns, key=lambda column: column.row_bytes).chunk_rows
    wanted = _BLOCK_BYTES / sum(column.row_bytes for column in columns)
    return chunk * max(1, round(wanted / chunk))


def _mixed_blocks(columns: list[Column], rows: int) -> int:
    block_bytes = rows * sum(column.row_bytes for column in columns)
    return max(1, min(_SIDE_BY_SIDE, -(-columns[0].shape[0] // rows), _MIXED_BYTES // block_bytes))


def _expect_names(datasets: Any) -> None:
    for name, leaf in named_leaves(datasets, "datasets"):
        if not isinstance(leaf, str):
            raise TypeError(
                f"hdf5() expects names of datasets in tuples and dicts. Received at {name}: {type(leaf).__name__}. "
                'Pass names, such as ("images", "labels").'
            )
