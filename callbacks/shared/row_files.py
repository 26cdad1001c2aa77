"""Rows of readings, appended to CSV, JSONL and TensorBoard files that survive a kill."""

import csv
import importlib.util
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tfopt.callbacks.shared.background import Background
from tfopt.callbacks.shared.reading_sources import finite
from tfopt.callbacks.shared.rotated_files import EventFile, RotatedLines
from tfopt.callbacks.shared.run import COORDINATES
from tfopt.callbacks.shared.workers import worker_rank
from tfopt.errors import UnsupportedError, unknown_name
from tfopt.warn import warn_once

FORMATS = ("csv", "jsonl", "tensorboard")
# Columns that say when and where a row was taken; they make no curves.
_NO_CURVES = frozenset({*COORDINATES, "window_steps", "window_seconds"})
# About a megabyte of rows: what a training logs while a disk hangs for minutes.
_QUEUED_ROWS = 4096


def check_formats(formats: str | Sequence[str]) -> tuple[str, ...]:
    """Returns the formats without duplicates.

    Raises:
        ValueError: If a format is unknown.
        TypeError: If `formats` is not a sequence of names.
        UnsupportedError: If "tensorboard" is among them and TensorBoard is not installed.
    """
    if not isinstance(formats, Iterable):
        raise TypeError(f"Expected formats to be a sequence of names. Received: {formats!r}. Choose from {FORMATS}.")
    given = (formats,) if isinstance(formats, str) else tuple(formats)
    for name in given:
        if name not in FORMATS:
            raise unknown_name("log format", name, FORMATS)
    names = tuple(dict.fromkeys(given))
    if "tensorboard" in names:
        require_tensorboard()
    return names


def require_tensorboard() -> None:
    """Raises an UnsupportedError if TensorBoard is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        raise UnsupportedError(
            "Expected TensorBoard for the format 'tensorboard'. Found that it is not installed: TensorFlow does not "
            "bring it. Install it with: pip install 'tfopt[tensorboard]'"
        )


class RowWriter:
    """Appends each row to one file per format, and never ends a training. For one thread.

    - "csv" and "jsonl": `LOG_DIR/NAME.csv` and `.jsonl`, continued if an earlier run left them.
    - "tensorboard": event files in the folder `LOG_DIR/NAME`, one curve per column.

    It leaves alone what another process or callback is writing to, and CSV files with other columns, and begins
    `NAME-2.csv` beside them. With several workers (TF_CONFIG) each writes its own files: `NAME-worker1.csv`. After an
    error (a full disk, a deleted folder) the file is no longer written, with one warning per cause and folder. Values
    are None where they are unknown.
    """

    def __init__(self, log_dir: Path, name: str, formats: Sequence[str], columns: Sequence[str]):
        self._log_dir, self._name, self._formats, self._columns = log_dir, name, formats, columns
        self._stem = worker_rank().file_name(name)
        self._files: dict[str, RotatedLines | EventFile] = {}

    def open(self) -> None:
        """Opens the files."""
        for form in self._formats:
            try:
                self._files[form] = self._open(form)
            except Exception as error:  # noqa: BLE001  importing TensorBoard may fail in any way
                self._warn(self._log_dir / self._stem, error)

    def write(self, row: Mapping[str, Any], *, curves: Mapping[str, Any] | None = None) -> None:
        """Appends one row.

        Args:
            row: Value by column. `step` is TensorBoard's x axis.
            curves: TensorBoard's values by tag. None: the row's, as `NAME/COLUMN`. Finite numbers are written.
        """
        for form, file in list(self._files.items()):
            try:
                if isinstance(file, EventFile):
                    points = finite(self._curves(row) if curves is None else curves)
                    file.append(row["step"], row["time_seconds"], points)
                else:
                    file.append(self._line(row, form))
            except OSError as error:
                self._warn(file.path, error)
                self._files.pop(form).close()

    def close(self) -> None:
        """Closes the files. A second call does nothing."""
        while self._files:
            self._files.popitem()[1].close()

    def _open(self, form: str, number: int = 1) -> "RotatedLines | EventFile":
        path = self._log_dir / (self._stem if number == 1 else f"{self._stem}-{number}")
        try:
            if form == "tensorboard":
                return EventFile(path)
            if form == "jsonl":
                return RotatedLines(path.with_name(f"{path.name}.jsonl"))
            path, header = path.with_name(f"{path.name}.csv"), ",".join(self._columns)
            # Check before opening: opening cuts off an incomplete last line, even of somebody else's file.
            if _header(path) in (b"", header.encode()):
                return RotatedLines(path, header)
        except BlockingIOError as error:
            text = (
                f"Expected nobody else to write to {error.filename}. Found another process, or another callback of "
                f"this one. Its rows stay there; these go to the next free {self._stem}-NUMBER. Their columns run, "
                "host and pid tell whose they are. To keep them apart, give each its own log_dir."
            )
            warn_once(f"company {self._log_dir / self._stem}", text)
        return self._open(form, number + 1)

    def _line(self, row: Mapping[str, Any], form: str) -> str:
        if form == "jsonl":
            return json.dumps({name: row[name] for name in self._columns})
        text = io.StringIO()
        csv.writer(text, lineterminator="").writerow([_cell(row[name]) for name in self._columns])
        return text.getvalue()

    def _curves(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return {f"{self._name}/{name}": row[name] for name in self._columns if name not in _NO_CURVES}

    def _warn(self, path: Path, error: Exception) -> None:
        text = (
            f"Expected to append to {path}. Found: {error}. It is no longer logged to; the training goes on. Free the "
            "disk or choose another log_dir."
        )
        warn_once(f"append {self._log_dir / self._stem} {type(error).__name__}", text)


class BackgroundRows:
    """A `RowWriter` with its own thread: no call waits for the disk, not even to open a file. Takes its arguments."""

    def __init__(self, log_dir: Path, name: str, formats: Sequence[str], columns: Sequence[str]):
        self._writer = RowWriter(log_dir, name, formats, columns)
        self._background = Background(f"{name} log", _call, most=_QUEUED_ROWS, at_end=self._writer.close)
        self._background.put(self._writer.open)

    def write(self, row: Mapping[str, Any], *, curves: Mapping[str, Any] | None = None) -> None:
        """Queues a row; does nothing once closed."""
        self._background.put(partial(self._writer.write, row, curves=curves))

    def close(self) -> None:
        """Waits a few seconds for the queued rows and the files to be closed."""
        self._background.close()


def _call(action: Callable[[], object]) -> None:
    action()


def _header(path: Path) -> bytes:
    """The first line of a file without its line break; empty if there is no file or no complete line."""
    if not path.exists():
        return b""
    with open(path, "rb") as file:
        line = file.readline(65536)
    return line[:-1] if line.endswith(b"\n") or not line else b"incomplete: " + line


def _cell(value: Any) -> Any:
    """A CSV cell: empty if unknown, the items of a list joined by "|"."""
    return "|".join(map(str, value)) if isinstance(value, list | tuple) else value
