"""TensorBoard event files of which a kill leaves whole events."""

import importlib.util
import io
import os
import socket
import time
from collections import deque
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

from tfopt.callbacks.files.rotation import KEPT_FILES, ROTATE_BYTES
from tfopt.errors import UnsupportedError

# TensorBoard takes the files of a folder in the order of their names, and two may be begun in one second.
_numbers = count()


def require_tensorboard() -> None:
    """Raises an UnsupportedError where TensorBoard is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        raise UnsupportedError(
            "Expected TensorBoard for the format 'tensorboard'. Found that it is not installed: TensorFlow does not "
            "bring it. Install it with: pip install 'tfopt[tensorboard]'"
        )


class EventFile:
    """Appends the points of curves to an event file in a folder, which TensorBoard shows as a run.

    Each run of a training has a file of its own there, as TensorBoard expects it. A file that passes 50 MiB is followed
    by the next one; of those, the last eleven are kept.

    TensorBoard's own writer is not used: it hands events to a thread over a queue, whose `put` and `close` wait for
    ever where the disk hangs, and whose thread dies with a traceback where the disk is full.

    Args:
        folder: Made if need be. It should hold nothing else that writes at the same time: TensorBoard looks only at the
            newest file of a folder for news.
    """

    def __init__(self, folder: Path):
        # Takes some 60 ms, which only those pay who ask for it.
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary, self._records = Event, Summary, RecordWriter
        self._folder = folder
        self._written: deque[Path] = deque()
        self._open()

    def append(self, step: int, time_seconds: float, curves: Mapping[str, float]) -> None:
        """Appends a point to each curve.

        Args:
            step: The training step at which they stand.
            time_seconds: Wall clock, seconds since 1970.
            curves: Value by tag.

        Raises:
            OSError: They could not be written whole. The file then ends with the event before them.
        """
        if self.path.stat().st_size >= ROTATE_BYTES:
            self._file.close()
            self._open()
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in curves.items()]
        self._append(self._event(wall_time=time_seconds, step=step, summary=self._summary(value=values)))

    def close(self) -> None:
        """Closes the file. A second call does nothing."""
        self._file.close()

    def _open(self) -> None:
        now = time.time()
        name = f"events.out.tfevents.{now:010.0f}.{socket.gethostname()}.{os.getpid()}.{next(_numbers):04}"
        self._folder.mkdir(parents=True, exist_ok=True)
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
        # In one call, so that it outlives the process.
        written = self._file.write(data) or 0
        if written < len(data):
            self._file.truncate(self.path.stat().st_size - written)
            raise OSError(f"only {written} of {len(data)} bytes fitted on the disk")
