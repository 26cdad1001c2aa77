"""Rows of readings, appended to CSV, JSONL and TensorBoard files that a kill leaves whole."""

import csv
import io
import json
import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, count
from numbers import Real
from pathlib import Path
from typing import Any

from tfopt.callbacks.files.event_files import EventFile, require_tensorboard
from tfopt.callbacks.files.ranks import rank
from tfopt.callbacks.files.rotation import RotatedLines
from tfopt.errors import unknown_name
from tfopt.warn import warn_once

FORMATS = ("csv", "jsonl", "tensorboard")
# Columns that say when and where a row was taken: no curves.
_PLACES = frozenset({"time_seconds", "elapsed_seconds", "index", "epoch", "step"})
# A writer that hangs, on a disk that does, holds the lock for ever; so does a fork in the middle of a line.
_CLOSE_SECONDS = 1.0


def check_formats(formats: str | Sequence[str]) -> tuple[str, ...]:
    """Returns the formats, each once.

    Raises:
        ValueError: There is no such format.
        TypeError: No names at all.
        UnsupportedError: "tensorboard", and TensorBoard is not installed.
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
    """Appends each row to one file a format, and never ends a training.

    - "csv" and "jsonl": `LOG_DIR/NAME.csv`, `LOG_DIR/NAME.jsonl`. A CSV file that is there from an earlier run is
      continued if it has the same columns; otherwise a new one is started beside it (`NAME-2.csv`). A file that has
      passed 50 MiB is renamed (`NAME.1.csv`), and a new one begun; ten such are kept.
    - "tensorboard": event files in the folder `LOG_DIR/NAME`, a curve a column.

    Of several workers, as TF_CONFIG tells, each has files of its own: `NAME-worker1.csv`.

    A file that cannot be written (a full disk, a folder that vanished) is given up, with one warning for a cause and
    folder. Rows may be written by one thread while another closes.

    Args:
        log_dir: The folder; made if need be.
        name: The files' name without its ending.
        formats: Among `FORMATS`.
        fields: The columns, in order. A row's value is None where it is unknown.
    """

    def __init__(self, log_dir: Path, name: str, formats: Sequence[str], fields: Sequence[str]):
        self._log_dir, self._name = log_dir, name
        self._stem = rank().file_name(name)
        self._fields = list(fields)
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
            step: Where the row stands on TensorBoard's axis: the training step. None: the row's number.
            curves: What TensorBoard shows, by tag; what is no finite number is left out. None: the row's numbers, as
                `NAME/COLUMN`.
        """
        with self._lock:
            if self._closed:
                return
            self._rows += 1
            for form, file in list(self._files.items()):
                try:
                    if isinstance(file, EventFile):
                        shown = _finite(self._curves(row) if curves is None else curves)
                        file.append(self._rows if step is None else step, row["time_seconds"], shown)
                    else:
                        file.append(self._csv(row) if form == "csv" else self._json(row))
                except OSError as error:
                    self._warn(file.path, error)
                    self._files.pop(form).close()

    def close(self) -> None:
        """Closes the files. A second call does nothing."""
        self._closed = True
        if not self._lock.acquire(timeout=_CLOSE_SECONDS):
            text = f"Expected {self._log_dir} to take a row within {_CLOSE_SECONDS:g} s. Found that it hangs. "
            warn_once(
                f"hung {self._log_dir}", text + "Its last rows are lost, and the training goes on. See to the disk."
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
        header = ",".join(self._fields)
        names = chain([f"{self._stem}.csv"], (f"{self._stem}-{number}.csv" for number in count(2)))
        # Looked at before it is opened: opening cuts off an unfinished line, which another's file may end in.
        path = next(folder / name for name in names if _header(folder / name) in (b"", header.encode()))
        return RotatedLines(path, header)

    def _csv(self, row: Mapping[str, Any]) -> str:
        text = io.StringIO()
        csv.writer(text, lineterminator="").writerow([_cell(row[name]) for name in self._fields])
        return text.getvalue()

    def _json(self, row: Mapping[str, Any]) -> str:
        return json.dumps({name: row[name] for name in self._fields})

    def _curves(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return {f"{self._name}/{name}": row[name] for name in self._fields if name not in _PLACES}

    def _warn(self, path: Path, error: Exception) -> None:
        text = (
            f"Expected to append to {path}. Found: {error}. What cannot be written is no longer logged; the training "
            "goes on. Free the disk or choose another log_dir."
        )
        warn_once(f"append {self._log_dir} {type(error).__name__}", text)


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


def _finite(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if isinstance(value, Real) and math.isfinite(value)}
