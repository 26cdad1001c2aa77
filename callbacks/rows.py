"""Rows of readings, appended to CSV and JSONL files that a kill leaves whole."""

import csv
import io
import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tfopt.errors import unknown_name
from tfopt.files import LineAppender

FORMATS = ("csv", "jsonl")
_log = logging.getLogger("tfopt")


def check_formats(formats: Sequence[str]) -> tuple[str, ...]:
    """Returns the formats, or raises a ValueError for one that there is not."""
    for name in formats:
        if name not in FORMATS:
            raise unknown_name("log format", name, FORMATS)
    return tuple(formats)


class RowWriter:
    """Appends each row to one file a format, `LOG_DIR/NAME.csv` and so on, and never ends a training.

    A file that is there from an earlier run is continued if it has the same columns; otherwise a new one is started
    beside it (`NAME-2.csv`). A file that cannot be written (a full disk, a folder that vanished) is given up with one
    warning.

    Args:
        log_dir: The folder; made if need be.
        name: The files' name without its ending.
        formats: Among `FORMATS`.
        fields: The columns, in order. A row's value is None where it is unknown.
    """

    def __init__(self, log_dir: str | os.PathLike[str], name: str, formats: Sequence[str], fields: Sequence[str]):
        self._fields = list(fields)
        self._files: dict[str, LineAppender] = {}
        for form in formats:
            try:
                self._files[form] = self._open(Path(log_dir), name, form)
            except OSError as error:
                _warn(Path(log_dir) / f"{name}.{form}", error)

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files being written."""
        return tuple(file.path for file in self._files.values())

    def write(self, row: Mapping[str, Any]) -> None:
        """Appends one row, given by column."""
        for form, file in list(self._files.items()):
            try:
                file.append(self._csv(row) if form == "csv" else json.dumps({name: row[name] for name in self._fields}))
            except OSError as error:
                _warn(file.path, error)
                self._files.pop(form).close()

    def close(self) -> None:
        """Closes the files. A second call does nothing."""
        while self._files:
            self._files.popitem()[1].close()

    def _open(self, folder: Path, name: str, form: str) -> LineAppender:
        if form != "csv":
            return LineAppender(folder / f"{name}.{form}")
        header = ",".join(self._fields)
        number = 1
        while True:
            path = folder / (f"{name}.csv" if number == 1 else f"{name}-{number}.csv")
            file = LineAppender(path)
            if file.empty:
                file.append(header)
            with open(path, encoding="utf-8") as lines:
                if lines.readline().rstrip("\n") == header:
                    return file
            file.close()
            number += 1

    def _csv(self, row: Mapping[str, Any]) -> str:
        text = io.StringIO()
        csv.writer(text, lineterminator="").writerow([_cell(row[name]) for name in self._fields])
        return text.getvalue()


def _cell(value: Any) -> Any:
    """A CSV cell: empty where unknown, the parts of a list with bars between them."""
    return "|".join(map(str, value)) if isinstance(value, list | tuple) else value


def _warn(path: Path, error: OSError) -> None:
    _log.warning(
        "Expected to append to %s. Found: %s. Nothing more is logged there; the training goes on. "
        "Free the disk or choose another log_dir.",
        path,
        error,
    )
