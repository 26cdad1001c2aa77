"""Files that rows are appended to: whole lines, and TensorBoard's events. A large one is followed by a new one."""

import io
import os
import socket
import time
from collections import deque
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

from tfopt.files import LineAppender, open_alone

# One GPU at one reading per second fills ten such files in about a month (CSV) or a week (JSONL).
ROTATE_BYTES = 50 * 2**20
KEPT_FILES = 10

# TensorBoard reads a folder's files in the order of their names, and two may begin in the same second.
_numbers = count()


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
