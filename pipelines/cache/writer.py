"""Writes one cache apart from what others read, and publishes it by one rename.

FOLDER/KEY/rows.tfrecord, index.json   a whole cache
FOLDER/KEY.writing-XXXX/               one that is being written, or whose writer died
FOLDER/KEY.lock                        locked by the process that writes; the system unlocks it when that one dies
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
import tempfile
import time
import weakref
from pathlib import Path
from typing import Any

import tensorflow as tf

FORMAT = 1  # of the files; another number, another key
ROWS, INDEX = "rows.tfrecord", "index.json"
KEY = re.compile("tfopt-[0-9a-f]{64}")
_WRITING, _LOCK = ".writing-", ".lock"


class Lock:
    """Says that this process writes a cache. Made by `take`.

    Attributes:
        release: Unlocks. A second call does nothing.
    """

    def __init__(self, path: Path, handle: int):
        self._path = path
        self.release = weakref.finalize(self, _unlock, path, handle)  # with the process, or when it is forgotten

    @classmethod
    def take(cls, folder: Path, key: str) -> "Lock | None":
        """Locks a cache for writing, and removes what killed writers have left; None where somebody holds the lock.

        Raises:
            OSError: The folder cannot be written.
        """
        path = folder / (key + _LOCK)
        folder.mkdir(parents=True, exist_ok=True)
        while True:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Whoever held the lock may have removed the file meanwhile: this lock would then keep nobody out.
                if _same_file(handle, path):
                    for left in leftovers(folder, key):
                        shutil.rmtree(left, ignore_errors=True)
                    return cls(path, handle)
            except BlockingIOError:
                os.close(handle)
                return None
            except BaseException:
                os.close(handle)
                raise
            os.close(handle)


class Writer:
    """A cache that is being written, by whoever holds the lock. It is removed where it is forgotten before publishing.

    Args:
        folder: The folder of all caches.
        key: The cache's fingerprint.

    Attributes:
        count: How many records were written.
        size: Their bytes.
    """

    def __init__(self, folder: Path, key: str):
        self._target = folder / key
        self._path = Path(tempfile.mkdtemp(prefix=key + _WRITING, dir=folder))
        self._remove = weakref.finalize(self, shutil.rmtree, self._path, ignore_errors=True)
        self._file = tf.io.TFRecordWriter(str(self._path / ROWS))
        self.count = self.size = 0

    def write(self, record: bytes) -> None:
        """Writes a record.

        Raises:
            OSError: It could not be written.
            tf.errors.OpError: The same.
        """
        self._file.write(record)
        self.count += 1
        self.size += len(record)

    def publish(self, what: str) -> None:
        """Makes the cache visible, whole and on the disk.

        Args:
            what: What is cached, for whoever looks at the folder.

        Raises:
            OSError: It could not be written.
            tf.errors.OpError: The same.
        """
        self._file.close()
        rows = self._path / ROWS
        _sync(rows)
        index = {"format": FORMAT, "count": self.count, "bytes": rows.stat().st_size, "what": what, "made": time.time()}
        (self._path / INDEX).write_text(json.dumps(index), encoding="utf-8")
        _sync(self._path / INDEX)
        os.chmod(self._path, 0o755)  # others may read it; mkdtemp lets nobody
        remove(self._target)
        os.rename(self._path, self._target)
        _sync(self._target.parent)
        self.drop()

    def drop(self) -> None:
        """Removes what is not published. A second call does nothing."""
        with contextlib.suppress(OSError, tf.errors.OpError):
            self._file.close()
        self._remove()


def read_index(path: Path) -> dict[str, Any] | None:
    """Returns the index of a cache; None where it is none, or its file has not the size that it should."""
    try:
        index = json.loads((path / INDEX).read_text(encoding="utf-8"))
        whole = index["format"] == FORMAT and (path / ROWS).stat().st_size == index["bytes"]
        return index if whole and isinstance(index["count"], int) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def remove(path: Path) -> None:
    """Removes a cache: first what makes it one, so that no reader begins with a part."""
    with contextlib.suppress(OSError):
        (path / INDEX).unlink()
    shutil.rmtree(path, ignore_errors=True)


def leftovers(folder: Path, key: str) -> list[Path]:
    """Returns what is no whole cache: left by a writer that died, or damaged. Whoever holds the lock may remove it."""
    found = [path for path in folder.glob(key + "*") if path.is_dir()]
    return [path for path in found if path.name != key or read_index(path) is None]


def _unlock(path: Path, handle: int) -> None:
    with contextlib.suppress(OSError):
        path.unlink()  # before it is unlocked: behind that it may be another's
    os.close(handle)


def _same_file(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
