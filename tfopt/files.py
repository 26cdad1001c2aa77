"""Writes files that stay whole through a kill or a full disk."""

import fcntl
import os
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path


def write_atomic(path: str | os.PathLike[str], text: str) -> None:
    """Writes `text` to `path` so that a reader finds the old file or the new one, never a part.

    Args:
        path: The file. Its folder is created if needed.
        text: Written as UTF-8.

    Raises:
        OSError: If the folder or file cannot be written. The old file is kept.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def sync(path: str | os.PathLike[str]) -> None:
    """Brings a file, or the entries of a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def lock(path: str | os.PathLike[str], flags: int) -> int | None:
    """Opens a file or folder and locks it until the handle is closed; returns None if another process holds it."""
    while True:
        handle = os.open(path, flags, 0o666)
        with ExitStack() as unlocked:
            unlocked.callback(os.close, handle)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return None
            # The previous holder may have removed it meanwhile: this lock would then keep nobody out.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.stat(path), os.fstat(handle)):
                    unlocked.pop_all()
                    return handle


def _umask() -> int:
    """The process's umask, which can be read only by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


class LineAppender:
    """Appends whole lines to a file, and keeps every complete line if the process is killed.

    Each line goes to the kernel in one call, so that it outlives the process. A file that ends inside a line (its
    writer was killed, or the disk was full) loses that partial line when it is opened. Only one process may write to a
    file at a time.

    Example:
        >>> log = LineAppender("log.jsonl")
        >>> log.append('{"step": 1}')
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        os.ftruncate(self._handle, _length_in_whole_lines(self._handle))

    @property
    def empty(self) -> bool:
        """Whether the file holds no line yet."""
        return os.fstat(self._handle).st_size == 0

    def append(self, line: str) -> None:
        """Appends one line, given without its line break.

        Raises:
            OSError: If the line cannot be written whole. The file then ends with the previous line.
        """
        data = (line + "\n").encode()
        before = os.fstat(self._handle).st_size
        try:
            written = os.write(self._handle, data)
            if written < len(data):
                raise OSError(f"only {written} of {len(data)} bytes fit on the disk")
        except OSError:
            os.ftruncate(self._handle, before)
            raise

    def close(self) -> None:
        """Closes the file. A second call does nothing."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def _length_in_whole_lines(handle: int) -> int:
    """The file's length up to and including its last line break."""
    end = os.fstat(handle).st_size
    while end:
        start = max(0, end - 65536)
        at = os.pread(handle, end - start, start).rfind(b"\n")
        if at >= 0:
            return start + at + 1
        end = start
    return 0
