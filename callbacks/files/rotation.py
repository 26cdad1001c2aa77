"""Files of lines that are followed by new ones when they have grown large."""

import os
from pathlib import Path

from tfopt.files import LineAppender

ROTATE_BYTES = 50 * 2**20
KEPT_FILES = 10


class RotatedLines:
    """Appends whole lines to a file; one that has passed 50 MiB becomes `NAME.1.ENDING`, and a new one is begun.

    Files that were there before count up, to `NAME.10.ENDING` at most; older ones are deleted. A kill at any moment
    loses no line: files are only renamed, and the next process goes on with what is there.

    Args:
        path: The file. It is continued if it is there.
        header: The first line of each file; None: none.
    """

    def __init__(self, path: Path, header: str | None = None):
        self.path = path
        self._header = header
        self._open()

    def append(self, line: str) -> None:
        """Appends one line, without its line break.

        Raises:
            OSError: The line could not be written, or the file has vanished.
        """
        # Asked by name: a file that was deleted could be written to without an error.
        if self.path.stat().st_size >= ROTATE_BYTES:
            self._file.close()
            _make_room(self.path)
            self._open()
        self._file.append(line)

    def close(self) -> None:
        """Closes the file. A second call does nothing."""
        self._file.close()

    def _open(self) -> None:
        self._file = LineAppender(self.path)
        if self._header is not None and self._file.empty:
            try:
                self._file.append(self._header)
            except OSError:  # the disk is full
                self._file.close()
                raise


def _make_room(path: Path) -> None:
    """Renames a file and the older ones, each by one, up to the first number that is free or the last there is."""
    older = [path.with_name(f"{path.stem}.{number}{path.suffix}") for number in range(1, KEPT_FILES + 1)]
    free = next((place for place, other in enumerate(older) if not other.exists()), KEPT_FILES - 1)
    # From the oldest on: each name is free, by then, but for the last, whose file is to go.
    for place in range(free, 0, -1):
        os.replace(older[place - 1], older[place])
    os.replace(path, older[0])
