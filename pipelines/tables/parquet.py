"""Parquet files: their rows in blocks of whole row groups."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from tfopt.errors import PipelineError
from tfopt.pipelines.shared.paths import file_stamps
from tfopt.pipelines.sources.source import expect_unchanged
from tfopt.pipelines.tables.columns import Asked, Layout, columns_of, import_pyarrow, layout_of

_MISSING = "__HIVE_DEFAULT_PARTITION__"
_INTEGER = re.compile("0|-?[1-9][0-9]{0,17}")


@dataclass(frozen=True, slots=True)
class ParquetFile:
    """What a file's footer says, and its folders."""

    path: str
    stamp: list[str | int]
    metadata: Any  # Arrow's
    schema: Any  # Arrow's
    group_rows: tuple[int, ...]  # of each row group
    partition: Mapping[str, Any]  # columns that have one value in the whole file, Arrow's

    @property
    def rows(self) -> int:
        """How many rows it holds."""
        return sum(self.group_rows)

    def stored_bytes(self, layout: Layout) -> int:
        """Returns the size of these columns, uncompressed, but as Parquet encodes them."""
        names = set(layout.names)
        chunks = (
            self.metadata.row_group(group).column(number)
            for group in range(len(self.group_rows))
            for number in range(self.metadata.num_columns)
        )
        return sum(
            chunk.total_uncompressed_size
            for chunk in chunks
            if not names.isdisjoint((chunk.path_in_schema, chunk.path_in_schema.split(".")[0]))
        )


@dataclass(frozen=True, slots=True)
class Block:
    """Neighbouring row groups of a file that are read together."""

    file: ParquetFile
    groups: tuple[int, ...]
    first: int  # row of the file with which they begin
    rows: int


def partitions_of(folder: str, paths: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the columns that folders named as Hive names them stand for: {"year": 2024} for year=2024/a.parquet.

    Integers are int64 if all values of a column are, and anything else is text.

    Raises:
        PipelineError: If the files lie in folders of other columns, or a column lacks a value.
    """
    arrow = import_pyarrow()
    found = []
    for path in paths:
        parts = os.path.relpath(os.path.dirname(path), folder).split(os.sep)
        found.append({name: unquote(value) for name, _, value in (part.partition("=") for part in parts) if value})
        if list(found[-1]) != list(found[0]) or _MISSING in found[-1].values():
            raise PipelineError(
                f"Expected files in folders that give the same columns a value, as {paths[0]!r} does: "
                f"{', '.join(found[0]) or 'none'}. Found {path!r}. Move it, or pass the files that belong together."
            )
    integers = {name for name in found[0] if all(_INTEGER.fullmatch(each[name]) for each in found)}
    return [
        {name: arrow.scalar(int(value) if name in integers else value) for name, value in each.items()}
        for each in found
    ]


def open_file(path: str, partition: Mapping[str, Any]) -> ParquetFile:
    """Reads a file's footer.

    Raises:
        PipelineError: If the file is missing, cut or not Parquet.
    """
    arrow = import_pyarrow()
    (stamp,) = file_stamps([path])
    try:
        with arrow.parquet.ParquetFile(path) as file:
            metadata, schema = file.metadata, file.schema_arrow
    except (OSError, arrow.ArrowException) as error:
        raise PipelineError(
            f"Expected a whole Parquet file at {path!r}. Arrow cannot open it: {_first_line(error)}. Copy or write the "
            "file again."
        ) from error
    groups = tuple(metadata.row_group(number).num_rows for number in range(metadata.num_row_groups))
    for name, value in partition.items():
        if name in schema.names:
            raise PipelineError(
                f"Expected each column once. Found {name!r} in {path!r}, and in the name of its folder. Take it out "
                "of the file."
            )
        schema = schema.append(arrow.field(name, value.type))
    return ParquetFile(path, stamp, metadata, schema, groups, partition)


def common_layout(files: Sequence[ParquetFile], asked: Asked) -> Layout:
    """Returns the layout of the files' rows.

    Raises:
        PipelineError: If a file lacks a column, or has another type for it than the first one.
    """
    first = files[0]
    expected = layout_of(first.schema, asked, repr(first.path))
    for file in files[1:]:
        if asked.names is None and set(file.schema.names) != set(first.schema.names):
            other = sorted(set(file.schema.names) ^ set(first.schema.names))[0]
            having, lacking = (file, first) if other in file.schema.names else (first, file)
            raise PipelineError(
                f"Expected the same columns in all files. {having.path!r} has a column {other!r}, {lacking.path!r} has "
                "none. Name those that all have, with `columns`."
            )
        for column, found in zip(
            expected.columns, columns_of(file.schema, expected.names, repr(file.path)), strict=True
        ):
            if found.type != column.type:
                raise PipelineError(
                    f"Expected one type for the column {column.name!r}. {first.path!r} has {column.type}, "
                    f"{file.path!r} has {found.type}. Write one of them again."
                )
    return expected


def blocks_of(files: Sequence[ParquetFile], least_rows: int) -> list[Block]:
    """Returns the rows of files in blocks of neighbouring row groups, of at least so many rows if a file has them."""
    blocks = []
    for file in files:
        groups: list[int] = []
        first = rows = 0
        for group, size in enumerate(file.group_rows):
            groups, rows = [*groups, group], rows + size
            if rows >= least_rows or group == len(file.group_rows) - 1:
                if rows:
                    blocks.append(Block(file, tuple(groups), first, rows))
                groups, first, rows = [], first + rows, 0
    return blocks


def read_block(block: Block, layout: Layout, start: int = 0, stop: int | None = None) -> list[Any]:
    """Returns the raw rows of a block from `start` to `stop`, as arrays.

    Raises:
        PipelineError: If the file has changed, is damaged there, or lacks a value.
    """
    arrow = import_pyarrow()
    file, rows = block.file, (block.rows if stop is None else stop) - start
    expect_unchanged([file.stamp])
    try:
        with arrow.parquet.ParquetFile(file.path, metadata=file.metadata) as opened:
            stored = [name for name in layout.names if name not in file.partition]
            table = opened.read_row_groups(list(block.groups), columns=stored)
    except (OSError, arrow.ArrowException) as error:
        raise PipelineError(
            f"Expected to read rows {block.first} to {block.first + start + rows - 1} of {file.path!r}. Arrow cannot: "
            f"{_first_line(error)}. Copy or write the file again."
        ) from error
    table = table.slice(start, rows)
    for name in set(layout.names) & set(file.partition):
        table = table.append_column(name, arrow.repeat(file.partition[name], table.num_rows))
    return layout.raw(table, repr(file.path), block.first + start)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
