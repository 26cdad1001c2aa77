"""CSV files as Arrow tables, in which every value is what the file says."""

import os
import re
from typing import Any

from tfopt.errors import PipelineError
from tfopt.pipelines.tables.columns import import_pyarrow

_EXACT = 2**53  # a float64 holds each integer up to this
_QUOTED = re.compile('"[^"]*"')
_HEX, _ZEROS, _INTEGER = r"^[+-]?0[xX]", r"^[+-]?0[0-9]", r"^[+-]?[0-9]+$"


def read_csv(path: str) -> Any:
    """Returns a CSV file as an Arrow table. A field that is empty and not quoted is a missing value, in text too.

    Raises:
        UnsupportedError: If pyarrow is not installed.
        PipelineError: If it cannot be read, or a value cannot be kept as it is.
    """
    arrow = import_pyarrow()
    _expect_commas(path)
    rows = _read(path)
    names = [name for name in dict.fromkeys(rows.schema.names) if rows.schema.names.count(name) == 1]
    names = [name for name in names if _may_differ(rows[name])]
    if names:
        texts = _read(
            path,
            include_columns=names,
            column_types=dict.fromkeys(names, arrow.binary()),
            null_values=[""],
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        )
        for name in names:
            kept = _kept(rows[name], texts[name], f"the column {name!r} of {path!r}")
            rows = rows.set_column(rows.schema.get_field_index(name), name, kept)
    return rows


def _expect_commas(path: str) -> None:
    """Refuses a first line that another character divides, or that is not UTF-8."""
    try:
        with open(path, "rb") as file:
            line = file.readline()
    except OSError:
        return  # Arrow says it
    try:
        plain = _QUOTED.sub("", line.decode())
    except UnicodeDecodeError:
        raise _not_utf8(f"the first line of {path!r}") from None
    found = next((sign for sign in ";\t" if sign in plain), None)
    if found and "," not in plain:
        raise PipelineError(
            f"Expected commas between the names of columns in {path!r}. Found {found!r}. Pass what "
            f"pandas.read_csv(path, sep={found!r}) returns."
        )


def _not_utf8(where: str) -> PipelineError:
    return PipelineError(
        f"Expected text in UTF-8 in {where}. Found other bytes. Pass what pandas.read_csv(path, encoding=...) returns, "
        'such as with encoding="latin-1".'
    )


def _read(path: str, **conversion: Any) -> Any:
    arrow = import_pyarrow()
    # In one block: Arrow takes the types of columns from the first, and would refuse a fraction in a later one.
    try:
        at_once = arrow.csv.ReadOptions(block_size=min(max(os.path.getsize(path), 1), 2**31 - 1))
        return arrow.csv.read_csv(path, read_options=at_once, convert_options=arrow.csv.ConvertOptions(**conversion))
    except (OSError, arrow.ArrowException) as error:
        raise PipelineError(
            f"Expected a CSV file whose first line names its columns at {path!r}. Arrow cannot read it: {error}. "
            "Correct the line, or pass what pandas.read_csv returns."
        ) from error


def _may_differ(column: Any) -> bool:
    """Whether the type that Arrow has chosen may have changed a value."""
    arrow = import_pyarrow()
    kinds, compute = arrow.types, arrow.compute
    if kinds.is_string(column.type):
        return compute.any(compute.equal(column, "")).as_py()
    if kinds.is_floating(column.type):
        largest = compute.max(compute.abs(column)).as_py()
        return largest is not None and largest >= _EXACT
    return kinds.is_integer(column.type) or kinds.is_binary(column.type)


def _kept(found: Any, texts: Any, where: str) -> Any:
    """Returns a column as it is, or with another type that changes no value, given its texts."""
    arrow = import_pyarrow()
    kinds, compute = arrow.types, arrow.compute
    if kinds.is_binary(found.type):
        raise _not_utf8(where)
    if kinds.is_string(found.type):
        return texts.cast(arrow.string())
    valid = compute.is_valid(found)
    written = compute.utf8_trim_whitespace(texts.filter(valid).cast(arrow.string()))

    def some(pattern: str) -> Any:
        return compute.match_substring_regex(written, pattern)

    if compute.any(some(_HEX)).as_py():
        return texts.cast(arrow.string())  # as pandas reads it
    if kinds.is_integer(found.type):
        merged = compute.count_distinct(written).as_py() > compute.count_distinct(found.filter(valid)).as_py()
        if merged and compute.any(zeros := some(_ZEROS)).as_py():
            raise PipelineError(
                f"Expected numbers, or text, in {where}. Found {written.filter(zeros)[0].as_py()!r}, which as a number "
                "is the same as another value there. If they are not the same, pass what pandas.read_csv(path, "
                "dtype={name: str}) returns; if they are, write them without zeros in front."
            )
        return found
    if not compute.all(integers := some(_INTEGER)).as_py():
        largest = compute.max(compute.abs(found.filter(valid).filter(integers))).as_py()
        if largest is not None and largest >= _EXACT:
            raise PipelineError(
                f"Expected numbers in {where} that a float64 holds. Found integers of up to {largest:,.0f} beside "
                f"fractions, and beyond {_EXACT:,} some would change. Pass what pandas.read_csv(path, dtype={{name: "
                "dtype of your choice}) returns."
            )
        return found
    try:
        return compute.if_else(valid, texts.cast(arrow.string()), None).cast(arrow.uint64())
    except arrow.ArrowException:
        raise PipelineError(
            f"Expected integers of up to 64 bits in {where}. Found larger ones. Pass what pandas.read_csv(path, "
            "dtype={name: str}) returns, or leave the column out of the file."
        ) from None
