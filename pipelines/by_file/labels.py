"""Paths and labels as users have them: in sequences, pairs or tables; names of classes become numbers or vectors."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfopt.errors import PipelineError
from tfopt.pipelines.shared.paths import expect_order, expect_reachable, file_stamps
from tfopt.pipelines.sources.source import common_length, is_numeric
from tfopt.pipelines.tables.csv import read_csv


@dataclass(frozen=True, slots=True)
class Labelled:
    """Paths and what stands for each in the examples."""

    paths: list[str]
    values: Any  # a NumPy array
    class_names: tuple[str, ...] | None = None
    note: str = ""  # for the plan


def columns_of(
    caller: str, files: Any, options: dict[str, str | None], defaults: tuple[str, str]
) -> tuple[Any, Any] | None:
    """Returns the two columns of a table, of pairs in a list or of a tuple; None for anything else.

    `options` are the user's arguments that name the columns of a table, `defaults` the names without them.
    """
    if _is_table(files):
        names = [given or default for given, default in zip(options.values(), defaults, strict=True)]
        return _of_table(caller, files, names, options)
    if any(given is not None for given in options.values()):
        raise TypeError(
            f"{caller} expects {' and '.join(map('`{}`'.format, options))} only with a table. Received: "
            f"{type(files).__name__}. Leave them out, or pass a data frame or the path of a .csv file."
        )
    if isinstance(files, list):
        for number, pair in enumerate(files):
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise TypeError(
                    f"{caller} expects pairs in a list. Received at index {number}: {pair!r}. Pass a list of tuples of "
                    "two items, or a tuple of two sequences."
                )
        return [first for first, _ in files], [second for _, second in files]
    if isinstance(files, tuple) and len(files) != 2:
        raise TypeError(
            f"{caller} expects ({', '.join(defaults)}). Received a tuple of {len(files)}. Pass these two, or pairs in "
            "a list."
        )
    return files if isinstance(files, tuple) else None


def expect_paths(caller: str, given: Any) -> list[str]:
    """Returns a sequence of paths as strings."""
    expect_order("paths", given)
    if isinstance(given, str | os.PathLike) or not isinstance(given, Iterable):
        raise TypeError(
            f"{caller} expects paths in a sequence. Received: {given!r}. Pass a list, such as "
            "sorted(glob.glob(pattern))."
        )
    paths = []
    for path in given:
        if not isinstance(path, str | os.PathLike):
            raise TypeError(f"{caller} expects paths. Received as one: {path!r}. Pass a list of strings or Paths.")
        paths.append(str(os.fspath(path)))
    return paths


def labelled(caller: str, given: Any, labels: Any, classes: Sequence[str] | None) -> Labelled:
    """Returns paths with labels: numbers as they are, names as numbers of classes, lists of names as vectors."""
    paths = expect_paths(caller, given)
    expect_order("labels", labels)
    names = None if classes is None else tuple(expect_classes(classes))
    lists = _lists_of_names(labels, names)
    values: Any = _as_array(caller, labels) if lists is None else lists
    common_length({"paths": len(paths), "labels": len(values)})
    if lists is not None:
        return _multi_hot(caller, paths, lists, names)
    if values.dtype.kind in "OT":
        numbers = _numbers_of(_expect_names(caller, values), names)
        coded = np.array([numbers[label] for label in values.ravel()], np.int32)
        return Labelled(paths, coded.reshape(values.shape), tuple(numbers))
    if names is not None and values.dtype.kind in "iu":
        _expect_among({int(label) for label in values.ravel() if not 0 <= label < len(names)}, names)
    return Labelled(paths, values, names)


def expect_classes(classes: Sequence[str]) -> list[str]:
    """Returns the names of classes, refusing what is not a name, and duplicates."""
    # A set has another order in each process, and a mapping may number its names in another order than its own.
    in_order = isinstance(classes, Iterable) and not isinstance(classes, str | set | frozenset | Mapping)
    names = list(classes) if in_order else []
    if not in_order or not all(isinstance(name, str) for name in names):
        raise TypeError(f"Expected a sequence of names for `classes`. Received: {classes!r}. Pass a list of strings.")
    if not names or len(set(names)) < len(names):
        raise ValueError(f"Expected each class once in `classes`. Received: {names}. Pass all names, each once.")
    return names


def _is_table(data: Any) -> bool:
    """Whether this is the path of a CSV file, or columns by name: a dict, a data frame or a pyarrow Table."""
    if isinstance(data, str | os.PathLike):
        return str(data).endswith(".csv") and not os.path.isdir(data)
    return isinstance(data, Mapping) or hasattr(data, "columns")


def _of_table(caller: str, table: Any, names: list[str], options: Iterable[str]) -> tuple[Any, Any]:
    if isinstance(table, str | os.PathLike):
        path = expect_reachable(os.fspath(table))
        file_stamps([path])
        table = read_csv(path)
    known = table if isinstance(table, Mapping) else getattr(table, "column_names", table.columns)
    if not set(names).issubset(known):
        raise ValueError(
            f"{caller} expects a table with the columns {' and '.join(map(repr, names))}. Received: "
            f"{', '.join(map(repr, known))}. Name them with {' and '.join(map('`{}`'.format, options))}."
        )
    if isinstance(table, Mapping):
        return table[names[0]], table[names[1]]
    first, second = (np.asarray(table[name]) for name in names)
    for name, values in zip(names, (first, second), strict=True):
        _expect_numbers(values, f"in each row of the column {name!r}")
    return first, second


def _expect_numbers(values: Any, where: str) -> None:
    """Refuses NaN, which stands for a missing value where nobody wrote an array."""
    if values.dtype.kind == "f" and np.isnan(values).any():
        row = int(np.argwhere(np.isnan(values))[0, 0])
        raise PipelineError(
            f"Expected a number {where}. Found NaN at index {row:,}, counted from 0. Leave out what has no label, or "
            "pass an array of NumPy, which may hold NaN."
        )


def _as_array(caller: str, labels: Any) -> Any:
    try:
        values = np.array(labels)  # a copy, since they are read later, when the caller's may have changed
        if values.dtype.kind == "U":  # NumPy has made names of numbers and NaN among these, and cut NULs at their ends
            values = np.asarray(labels, object)
    except ValueError as error:  # NumPy's, for rows of different lengths
        raise TypeError(
            f"{caller} expects numbers, names or lists of names as labels. Received lists of other things, which "
            "differ in length. Pass names, or an array with one row per path."
        ) from error
    if values.ndim == 0:
        raise TypeError(f"{caller} expects labels in a sequence. Received as labels: {labels!r}. Pass one per path.")
    if values.dtype.kind not in "OT" and not is_numeric(values.dtype):
        raise TypeError(
            f"{caller} expects numbers or names as labels. Received: {values.dtype}. Convert them to these."
        )
    if len(values) and not values.size:
        raise PipelineError("Expected a name in one of the lists of labels. Found none. Name the classes in `classes`.")
    if not isinstance(labels, np.ndarray):
        _expect_numbers(values, "for each path")
    return values


def _expect_names(caller: str, values: Any) -> set[str]:
    for label in values.ravel():
        if not isinstance(label, str):
            raise TypeError(
                f"{caller} expects numbers or names as labels. Found among names: {type(label).__name__}. Pass one "
                "type, and leave out what has no label."
            )
    return set(values.ravel())


def _numbers_of(found: set[str], names: tuple[str, ...] | None) -> dict[str, int]:
    """Returns the numbers of the classes by their names: those given, or else those found, sorted."""
    if names is None and "" in found:  # an empty field of a CSV file, or what "".split(";") returns
        raise PipelineError(
            "Expected a name in each label. Found an empty one. Leave out what has no label, or if it is a class, name "
            "it in `classes`."
        )
    names = names or tuple(sorted(found))
    _expect_among(found.difference(names), names)
    return {name: number for number, name in enumerate(names)}


def _lists_of_names(labels: Any, names: tuple[str, ...] | None) -> list[Any] | None:
    """Returns labels that are lists of names, which empty lists are only if there are `names`; otherwise None."""
    if not isinstance(labels, Iterable) or isinstance(labels, str) or getattr(labels, "ndim", 1) == 0:
        return None
    if isinstance(labels, np.ndarray) and labels.dtype.kind in "biufc":
        return None
    rows = list(labels)
    filled = next((row for row in rows if _is_list(row) and len(row)), None)
    if filled is None:
        return rows if names is not None and rows and all(map(_is_list, rows)) else None
    return rows if isinstance(next(iter(filled)), str) else None


def _is_list(row: Any) -> bool:
    return isinstance(row, list | tuple | set | frozenset) or (isinstance(row, np.ndarray) and row.ndim == 1)


def _multi_hot(caller: str, paths: list[str], lists: list[Any], names: tuple[str, ...] | None) -> Labelled:
    """Returns paths with vectors that are 1 for the classes of each and 0 elsewhere."""
    for number, row in enumerate(lists):
        if not _is_list(row) or not all(isinstance(name, str) for name in row):
            raise TypeError(
                f"{caller} expects a list of names for each path, since others have one. Received at index {number}: "
                f"{row!r}. Pass a list of strings, an empty one for none."
            )
    numbers = _numbers_of({name for row in lists for name in row}, names)
    values = np.zeros((len(lists), len(numbers)), np.float32)
    for vector, row in zip(values, lists, strict=True):
        vector[[numbers[name] for name in row]] = 1
    empty = sum(not len(row) for row in lists)
    repeated = sum(len(set(row)) < len(row) for row in lists)
    note = "; ".join(
        [f"labels are vectors of {len(numbers)} classes, 1 for each in the list and 0 elsewhere"]
        + [f"empty lists: {empty:,}"] * (empty > 0)
        + [f"lists that repeat a class, which counts once: {repeated:,}"] * (repeated > 0)
    )
    return Labelled(paths, values, tuple(numbers), note)


def _expect_among(others: set[Any], names: tuple[str, ...]) -> None:
    if others:
        raise PipelineError(
            f"Expected only labels of the classes {list(names)}. Found {sorted(others)[0]!r}. Add it to `classes`, or "
            "leave out its files."
        )
