"""Writes files that stay whole through a kill or a full disk."""

import errno
import fcntl
import os
import secrets
from contextlib import ExitStack, suppress
from pathlib import Path

# What flock says on file systems that cannot lock; EBADF: NFS cannot lock what is open for reading only.
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF)


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
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    # Not tempfile: its files have mode 0600, and the umask, needed to widen that, can be read only by setting it.
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
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


def open_alone(path: str | os.PathLike[str], flags: int) -> int:
    """Opens a file or folder for its only writer: a second one, of any process, is refused until the first closes it.

    File systems without locks refuse nobody.

    Raises:
        BlockingIOError: If it has a writer.
        OSError: If it cannot be opened.
    """
    try:
        handle = lock(path, flags)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return os.open(path, flags, 0o666)
    if handle is None:
        raise BlockingIOError(errno.EAGAIN, "another process, or another callback of this one, writes to it", str(path))
    return handle


class LineAppender:
    """Appends whole lines to a file, and keeps every complete line if the process is killed.

    Each line goes to the kernel in one call, so that it outlives the process. A file that ends inside a line (its
    writer was killed, or the disk was full) loses that partial line when it is opened.

    Raises:
        BlockingIOError: If another `LineAppender`, of any process, has the file open. (Not on file systems without
            locks.)
        OSError: If the file cannot be opened.

    Example:
        >>> log = LineAppender("log.jsonl")
        >>> log.append('{"step": 1}')
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._handle = open_alone(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.ftruncate(self._handle, _length_in_whole_lines(self._handle))

    @property
    def size(self) -> int:
        """Bytes in the file.

        Raises:
            FileNotFoundError: If the file is no longer there under its name: writing to a deleted file raises nothing.
        """
        now = os.fstat(self._handle)
        if not os.path.samestat(now, os.stat(self.path)):
            raise FileNotFoundError(errno.ENOENT, "it was replaced by another file", str(self.path))
        return now.st_size

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
