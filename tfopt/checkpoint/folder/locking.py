"""The lock that keeps a second training out of a folder of checkpoints."""

import datetime
import errno
import json
import os
import socket
import time
import weakref
from contextlib import suppress
from pathlib import Path

from tfopt.errors import CheckpointError
from tfopt.files import open_alone, sync

# Of a folder that may be entered and not read, or that automounts others: this training has not made it.
_NOT_OURS = (errno.EACCES, errno.EPERM, errno.EINVAL)


class FolderLock:
    """Makes a folder, and keeps it for this training until `release`, or until the lock is dropped.

    Raises CheckpointError if another training has it, OSError if it cannot be made or written.
    """

    def __init__(self, folder: Path):
        self._folder, self._path = folder, folder / "lock"
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._handle = open_alone(self._path, os.O_RDWR | os.O_CREAT)
        except BlockingIOError as error:
            raise CheckpointError(
                f"Expected to be the only training that saves to {os.fspath(folder)!r}. {_holder(self._path)} saves "
                "there now. Wait until it ends, or pass another folder."
            ) from error
        self.release = weakref.finalize(self, os.close, self._handle)
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": now().isoformat(timespec="seconds")}
        with suppress(OSError):  # a full disk: the lock holds without this note
            os.ftruncate(self._handle, 0)
            os.write(self._handle, json.dumps(holder).encode())

    def expect_held(self) -> None:
        """Raises CheckpointError if it was released, OSError if the folder is no longer the one that was locked."""
        if not self.release.alive:
            raise CheckpointError("Expected an open store. This one was closed. Make another one.")
        if not os.path.samestat(os.stat(self._path), os.fstat(self._handle)):
            raise FileNotFoundError("the folder or its lock was replaced")

    def sync_folders(self) -> None:
        """Makes the folder itself outlive a power loss, even if its maker was killed. Raises OSError."""
        sync(self._folder)
        for parent in self._folder.parents:
            try:
                sync(parent)
            except OSError as error:
                if error.errno not in _NOT_OURS:
                    raise


def now() -> datetime.datetime:
    """Returns the time, in UTC."""
    return datetime.datetime.fromtimestamp(time.time(), datetime.UTC)


def _holder(path: Path) -> str:
    """Returns who holds a lock, as its file says."""
    try:
        holder = json.loads(path.read_bytes())
        return f"Process {holder['pid']} on {holder['host']}, since {holder['since']},"
    except (OSError, ValueError, LookupError, TypeError):
        return "Another training"
