"""Columns of an Arrow table as tensors, without a step in Python for each row."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from tfopt.errors import PipelineError, UnsupportedError
from tfopt.pipelines.shared.elements import without_autograph

_VIEWED = {tf.uint32: tf.int32, tf.uint64: tf.int64}  # decode_raw has no types without a sign of these sizes
_CONVERT = "Convert it first, or leave it out with `columns`"

Kind = Literal["numbers", "bytes", "list"]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table, and what a row of it is."""

    name: str
    kind: Kind  # numbers of one shape; a string or bytes; a list of numbers of any length
    dtype: Any  # of the tensor
    shape: tuple[int, ...]  # of a row; () for what is not numbers
    type: Any  # Arrow's

    @property
    def width(self) -> int:
        """How many numbers a row holds."""
        return int(np.prod(self.shape, dtype=int))


@dataclass(frozen=True, slots=True)
class Asked:
    """Which columns are asked for."""

    names: list[str] | None  # besides the labels; None for all
    labels: list[str] | None
    one_label: bool = False  # which then is a tensor, and no dict of one

    def arranged(self, columns: dict[str, Any]) -> Any:
        """Returns the example of a row: its columns, and its labels apart from them."""
        if self.labels is None:
            return columns
        inputs = {name: value for name, value in columns.items() if name not in self.labels}
        labels = {name: columns[name] for name in self.labels}
        return inputs, (labels[self.labels[0]] if self.one_label else labels)


@dataclass(frozen=True, slots=True)
class Layout:
    """How the columns of a table lie in its raw rows, and which example a row is.

    All numbers of one type are neighbours in one tensor, so that a row of many columns is a few tensors, which are
    shuffled, gathered and batched as one. Lists of any length are the bytes of their numbers.
    """

    columns: tuple[Column, ...]  # in the order of the raw rows
    asked: Asked

    @property
    def names(self) -> list[str]:
        """The names of the columns."""
        return [column.name for column in self.columns]

    @property
    def groups(self) -> list[list[Column]]:
        """The columns of each raw tensor."""
        return [list(group) for _, group in groupby(self.columns, key=_group)]

    @property
    def dense(self) -> bool:
        """Whether rows batch as they are."""
        return all(column.kind != "list" for column in self.columns)

    @property
    def rows(self) -> list[tf.TensorSpec]:
        """The specs of a raw row's tensors."""
        return [
            tf.TensorSpec((sum(column.width for column in group),), group[0].dtype)
            if group[0].kind == "numbers"
            else tf.TensorSpec((), tf.string)
            for group in self.groups
        ]

    def raw(self, table: Any, where: str, first: int = 0) -> list[Any]:
        """Returns the rows of a table as NumPy arrays, one for each raw tensor; refuses nulls.

        Args:
            table: An Arrow table with these columns.
            where: What errors call it.
            first: The number there of the table's first row.
        """
        rows = table.num_rows
        found = []
        for group in self.groups:
            parts = [_array(column, table.column(column.name), where, first) for column in group]
            if group[0].kind == "numbers":
                parts = [part.reshape(rows, -1) for part in parts]
                parts = [np.ascontiguousarray(parts[0]) if len(parts) == 1 else np.concatenate(parts, axis=1)]
            found += parts
        return found

    @without_autograph
    def example(self, *raw: Any) -> Any:
        """Returns the example of a raw row, or of a batch of them, in a graph."""
        found: dict[str, Any] = {}
        for tensor, group in zip(raw, self.groups, strict=True):
            if group[0].kind == "numbers":
                found |= _spread(tensor, group)
            elif group[0].kind == "bytes":
                found[group[0].name] = tensor
            else:
                found[group[0].name] = _listed(tensor, group[0].dtype)
        return self.asked.arranged(found)


def layout_of(schema: Any, asked: Asked, where: str) -> Layout:
    """Returns how the columns of a table that are asked for lie in raw rows.

    Without names, all are but the index of a frame that is no label.

    Raises:
        PipelineError: If a column is missing or there twice, has no name, or has a type that no tensor has; or there is
            none besides the labels.
    """
    names, labels = asked.names, asked.labels or []
    if names is None:
        if "" in schema.names:  # pandas writes an index to CSV so
            raise PipelineError(
                f"Expected a name for each column in {where}. Found none for column {schema.names.index('') + 1}, as "
                "pandas writes the index of a frame. Leave it out with to_csv(path, index=False), or pass `columns`."
            )
        index = (schema.pandas_metadata or {}).get("index_columns", ())  # a range is a dict there, and no column
        names = [name for name in schema.names if name in labels or name not in index]
    columns = columns_of(schema, [*dict.fromkeys([*names, *labels])], where)
    if len(columns) == len(labels):
        if not labels:
            raise PipelineError(f"Expected at least one column in {where}. Found none. Check what wrote it.")
        raise PipelineError(
            f"Expected columns besides the label in {where}. Found only {', '.join(map(repr, labels))}. Name others in "
            "`columns`, or leave out `label`."
        )
    return Layout(tuple(sorted(columns, key=_group)), asked)


def columns_of(schema: Any, names: Sequence[str], where: str) -> list[Column]:
    """Returns the columns of these names; refuses those that are missing, there twice, or of a type no tensor has."""
    for name in names:
        if name not in schema.names:
            near = difflib.get_close_matches(name, schema.names, n=1, cutoff=0.5)
            hint = f"Did you mean {near[0]!r}?" if near else "Pass one of these."
            raise PipelineError(
                f"Expected a column {name!r} in {where}. Found none among {', '.join(map(repr, schema.names))}. {hint}"
            )
        if schema.names.count(name) > 1:
            raise PipelineError(f"Expected each column once in {where}. Found {name!r} twice. Rename one.")
    return [_column(schema.field(name), where) for name in names]


def import_pyarrow() -> Any:
    """Returns pyarrow, which reads tables.

    Raises:
        UnsupportedError: If it is not installed.
    """
    try:
        import pyarrow
        import pyarrow.compute  # the others are attributes only once imported
        import pyarrow.csv
        import pyarrow.parquet
    except ImportError as error:
        raise UnsupportedError(
            "Expected pyarrow to be installed, which reads tables. Found: it is not. Run: pip install 'tfopt[parquet]'"
        ) from error
    return pyarrow


def _group(column: Column) -> tuple[str, str]:
    return ("", column.dtype.name) if column.kind == "numbers" else (column.kind, column.name)


def _column(field: Any, where: str) -> Column:
    arrow = import_pyarrow()
    kinds, plain = arrow.types, _plain(field.type)
    if kinds.is_binary(plain) or kinds.is_large_binary(plain):
        return Column(field.name, "bytes", tf.string, (), field.type)
    is_list = kinds.is_list(plain) or kinds.is_large_list(plain)
    if is_list and (dtype := _number(_plain(plain.value_type))) is not None:
        return Column(field.name, "list", dtype, (), field.type)
    shape: tuple[int, ...] = ()
    while kinds.is_fixed_size_list(plain):
        shape, plain = (*shape, plain.list_size), _plain(plain.value_type)
    if (dtype := _number(plain)) is not None and 0 not in shape:
        return Column(field.name, "numbers", dtype, shape, field.type)
    raise PipelineError(
        f"Expected columns of numbers, booleans, strings, bytes, or lists of numbers in {where}. Found {field.name!r} "
        f"of the type {field.type}. {_remedy(field.type)}."
    )


def _plain(arrow_type: Any) -> Any:
    """Returns the type that a column is cast to: categories are their values, and all strings are bytes."""
    arrow = import_pyarrow()
    kinds = arrow.types
    if kinds.is_dictionary(arrow_type):
        return _plain(arrow_type.value_type)
    texts = (kinds.is_string, kinds.is_binary, kinds.is_large_string, kinds.is_large_binary, kinds.is_string_view)
    if any(is_text(arrow_type) for is_text in (*texts, kinds.is_binary_view, kinds.is_fixed_size_binary)):
        return arrow.large_binary() if kinds.is_large_string(arrow_type) else arrow.binary()
    return arrow_type


def _number(arrow_type: Any) -> Any:
    kinds = import_pyarrow().types
    if kinds.is_boolean(arrow_type) or kinds.is_integer(arrow_type) or kinds.is_floating(arrow_type):
        return tf.as_dtype(arrow_type.to_pandas_dtype())
    return None


def _remedy(arrow_type: Any) -> str:
    kinds = import_pyarrow().types
    if kinds.is_temporal(arrow_type):
        return "Convert it to a number, such as seconds with astype('datetime64[s]').astype('int64'), or to a string"
    if kinds.is_decimal(arrow_type):
        return "Cast it to float64, or to int64 of its smallest unit"
    if kinds.is_struct(arrow_type):
        return "Write each field as a column of its own, such as with table.flatten()"
    if kinds.is_null(arrow_type):
        return "It holds nothing. Leave it out with `columns`"
    return _CONVERT


def _array(column: Column, values: Any, where: str, first: int) -> Any:
    """Returns a column's rows as a NumPy array: numbers, or objects of bytes."""
    arrow = import_pyarrow()
    if arrow.types.is_dictionary(column.type):
        values = values.cast(column.type.value_type)
    if values.null_count:
        row = first + arrow.compute.index(arrow.compute.is_null(values), True).as_py()
        raise PipelineError(
            f"Expected a value in each row of the column {column.name!r}. Found none in row {row:,} of {where} "
            f"(rows without one: {values.null_count:,}). Fill them with a value that you choose, or leave out "
            "the rows or the column."
        )
    if column.kind == "numbers" and not column.shape:
        return values.to_numpy().astype(column.dtype.as_numpy_dtype, copy=False)
    if column.kind == "numbers":
        parts = [_flat(chunk, column, where).to_numpy(zero_copy_only=False) for chunk in values.chunks]
        return np.concatenate(parts or [np.empty(0)]).astype(column.dtype.as_numpy_dtype, copy=False)
    if column.kind == "list":
        chunks = [_as_bytes(chunk, column, where) for chunk in values.chunks]
    else:
        values = values.cast(arrow.binary()) if arrow.types.is_fixed_size_binary(column.type) else values
        chunks = [chunk.cast(_plain(column.type)) for chunk in values.chunks]
    return np.concatenate([np.empty(0, object), *(chunk.to_numpy(zero_copy_only=False) for chunk in chunks)])


def _flat(lists: Any, column: Column, where: str) -> Any:
    """Returns the numbers inside lists, of which none may be missing."""
    types = import_pyarrow().types
    while types.is_list(lists.type) or types.is_large_list(lists.type) or types.is_fixed_size_list(lists.type):
        lists = lists.flatten()
        if lists.null_count:
            raise PipelineError(
                f"Expected lists of numbers in the column {column.name!r} of {where}. Found {lists.null_count:,} "
                "numbers missing inside lists. Fill them with a value that you choose, or leave out the column."
            )
    return lists.cast(lists.type.value_type) if types.is_dictionary(lists.type) else lists


def _as_bytes(lists: Any, column: Column, where: str) -> Any:
    """Returns lists of numbers as their bytes."""
    arrow = import_pyarrow()
    numbers = _flat(lists, column, where).to_numpy(zero_copy_only=False)
    contents = np.ascontiguousarray(numbers, column.dtype.as_numpy_dtype)
    offsets = np.asarray(lists.offsets, np.int64)
    offsets = (offsets - offsets[0]) * contents.itemsize
    buffers = [None, arrow.py_buffer(offsets), arrow.py_buffer(contents)]
    return arrow.Array.from_buffers(arrow.large_binary(), len(lists), buffers)


def _spread(tensor: Any, group: list[Column]) -> dict[str, Any]:
    """Returns the columns whose numbers lie in one tensor, side by side in its last dimension."""
    if len(group) == 1:
        parts = [tensor]
    elif all(not column.shape for column in group):
        return {column.name: part for column, part in zip(group, tf.unstack(tensor, axis=-1), strict=True)}
    else:
        parts = tf.split(tensor, [column.width for column in group], axis=-1)
    if tensor.shape.rank == 1:
        return {column.name: tf.reshape(part, column.shape) for column, part in zip(group, parts, strict=True)}
    rows = tensor.shape[0] or tf.shape(tensor)[0]
    return {column.name: tf.reshape(part, (rows, *column.shape)) for column, part in zip(group, parts, strict=True)}


def _listed(contents: Any, dtype: Any) -> Any:
    """Returns the numbers of a list that is given as its bytes."""
    if dtype == tf.bool:
        return tf.cast(tf.io.decode_raw(contents, tf.uint8), tf.bool)
    numbers = tf.io.decode_raw(contents, _VIEWED.get(dtype, dtype))
    return tf.bitcast(numbers, dtype) if dtype in _VIEWED else numbers
