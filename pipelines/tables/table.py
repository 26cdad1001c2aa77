"""Rows of a table as a source: Parquet and CSV files, and data frames."""

import functools
import glob
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.pipelines.cache.value_hash import hash_value
from tfopt.pipelines.shared.elements import without_autograph
from tfopt.pipelines.shared.paths import absolute, as_path, expect_reachable, expect_utf8, file_stamps
from tfopt.pipelines.shared.seeding import from_batches, random_bits
from tfopt.pipelines.sources.shapes import gathered, in_python, sharded
from tfopt.pipelines.sources.source import Pools, Source, expect_unchanged, held_on_host
from tfopt.pipelines.tables.columns import Asked, Layout, import_pyarrow, layout_of
from tfopt.pipelines.tables.csv import read_csv
from tfopt.pipelines.tables.parquet import (
    Block,
    ParquetFile,
    blocks_of,
    common_layout,
    open_file,
    partitions_of,
    read_block,
)

# Parquet files that take no more than this once decoded are held in memory, where each epoch is one permutation and a
# batch one gather: many times as fast as decoding them again. Fixed, or the order under a seed would depend on the
# machine. While they are read they take up to three times as much.
_HELD_BYTES = 512 * 2**20
_BLOCK_BYTES = 4 * 2**20  # of decoded rows; smaller row groups are read together
_MIXED_BYTES = 256 * 2**20  # of a pool of blocks, whose rows are shuffled together; two pools are in memory at a time
_MIXED_BLOCKS = 16
_READERS = 4  # blocks read at once; Arrow uses threads of its own within each
_STRING_BYTES = 24  # of an entry, besides the string itself


def table(data: Any, *, columns: Sequence[str] | None = None, label: str | Sequence[str] | None = None) -> Source:
    """Returns the rows of a table as a source of examples, dicts of its columns by name.

    Needs pyarrow: `pip install 'tfopt[parquet]'`. CSV files, data frames, and Parquet files of up to 512 MiB once
    decoded are held in memory, and shuffled as a whole. Larger Parquet files are read by row group, several at once; a
    shuffle takes pools of up to 16 in random order, and shuffles the rows of each pool.

    Args:
        data: The path of a CSV file (".csv", whose first line names the columns) or of a Parquet file; a glob or a list
            of either kind with the same columns; a folder of Parquet files, also in subfolders such as "year=2024",
            which are then columns; or a pandas DataFrame, pyarrow Table, or other object with Arrow's stream interface.
        columns: Names of those to read besides the label. Default: all but the index that pandas writes into Parquet.
        label: The column to train towards, or a list of such columns. Default: none.

    Returns:
        A source of dicts; with a label of `(dict, label)`, with a list of them of `(dict, dict of labels)`. Numbers and
        booleans keep their type; strings, categories and bytes are string tensors; lists of numbers have any length
        (length,), those of fixed size a fixed one. `transform` or `pad="batch"` brings lists of
        different lengths to one.

    Raises:
        TypeError: If an argument is of another type.
        UnsupportedError: If pyarrow is not installed.
        PipelineError: If a file is missing, cut or of another kind; the table has no rows; a column is missing, there
            twice, or of a type that no tensor has, such as dates; files differ in a column; or a value is missing,
            which for larger Parquet files is found where it is read.

    Example:
        >>> import pyarrow
        >>> rows = pyarrow.table({"size": [1.5, 2.5], "name": ["a", "b"], "class": [0, 1]})
        >>> table(rows, label="class").count
        2
    """
    one_label = isinstance(label, str)
    asked = Asked(_names("columns", columns), _names("label", [label] if one_label else label), one_label)
    import_pyarrow()
    if hasattr(data, "__arrow_c_stream__"):
        return _held_table(f"table of {type(data).__name__}", _from_frame(data), "the table", asked, None)
    paths = _paths(data)
    is_csv = paths[0].endswith(".csv")
    name, where = f"table {paths[0]}", repr(paths[0])
    if len(paths) > 1:
        name = f"table of {len(paths):,} {'CSV' if is_csv else 'Parquet'} files"
        where = f"{len(paths):,} files, {paths[0]!r} and others"
    if is_csv:
        stamps = file_stamps(paths)
        return _held_table(name, _read_csvs(paths), where, asked, stamps)
    is_folder = isinstance(data, str | os.PathLike) and os.path.isdir(data)
    partitions = partitions_of(absolute(os.fspath(data)), paths) if is_folder else [{}] * len(paths)
    return _of_parquet(name, where, list(map(open_file, paths, partitions)), asked)


def is_table(data: Any) -> bool:
    """Whether this is a data frame, or a path, a glob or a list of paths of CSV or Parquet files, or their folder."""
    if isinstance(data, list | tuple):
        return bool(data) and all(isinstance(item, str | os.PathLike) and _is_named(item) for item in data)
    if isinstance(data, str | os.PathLike):
        return _is_named(data) or (os.path.isdir(data) and bool(_in_folder(os.fspath(data))))
    return hasattr(data, "__arrow_c_stream__")


def _read_csvs(paths: list[str]) -> Any:
    """Returns CSV files with the same columns as one Arrow table; integers beside fractions become fractions."""
    arrow = import_pyarrow()
    parts = [read_csv(path) for path in paths]
    if len(parts) == 1:
        return parts[0]
    for path, part in zip(paths, parts, strict=True):
        if sorted(part.schema.names) != sorted(parts[0].schema.names):
            differing = set(part.schema.names) ^ set(parts[0].schema.names)
            raise PipelineError(
                f"Expected the same columns in all files. Found {', '.join(map(repr, sorted(differing)))} in only one "
                f"of {paths[0]!r} and {path!r}. Pass files with the same first line."
            )
    try:
        return arrow.concat_tables(parts, promote_options="permissive")
    except arrow.ArrowException as error:
        raise PipelineError(
            f"Expected one type for each column of {len(paths):,} CSV files, {paths[0]!r} and others. Arrow cannot "
            f"join them: {error}. Correct the column, or read the files with pandas and pass the frame."
        ) from error


def _in_folder(folder: str) -> list[str]:
    """Parquet files in a folder, and in its subfolders that are named as Hive names partitions, in order."""
    found = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if "=" in name]
        found += [os.path.join(parent, name) for name in names if name.endswith(".parquet")]
    return sorted(found)


def _is_named(path: str | os.PathLike[str]) -> bool:
    return str(path).endswith((".csv", ".parquet"))


def _names(what: str, value: Any) -> list[str] | None:
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(name, str) for name in value):
        raise TypeError(f"table() expects names of columns for `{what}`. Received: {value!r}. Pass a list of strings.")
    if not value or len(set(value)) < len(value):
        raise TypeError(f"table() expects each name once for `{what}`. Received: {value!r}. Pass at least one, once.")
    return list(value)


def _paths(data: Any) -> list[str]:
    """Returns the paths of the files that were given, absolute and in order."""
    if isinstance(data, list | tuple) and data:
        return [path for item in data for path in _paths(as_path("paths of Parquet files", item))]
    path = expect_reachable(as_path("a data frame, a path or a list of paths", data))
    if os.path.isdir(path):
        found = _in_folder(path)
    elif glob.has_magic(path) and not os.path.lexists(path):
        found = sorted(glob.glob(path))
    else:
        found = [path]
    if not found:
        raise PipelineError(f"Expected Parquet files at {path!r}. Found none. Check the path.")
    return [absolute(expect_utf8(each)) for each in found]


def _from_frame(data: Any) -> Any:
    arrow = import_pyarrow()
    try:
        if hasattr(data, "iloc"):  # pandas', whose index is no column
            return arrow.Table.from_pandas(data, preserve_index=False)
        return arrow.table(data)
    except (arrow.ArrowException, TypeError, ValueError) as error:
        raise PipelineError(
            f"Expected a table whose columns have one type each. Arrow cannot take this one: {error}. Give each column "
            "a type with astype, or leave it out."
        ) from error


def _expect_rows(rows: int, where: str) -> None:
    if not rows:
        raise PipelineError(f"Expected at least one row in {where}. Found none. Check what wrote it.")


def _held_table(name: str, rows: Any, where: str, asked: Asked, stamps: Any) -> Source:
    """Returns an Arrow table as a source; files are known by their stamps, anything else by its contents."""
    _expect_rows(rows.num_rows, where)
    layout = layout_of(rows.schema, asked, where)
    return _held(name, layout, layout.raw(rows, where), stamps)


def _held(name: str, layout: Layout, arrays: list[Any], stamps: Any) -> Source:
    """Returns raw rows in memory as a source."""
    with tf.device("CPU:0"):  # eager constants go to the GPU where there is one
        tensors = tuple(map(tf.constant, arrays))

    @functools.cache
    def contents() -> Any:
        return stamps or hash_value(tensors, name="data")

    def rows(index: Any) -> Any:
        return layout.example(*(tf.gather(held, index) for held in held_on_host(lambda: tensors)))

    read_many = rows if layout.dense else None
    return gathered(name, len(arrays[0]), rows, read_many, fingerprint=lambda: [contents(), layout.names])


def _of_parquet(name: str, where: str, files: list[ParquetFile], asked: Asked) -> Source:
    layout = common_layout(files, asked)
    rows = sum(file.rows for file in files)
    _expect_rows(rows, where)
    first = blocks_of(files, 1)[0]
    row_bytes = _bytes(read_block(first, layout)) / first.rows
    blocks = blocks_of(files, max(1, round(_BLOCK_BYTES / row_bytes)))
    if max(row_bytes * rows, sum(file.stored_bytes(layout) for file in files)) > _HELD_BYTES:
        return _streamed(name, blocks, layout, row_bytes)
    with ThreadPoolExecutor(_READERS) as threads:
        parts = threads.map(lambda block: read_block(block, layout), blocks)
        arrays = [np.concatenate(part) for part in zip(*parts, strict=True)]
    return _held(name, layout, arrays, [file.stamp for file in files])


def _streamed(name: str, blocks: list[Block], layout: Layout, row_bytes: float) -> Source:
    """Returns the rows of blocks as a source that reads them when they are needed."""
    ends = np.cumsum([block.rows for block in blocks])
    starts = np.concatenate([[0], ends[:-1]])
    stamps = [list(stamp) for stamp in dict.fromkeys(tuple(block.file.stamp) for block in blocks)]
    check = partial(expect_unchanged, stamps)

    def read(first: int, end: int) -> list[Any]:
        number = int(np.searchsorted(ends, first, side="right"))
        return read_block(blocks[number], layout, first - int(starts[number]), end - int(starts[number]))

    def mixing(spans: Any) -> dict[str, Any]:
        count = int(np.diff(spans).sum())
        largest = int((spans[:, 1] - starts[np.searchsorted(ends, spans[:, 0], side="right")]).max())
        mixed = max(1, min(_MIXED_BLOCKS, int(_MIXED_BYTES / (largest * row_bytes))))
        read_pool = in_python(partial(_read_pool, spans, read, layout, mixed), layout.rows, "read_parquet")

        def pools(readings: Any) -> Any:
            check()

            @without_autograph
            def of_epoch(bits: Any, skipped: Any) -> Any:
                return tf.data.Dataset.range(-(-len(spans) // mixed)).map(lambda pool: (pool, bits, skipped))

            # TensorFlow 2.21 never ends a flat_map on a tf.data service.
            return readings.interleave(of_epoch, cycle_length=1).map(read_pool).prefetch(1)

        def shuffled(seed: Any) -> Any:
            if seed is None:
                order = tf.data.Dataset.random(rerandomize_each_iteration=True).take(1)
            else:
                bits = tf.constant(seed, tf.int64) if isinstance(seed, int) else random_bits(seed)
                order = tf.data.Dataset.from_tensors(bits)
            return from_batches(pools(order.map(lambda bits: (bits, tf.constant(0, tf.int64)))), count)

        return {"shuffled": shuffled, "keyed": True, "pools": Pools(min(count, mixed * largest), pools)}

    return sharded(
        name,
        np.stack([starts, ends], axis=1),
        in_python(read, layout.rows, "read_parquet"),
        mixing=mixing,
        readers=2,
        check=check,
        fingerprint=lambda: [stamps, file_stamps(str(stamp[0]) for stamp in stamps), layout.names],
        decode=layout.example,
        decode_batch=layout.example if layout.dense else None,
    )


def _read_pool(
    spans: Any, read: Callable[[int, int], list[Any]], layout: Layout, mixed: int, number: int, bits: int, skipped: int
) -> list[Any]:
    """Returns the raw rows of a pool of blocks in random order, without those among the first `skipped` of its epoch.

    `bits` decide on the order of an epoch's blocks, and of the rows in each pool of `mixed` blocks.
    """
    order = np.random.default_rng(bits).permutation(len(spans))
    before = int(np.diff(spans[order[: number * mixed]]).sum())
    pool = spans[order[number * mixed :][:mixed]]
    rows = int(np.diff(pool).sum())
    found = [np.empty((rows, *row.shape), row.dtype.as_numpy_dtype) for row in layout.rows]
    if before + rows <= skipped:
        return [array[:0] for array in found]
    places = np.random.default_rng((bits, number)).permutation(rows)
    with ThreadPoolExecutor(_READERS) as threads:
        for part in threads.map(lambda span: read(*map(int, span)), pool):
            own, places = np.split(places, [len(part[0])])
            for array, some in zip(found, part, strict=True):
                array[own] = some
    return [array[max(skipped - before, 0) :] for array in found]


def _bytes(arrays: list[Any]) -> int:
    """Returns what raw rows take as tensors."""
    return sum(
        sum(map(len, array)) + _STRING_BYTES * len(array) if array.dtype == object else array.nbytes for array in arrays
    )
