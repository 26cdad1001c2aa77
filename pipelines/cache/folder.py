"""The folder of all caches: how a cache is written and published, what is in the folder, and what goes first.

FOLDER/KEY/rows, table, index.json     a whole cache
FOLDER/KEY.writing-XXXX/               one being written, or whose writer died
FOLDER/KEY.lock                        locked by the writing process; the system unlocks it when that process dies
"""

import contextlib
import datetime
import errno
import json
import os
import re
import shutil
import tempfile
import time
import weakref
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tfopt import checks
from tfopt.files import lock, sync
from tfopt.pipelines.shared.paths import kept, kept_of_images

FORMAT = 6  # of the files; a new number gives new keys
ROWS, TABLE, INDEX = "rows", "table", "index.json"
_KEY = re.compile("tfopt-[0-9a-f]{64}")
_WRITING, _LOCK = ".writing-", ".lock"
TABLE_ROW = 24  # bytes of an example, in the table and in memory
_CALL_BYTES = 4096
_ALIGNMENT = 64  # bytes (EIGEN_MAX_ALIGN_BYTES)
_SPARE = 0.05  # share of the disk left to others


@dataclass(frozen=True, slots=True)
class WholeCache:
    """A whole cache in a folder of caches."""

    path: Path
    bytes: int
    used_seconds: float  # when it was last used, since 1970


class Lock:
    """Marks a cache as being written by this process. Made by `take`."""

    def __init__(self, path: Path, handle: int):
        self._path = path
        # Unlocks; a second call does nothing. Also called at exit, or when the lock is garbage collected.
        self.release = weakref.finalize(self, _unlock, path, handle)

    @classmethod
    def take(cls, folder: Path, key: str) -> "Lock | None":
        """Locks a cache for writing and removes what killed writers left; returns None if it is locked.

        Raises OSError if the folder cannot be written.
        """
        path = folder / (key + _LOCK)
        folder.mkdir(parents=True, exist_ok=True)
        handle = lock(path, os.O_RDWR | os.O_CREAT)
        if handle is None:
            return None
        taken = cls(path, handle)
        for left in _leftovers(folder, key):
            shutil.rmtree(left, ignore_errors=True)
        return taken


class Writer:
    """Writes a cache, under its lock; a writer that is dropped before publishing removes what it wrote."""

    def __init__(self, folder: Path, key: str, count: int | None):
        self._target = folder / key
        self._path = Path(tempfile.mkdtemp(prefix=key + _WRITING, dir=folder))
        self._file = open(self._path / ROWS, "wb")  # noqa: SIM115  closed by `publish` and `drop`
        self.drop = weakref.finalize(self, _discard, self._file, self._path)
        """Removes what is not published; a second call does nothing."""
        self._table = np.zeros((count or 1024, 3), np.int64)  # of each position: its row's start, end and sum
        self.count = self._end = 0  # examples written, and their bytes

    def write(self, positions: Any, rows: Any, sums: Any) -> None:
        """Writes rows at positions that may have been written before; raises an OSError if it cannot.

        Args:
            positions: int64 (rows,).
            rows: uint8 (rows, bytes), or objects of bytes (rows,).
            sums: What `tf.fingerprint` says of each, uint8 (rows, 8).
        """
        if len(self._table) <= positions.max():
            more = np.zeros((2 * int(positions.max()), 3), np.int64)
            more[: len(self._table)] = self._table
            self._table = more
        positions, places = np.unique(positions, return_index=True)  # a mixture may read a part several times
        new = self._table[positions, 1] == 0
        rows, sums, positions = rows[places[new]], sums[places[new]], positions[new]
        lengths = [rows.shape[1]] * len(rows) if rows.ndim > 1 else list(map(len, rows))
        ends = self._end + np.cumsum(lengths, dtype=np.int64)
        self._file.write(rows.data if rows.ndim > 1 else b"".join(rows))
        self._table[positions] = np.stack([ends - lengths, ends, sums.view(np.int64)[:, 0]], axis=1)
        self.count += len(rows)
        self._end += sum(lengths)

    @property
    def size(self) -> int:
        """Bytes that it takes on disk."""
        return self._end + TABLE_ROW * self.count

    def publish(self, what: str) -> None:
        """Makes the whole cache visible; raises an OSError if it cannot.

        `what` describes the content, for readers of the folder.
        """
        self._file.close()
        table = self._table[: self.count].tobytes()
        (self._path / TABLE).write_bytes(table)  # not synced, as the rows: after a crash, sums reveal what is lost
        sizes = {"format": FORMAT, "count": self.count, "bytes": self.size, "table": zlib.crc32(table)}
        index = sizes | {"checksum": _checksum(self._target, sizes), "what": what, "made": time.time()}
        (self._path / INDEX).write_text(json.dumps(index), encoding="utf-8")
        sync(self._path / INDEX)
        os.chmod(self._path, 0o755)  # others may read it; mkdtemp allows nobody
        _remove_cache(self._target)
        os.rename(self._path, self._target)
        sync(self._target.parent)
        self.drop()


class Reader:
    """Reads the rows of a whole cache, which may be removed meanwhile."""

    def __init__(self, path: Path, index: dict[str, Any]):
        """Raises an OSError if the cache is gone, and a ValueError if its table is damaged."""
        table = (path / TABLE).read_bytes()
        if zlib.crc32(table) != index["table"]:
            raise ValueError("the table of its rows is damaged")
        self.index = index
        self._table = np.frombuffer(table, np.int64).reshape(-1, 3)
        self._file = os.open(path / ROWS, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)

    def read(self, size: int | None, positions: Any) -> tuple[Any, Any]:
        """Returns the rows at positions, and their sums; raises an OSError if it cannot read them.

        Args:
            size: Bytes of a row; None if they differ.
            positions: int64 (rows,).

        Returns:
            uint8 (rows, size), or objects of bytes (rows,); and uint8 (rows, 8).
        """
        starts, ends, sums = self._table[positions].T
        first, span = starts.min(), ends.max() - starts.min()
        # A call takes as long as it takes to copy some kilobytes.
        together = span <= max(_CALL_BYTES * len(starts), 2 * (ends - starts).sum())
        block = self._at(first, span) if together else b""
        if size is not None and together:
            rows = np.frombuffer(block, np.uint8).reshape(-1, size)[(starts - first) // size]
        elif size is not None:
            # Aligned as TensorFlow's own tensors are, which then takes it without a copy.
            room = np.empty(len(starts) * size + _ALIGNMENT, np.uint8)
            begin = -room.ctypes.data % _ALIGNMENT
            rows = room[begin : begin + len(starts) * size].reshape(-1, size)
            for row, start in zip(rows, starts.tolist(), strict=True):
                if os.preadv(self._file, [row.data], start) < size:
                    raise OSError("it is cut")
        else:
            places = zip(starts.tolist(), ends.tolist(), strict=True)
            rows = np.empty(len(starts), object)
            rows[:] = [
                block[start - first : end - first] if together else self._at(start, end - start)
                for start, end in places
            ]
        return rows, np.ascontiguousarray(sums).view(np.uint8).reshape(-1, 8)

    def _at(self, start: int, size: int) -> bytes:
        found = os.pread(self._file, size, start)
        if len(found) < size:
            raise OSError("it is cut")
        return found


def default_folder() -> Path:
    """Returns the folder for cache="auto": `tfopt/pipelines` in XDG_CACHE_HOME, by default ~/.cache."""
    return kept() / "pipelines"


def clear_cache(
    folder: str | os.PathLike[str] | None = None,
    *,
    older_than: datetime.timedelta | None = None,
    keep_gib: float | None = None,
) -> int:
    """Removes caches that pipelines have written, the least recently used first, and what killed writers left.

    A pipeline that uses one of them continues: it reads its source again and rewrites the cache. Caches being written
    stay.

    Args:
        folder: The folder that was passed as `cache`. Default: the one cache="auto" uses, and, unless `keep_gib` is
            given, what plans have kept of image files.
        older_than: Remove only caches unused for this long.
        keep_gib: Remove only as many as it takes for the rest to fit into this size in GiB.

    Returns:
        The bytes freed.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If `older_than` or `keep_gib` is negative, or `folder` is a file.

    Example:
        >>> import datetime
        >>> clear_cache("/tmp/no-such-folder", older_than=datetime.timedelta(days=30))
        0
    """
    remedy = "Pass what was passed as `cache`."
    if folder == "":  # as a path it would be the current folder
        raise TypeError(f"Expected the path of a folder. Received: ''. {remedy}")
    where = default_folder() if folder is None else checks.folder("folder", folder, remedy).expanduser()
    if keep_gib is not None and keep_gib != float("inf"):
        checks.number("keep_gib", keep_gib, "Pass GiB, such as 100.", least=0)
    latest = float("inf")
    if older_than is not None:
        if not isinstance(older_than, datetime.timedelta):
            raise TypeError(
                f"Expected a datetime.timedelta for `older_than`. Received: {older_than!r}. Pass "
                "datetime.timedelta(days=30)."
            )
        seconds = checks.number("older_than", older_than.total_seconds(), "Leave it out to remove all.", least=0)
        latest = time.time() - seconds
    whole = list(whole_caches(where))
    caches = [cache for cache in whole if cache.used_seconds <= latest]
    excess = None if keep_gib is None else sum(cache.bytes for cache in whole) - keep_gib * 2**30
    freed = _remove(caches, excess) + _remove_leftovers(where)
    return freed + (_remove_files(kept_of_images(), latest) if folder is None and keep_gib is None else 0)


def whole_caches(folder: Path) -> Iterator[WholeCache]:
    """Yields the whole caches in a folder."""
    for path in sorted(folder.glob("*")):
        # The folder may hold other things: only what bears the name of a cache is one.
        index = read_index(path) if _KEY.fullmatch(path.name) else None
        if index is not None:
            try:
                yield WholeCache(path, index["bytes"], (path / INDEX).stat().st_mtime)
            except FileNotFoundError:  # another process clears
                continue


def free_bytes(folder: Path) -> int:
    """Returns the bytes of its disk that caches in this folder, which may not exist yet, may still take."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    usage = shutil.disk_usage(there)
    return max(0, usage.free - int(_SPARE * usage.total))


def make_room(folder: Path, key: str, needed_bytes: int | None, limit_bytes: int | None) -> None:
    """Removes the least recently used caches until the one to be written fits under the limit of all together.

    Raises OSError if it cannot fit, whatever is removed.
    """
    needed = needed_bytes or 0
    if limit_bytes is not None:
        if needed > limit_bytes:
            raise OSError(errno.EFBIG, f"its {needed:,} bytes exceed the limit of {limit_bytes:,}")
        others = [cache for cache in whole_caches(folder) if cache.path.name != key]
        _remove(others, sum(cache.bytes for cache in others) + needed - limit_bytes)
    if needed > free_bytes(folder):
        raise OSError(errno.ENOSPC, f"its {needed:,} bytes do not fit on the disk, which has {free_bytes(folder):,}")


def read_index(path: Path) -> dict[str, Any] | None:
    """Returns the index of a cache, or None if it is missing, or a file has the wrong size."""
    try:
        index = json.loads((path / INDEX).read_text(encoding="utf-8"))
        whole = index["checksum"] == _checksum(path, index) and index["format"] == FORMAT
        size = sum((path / name).stat().st_size for name in (ROWS, TABLE))
        return index if whole and size == index["bytes"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _checksum(path: Path, index: dict[str, Any]) -> int:
    """Returns the checksum of what an index says of the records, for the cache of this path."""
    return zlib.crc32(repr([path.name, *(index[name] for name in ("format", "count", "bytes", "table"))]).encode())


def _remove(caches: list[WholeCache], excess: float | None) -> int:
    """Removes the least recently used caches until `excess` bytes are freed; None removes all."""
    freed = 0
    for cache in sorted(caches, key=lambda cache: cache.used_seconds):
        if excess is not None and freed >= excess:
            break
        _remove_cache(cache.path)
        freed += cache.bytes
    return freed


def _remove_files(folder: Path, latest: float) -> int:
    """Removes the files in a folder that were written by then; they are written again when they are missed."""
    freed = 0
    for path in folder.glob("*.json"):
        with contextlib.suppress(OSError):
            status = path.stat()
            if status.st_mtime <= latest:
                path.unlink()
                freed += status.st_size
    return freed


def _remove_leftovers(folder: Path) -> int:
    """Removes what killed writers left, and damaged caches."""
    freed = 0
    for key in {match.group() for path in folder.glob("*") if (match := _KEY.match(path.name))}:
        size = sum(file.stat().st_size for path in _leftovers(folder, key) for file in path.glob("*"))
        lock = Lock.take(folder, key)  # which removes them
        if lock is not None:  # nobody writes it
            freed += size
            lock.release()
    return freed


def _remove_cache(path: Path) -> None:
    """Removes a cache, its index first, so that no reader starts on a part."""
    with contextlib.suppress(OSError):
        (path / INDEX).unlink()
    shutil.rmtree(path, ignore_errors=True)


def _leftovers(folder: Path, key: str) -> list[Path]:
    """Returns what dead writers left, and damaged caches; the holder of the lock may remove them."""
    found = [path for path in folder.glob(key + "*") if path.is_dir()]
    return [path for path in found if path.name != key or read_index(path) is None]


def _discard(file: Any, path: Path) -> None:
    with contextlib.suppress(OSError):
        file.close()
    shutil.rmtree(path, ignore_errors=True)


def _unlock(path: Path, handle: int) -> None:
    with contextlib.suppress(OSError):
        path.unlink()  # before unlocking: afterwards it may be another's
    os.close(handle)
