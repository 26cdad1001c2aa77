"""Rows of readings, written by a thread of their own."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tfopt.callbacks.background import Background
from tfopt.callbacks.files.rows import RowWriter

_WAITING = 4096  # rows, about a megabyte: what a training logs while a disk hangs for minutes


class BackgroundRows:
    """A `RowWriter` for the training thread, which no disk then holds up: `write` returns at once.

    Its arguments are those of `RowWriter`.
    """

    def __init__(self, log_dir: Path, name: str, formats: Sequence[str], fields: Sequence[str]):
        writer = self._writer = RowWriter(log_dir, name, formats, fields)

        def write(row_and_step: tuple[Mapping[str, Any], int | None]) -> None:
            row, step = row_and_step
            writer.write(row, step=step)

        self._background = Background(f"{name} log", write, most=_WAITING)

    def write(self, row: Mapping[str, Any], *, step: int | None = None) -> None:
        """Has a row appended, as by `RowWriter.write`; does nothing once closed."""
        self._background.put((row, step))

    def close(self) -> None:
        """Waits for the rows that are not written yet, though not for ever, and closes the files."""
        self._background.close()
        self._writer.close()
