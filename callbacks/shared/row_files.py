"""Rows of readings, appended to CSV, JSONL and TensorBoard files that survive a kill."""

import csv
import io
import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, count
from pathlib import Path
from typing import Any

from tfopt.callbacks.shared.background import Background
from tfopt.callbacks.shared.reading_sources import finite
from tfopt.callbacks.shared.rotating_files import EventFile, RotatedLines, require_tensorboard
from tfopt.callbacks.shared.worker_rank import worker_rank
from tfopt.errors import unknown_name
from tfopt.warn import warn_once

FORMATS = ("csv", "jsonl", "tensorboard")
# Columns that say when and where a row was taken; they make no curves.
_COORDINATES = frozenset({"time_seconds", "elapsed_seconds", "index", "epoch", "step"})
# A writer on a hanging disk holds the lock forever; so does a fork in the middle of a line.
_CLOSE_SECONDS = 1.0
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


class RowWriter:
    """Appends each row to one file per format, and never ends a training.

    - "csv" and "jsonl": `LOG_DIR/NAME.csv` and `.jsonl`. A CSV file from an earlier run is continued if it has the same
      columns; otherwise a new one is started beside it (`NAME-2.csv`).
    - "tensorboard": event files in the folder `LOG_DIR/NAME`, one curve per column.

    With several workers (TF_CONFIG) each writes its own files: `NAME-worker1.csv`. After an error (a full disk, a
    deleted folder) the file is no longer written, with one warning per cause and folder. One thread may close the
    writer while another writes.

    Args:
        log_dir: The folder, created if missing.
        name: The files' name without extension.
        formats: Among `FORMATS`.
        columns: In order. A row's value is None where it is unknown.
    """

    def __init__(self, log_dir: Path, name: str, formats: Sequence[str], columns: Sequence[str]):
        self._log_dir, self._name = log_dir, name
        self._stem = worker_rank().file_name(name)
        self._columns = list(columns)
        self._lock = threading.Lock()
        self._closed = False
        self._rows = 0
        self._files: dict[str, RotatedLines | EventFile] = {}
        for form in formats:
            try:
                self._files[form] = self._open(form)
            except Exception as error:  # noqa: BLE001  importing TensorBoard may fail in any way
                self._warn(log_dir / self._stem, error)

    def write(
        self, row: Mapping[str, Any], *, step: int | None = None, curves: Mapping[str, Any] | None = None
    ) -> None:
        """Appends one row; does nothing once closed.

        Args:
            row: Value by column.
            step: The training step, TensorBoard's x axis. None: the row's number.
            curves: TensorBoard's values by tag, of which finite numbers are written. None: the row's numbers, as
                `NAME/COLUMN`.
        """
        with self._lock:
            if self._closed:
                return
            self._rows += 1
            for form, file in list(self._files.items()):
                try:
                    if isinstance(file, EventFile):
                        points = finite(self._curves(row) if curves is None else curves)
                        file.append(self._rows if step is None else step, row["time_seconds"], points)
                    else:
                        file.append(self._line(row, form))
                except OSError as error:
                    self._warn(file.path, error)
                    self._files.pop(form).close()

    def close(self) -> None:
        """Closes the files. A second call does nothing."""
        self._closed = True
        if not self._lock.acquire(timeout=_CLOSE_SECONDS):
            warn_once(
                f"hung {self._log_dir}",
                f"Expected {self._log_dir} to take a row within {_CLOSE_SECONDS:g} s. Found that it hangs. Its last "
                "rows are lost, and the training goes on. Check the disk.",
            )
            return
        try:
            while self._files:
                self._files.popitem()[1].close()
        finally:
            self._lock.release()

    def _open(self, form: str) -> RotatedLines | EventFile:
        folder = self._log_dir
        if form == "tensorboard":
            return EventFile(folder / self._stem)
        if form == "jsonl":
            return RotatedLines(folder / f"{self._stem}.jsonl")
        header = ",".join(self._columns)
        names = chain([f"{self._stem}.csv"], (f"{self._stem}-{number}.csv" for number in count(2)))
        # Check the header before opening: opening cuts off an incomplete last line, even of somebody else's file.
        path = next(folder / name for name in names if _header(folder / name) in (b"", header.encode()))
        return RotatedLines(path, header)

    def _line(self, row: Mapping[str, Any], form: str) -> str:
        if form == "jsonl":
            return json.dumps({name: row[name] for name in self._columns})
        text = io.StringIO()
        csv.writer(text, lineterminator="").writerow([_cell(row[name]) for name in self._columns])
        return text.getvalue()

    def _curves(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return {f"{self._name}/{name}": row[name] for name in self._columns if name not in _COORDINATES}

    def _warn(self, path: Path, error: Exception) -> None:
        text = (
            f"Expected to append to {path}. Found: {error}. It is no longer logged to; the training goes on. Free the "
            "disk or choose another log_dir."
        )
        warn_once(f"append {self._log_dir} {type(error).__name__}", text)


class BackgroundRows:
    """A `RowWriter` for the training thread: `write` never blocks on a disk. Takes `RowWriter`'s arguments."""

    def __init__(self, log_dir: Path, name: str, formats: Sequence[str], columns: Sequence[str]):
        writer = self._writer = RowWriter(log_dir, name, formats, columns)

        def write(row_and_step: tuple[Mapping[str, Any], int | None]) -> None:
            row, step = row_and_step
            writer.write(row, step=step)

        self._background = Background(f"{name} log", write, most=_QUEUED_ROWS)

    def write(self, row: Mapping[str, Any], *, step: int | None = None) -> None:
        """Queues a row; does nothing once closed."""
        self._background.put((row, step))

    def close(self) -> None:
        """Waits a few seconds for the queued rows and closes the files."""
        self._background.close()
        self._writer.close()


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
