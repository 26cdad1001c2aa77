"""Rows of readings, appended to CSV and JSONL files that a kill leaves whole."""

import csv
import io
import json
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from itertools import chain, count
from pathlib import Path
from typing import Any

from tfopt.errors import unknown_name
from tfopt.files import LineAppender

FORMATS = ("csv", "jsonl")
_log = logging.getLogger("tfopt")


def check_formats(formats: str | Sequence[str]) -> tuple[str, ...]:
    """Returns the formats, or raises a ValueError for one that there is not."""
    names = (formats,) if isinstance(formats, str) else tuple(formats)
    for name in names:
        if name not in FORMATS:
            raise unknown_name("log format", name, FORMATS)
    return names


def check_log_dir(log_dir: str | os.PathLike[str] | None) -> Path | None:
    """Returns the folder, or raises for what can be none: better now than after hours of training."""
    if log_dir is None:
        return None
    if not isinstance(log_dir, (str, os.PathLike)):
        raise TypeError(f"Expected log_dir to be a path or None. Received: {log_dir!r}. Name a folder for the files.")
    if "://" in os.fspath(log_dir):
        raise ValueError(
            f"Expected log_dir to be a local folder. Received: {log_dir!r}. Copy the files there afterwards."
        )
    if Path(log_dir).exists() and not Path(log_dir).is_dir():
        raise ValueError(f"Expected log_dir to be a folder. Received: {log_dir!r}, which is a file. Choose another.")
    return Path(log_dir)


class RowWriter:
    """Appends each row to one file a format, `LOG_DIR/NAME.csv` and so on, and never ends a training.

    A CSV file that is there from an earlier run is continued if it has the same columns; otherwise a new one is started
    beside it (`NAME-2.csv`). A file that cannot be written (a full disk, a folder that vanished) is given up with one
    warning. Rows may be written by one thread while another closes.

    Args:
        log_dir: The folder; made if need be.
        name: The files' name without its ending.
        formats: Among `FORMATS`.
        fields: The columns, in order. A row's value is None where it is unknown.
    """

    def __init__(self, log_dir: Path, name: str, formats: Sequence[str], fields: Sequence[str]):
        self._fields = list(fields)
        self._lock = threading.Lock()
        self._files: dict[str, LineAppender] = {}
        for form in formats:
            try:
                self._files[form] = self._open(log_dir, name, form)
            except OSError as error:
                _warn(log_dir / f"{name}.{form}", error)

    def write(self, row: Mapping[str, Any]) -> None:
        """Appends one row, given by column; does nothing once closed."""
        with self._lock:
            for form, file in list(self._files.items()):
                try:
                    file.append(self._csv(row) if form == "csv" else self._json(row))
                except OSError as error:
                    _warn(file.path, error)
                    self._files.pop(form).close()

    def close(self) -> None:
        """Closes the files. A second call does nothing."""
        with self._lock:
            while self._files:
                self._files.popitem()[1].close()

    def _open(self, folder: Path, name: str, form: str) -> LineAppender:
        if form != "csv":
            return LineAppender(folder / f"{name}.{form}")
        header = ",".join(self._fields)
        names = chain([f"{name}.csv"], (f"{name}-{number}.csv" for number in count(2)))
        # Looked at before it is opened: opening cuts off an unfinished line, which another's file may end in.
        path = next(folder / name for name in names if _header(folder / name) in (b"", header.encode()))
        file = LineAppender(path)
        if file.empty:
            file.append(header)
        return file

    def _csv(self, row: Mapping[str, Any]) -> str:
        text = io.StringIO()
        csv.writer(text, lineterminator="").writerow([_cell(row[name]) for name in self._fields])
        return text.getvalue()

    def _json(self, row: Mapping[str, Any]) -> str:
        return json.dumps({name: row[name] for name in self._fields})


def _header(path: Path) -> bytes:
    """The first line of a file, without its line break; empty where there is no file or no whole line."""
    if not path.exists():
        return b""
    with open(path, "rb") as file:
        line = file.readline(65536)
    return line[:-1] if line.endswith(b"\n") or not line else b"unfinished: " + line


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
