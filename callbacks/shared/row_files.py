"""Rows of readings, appended to CSV, JSONL and TensorBoard files that survive a kill.

A file that has grown large is followed by a new one.
"""

import csv
import importlib.util
import io
import json
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from tfopt.callbacks.shared.background import Background
from tfopt.callbacks.shared.reading_sources import finite
from tfopt.callbacks.shared.run import COORDINATES
from tfopt.callbacks.shared.workers import worker_rank
from tfopt.errors import UnsupportedError, unknown_name
from tfopt.files import LineAppender, open_alone
from tfopt.warn import warn_once

FORMATS = ("csv", "jsonl", "tensorboard")
# Columns that say when and where a row was taken; they make no curves.
_NO_CURVES = frozenset({*COORDINATES, "window_steps", "window_seconds"})
# About a megabyte of rows: what a training logs while a disk hangs for minutes.
_QUEUED_ROWS = 4096
# One GPU at one reading per second fills ten such files in about a month (CSV) or a week (JSONL).
ROTATE_BYTES = 50 * 2**20
KEPT_FILES = 10

# TensorBoard reads a folder's files in the order of their names, and two may begin in the same second.
_numbers = count()


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
            warn_once(f"company {self._log_dir}", text)
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
        warn_once(f"append {self._log_dir} {type(error).__name__}", text)


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


class RotatedLines:
    """Appends whole lines to a file; past 50 MiB it becomes `NAME.1.EXTENSION`, and a new file begins.

    Older files count up to `NAME.10.EXTENSION`, then the oldest is deleted. A kill at any moment loses no line: files
    are only renamed, and the next process continues with what is there. Each file begins with the header, if any.
    """

    def __init__(self, path: Path, header: str | None = None):
        self.path = path
        self._header = header
        self._open()

    def append(self, line: str) -> None:
        """Appends one line, given without its line break.

        Raises:
            OSError: If the line cannot be written, or the file was deleted or replaced.
        """
        if self._file.size >= ROTATE_BYTES:
            self._file.close()
            _rotate(self.path)
            self._open()
        self._file.append(line)

    def close(self) -> None:
        """Closes the file. A second call does nothing."""
        self._file.close()

    def _open(self) -> None:
        self._file = LineAppender(self.path)
        if self._header is not None and not self._file.size:
            try:
                self._file.append(self._header)
            except OSError:  # the disk is full
                self._file.close()
                raise


def _rotate(path: Path) -> None:
    """Renames a file and the older ones, up to the first free number or the last one kept."""
    older = [path.with_name(f"{path.stem}.{number}{path.suffix}") for number in range(1, KEPT_FILES + 1)]
    free = next((place for place, other in enumerate(older) if not other.exists()), KEPT_FILES - 1)
    # Oldest first, so that each target name is free, except the last, which is to be replaced.
    for place in range(free, 0, -1):
        os.replace(older[place - 1], older[place])
    os.replace(path, older[0])


class EventFile:
    """Appends points of curves to an event file in a folder, which TensorBoard shows as a run.

    Each training has its own file there, as TensorBoard expects. A file past 50 MiB is followed by the next one, and
    the last eleven are kept.

    TensorBoard's own writer does not do: its queue blocks in `put` and `close` while the disk hangs, and its thread
    dies with a traceback when the disk is full.

    Raises:
        BlockingIOError: If another `EventFile` has the folder: TensorBoard follows only a folder's newest file.
        OSError: If the folder or file cannot be made.
    """

    def __init__(self, folder: Path):
        # These imports take some 60 ms.
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary, self._records = Event, Summary, RecordWriter
        self._folder = folder
        self._written: deque[Path] = deque()
        folder.mkdir(parents=True, exist_ok=True)
        self._held = open_alone(folder, os.O_RDONLY)
        try:
            self._open()
        except OSError:
            os.close(self._held)
            raise

    def append(self, step: int, time_seconds: float, curves: Mapping[str, float]) -> None:
        """Appends a point to each curve, given as value by tag.

        Raises:
            OSError: If the points cannot be written whole. The file then ends with the event before them.
        """
        if self.path.stat().st_size >= ROTATE_BYTES:
            self._file.close()
            self._open()
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in curves.items()]
        self._append(self._event(wall_time=time_seconds, step=step, summary=self._summary(value=values)))

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
        os.close(self._held)

    def _open(self) -> None:
        now = time.time()
        name = f"events.out.tfevents.{now:010.0f}.{socket.gethostname()}.{os.getpid()}.{next(_numbers):04}"
        self.path = self._folder / name
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115  closed by close()
        try:
            self._append(self._event(wall_time=now, file_version="brain.Event:2"))
        except OSError:
            self._file.close()
            raise
        self._written.append(self.path)
        while len(self._written) > 1 + KEPT_FILES:
            self._written.popleft().unlink(missing_ok=True)

    def _append(self, event: Any) -> None:
        record = io.BytesIO()
        self._records(record).write(event.SerializeToString())
        data = record.getvalue()
        written = self._file.write(data) or 0  # in one call, so that a killed process leaves whole events
        if written < len(data):
            self._file.truncate(self.path.stat().st_size - written)
            raise OSError(f"only {written} of {len(data)} bytes fitted on the disk")
