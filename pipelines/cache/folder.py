"""The folder of all caches: where it is, how much it holds, and what goes first when room is needed."""

import datetime
import errno
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfopt.pipelines.cache.writer import INDEX, KEY, Lock, leftovers, read_index, remove

_SPARE = 0.05  # of the disk, left to others


@dataclass(frozen=True, slots=True)
class Cache:
    """A whole cache in a folder of caches.

    Attributes:
        path: Its folder.
        bytes: Its size.
        used_seconds: When it was last used, in seconds since 1970.
    """

    path: Path
    bytes: int
    used_seconds: float


def default_folder() -> Path:
    """The folder for cache="auto": `tfopt/pipelines` in XDG_CACHE_HOME, by default in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "tfopt" / "pipelines"


def clear_cache(
    folder: str | os.PathLike[str] | None = None,
    *,
    older_than: datetime.timedelta | None = None,
    keep_gib: float | None = None,
) -> int:
    """Removes caches that pipelines have written, those used least recently first, and what killed writers have left.

    A pipeline that uses one of them goes on: it reads its source again, and writes the cache anew. What is being
    written stays.

    Args:
        folder: The folder that was passed as `cache`. Default: the one that cache="auto" chooses.
        older_than: Only those not used for so long.
        keep_gib: Only as many as it takes to bring all of them down to this size in GiB.

    Returns:
        The bytes that were freed.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: `older_than` or `keep_gib` is negative, or `folder` is a file.

    Example:
        >>> import datetime
        >>> clear_cache("/tmp/no-such-folder", older_than=datetime.timedelta(days=30))
        0
    """
    where = default_folder() if folder is None else _existing(folder)
    if keep_gib is not None and (isinstance(keep_gib, bool) or not isinstance(keep_gib, int | float)):
        raise TypeError(f"Expected a number for `keep_gib`. Received: {keep_gib!r}. Pass GiB, such as 100.")
    if older_than is not None and not isinstance(older_than, datetime.timedelta):
        raise TypeError(
            f"Expected a datetime.timedelta for `older_than`. Received: {older_than!r}. Pass "
            "datetime.timedelta(days=30)."
        )
    seconds = None if older_than is None else older_than.total_seconds()
    for name, value in (("older_than", seconds), ("keep_gib", keep_gib)):
        if value is not None and not value >= 0:
            raise ValueError(f"Expected `{name}` to be at least 0. Received: {value!r}. Leave it out to remove all.")
    latest = float("inf") if seconds is None else time.time() - seconds
    caches = [cache for cache in whole_caches(where) if cache.used_seconds <= latest]
    excess = None if keep_gib is None else sum(cache.bytes for cache in whole_caches(where)) - keep_gib * 2**30
    return _remove(caches, excess) + _remove_leftovers(where)


def _existing(folder: Any) -> Path:
    if not isinstance(folder, str | os.PathLike) or not os.fspath(folder):
        raise TypeError(f"Expected the path of a folder. Received: {folder!r}. Pass what was passed as `cache`.")
    path = Path(folder).expanduser()
    if path.exists() and not path.is_dir():
        raise ValueError(
            f"Expected a folder of caches. {os.fspath(folder)!r} is a file. Pass what was passed as `cache`."
        )
    return path


def whole_caches(folder: Path) -> Iterator[Cache]:
    """Yields the whole caches in a folder."""
    for path in sorted(folder.glob("*")):
        # The folder may be anybody's: only what bears the name of a cache is one.
        index = read_index(path) if KEY.fullmatch(path.name) else None
        if index is not None:
            try:
                yield Cache(path, index["bytes"], (path / INDEX).stat().st_mtime)
            except FileNotFoundError:  # somebody else clears
                continue


def free_bytes(folder: Path) -> int:
    """The bytes that caches in this folder may still take of its disk, whether or not the folder exists yet."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    usage = shutil.disk_usage(there)
    return max(0, usage.free - int(_SPARE * usage.total))


def make_room(folder: Path, key: str, needed_bytes: int | None, limit_bytes: int | None) -> None:
    """Removes the caches used least recently until another one fits under the limit.

    Args:
        folder: The folder of all caches.
        key: The one that is to be written.
        needed_bytes: Its size, None where unknown.
        limit_bytes: What all of them may take together; None for no limit.

    Raises:
        OSError: It cannot fit, whatever is removed.
    """
    needed = needed_bytes or 0
    if limit_bytes is not None:
        if needed > limit_bytes:
            raise OSError(errno.EFBIG, f"its {needed:,} bytes exceed the limit of {limit_bytes:,}")
        others = [cache for cache in whole_caches(folder) if cache.path.name != key]
        _remove(others, sum(cache.bytes for cache in others) + needed - limit_bytes)
    if needed > free_bytes(folder):
        raise OSError(errno.ENOSPC, f"its {needed:,} bytes do not fit on the disk, which has {free_bytes(folder):,}")


def _remove(caches: list[Cache], excess: float | None) -> int:
    """Removes caches, the least recently used first, until `excess` bytes are freed; None removes all."""
    freed = 0
    for cache in sorted(caches, key=lambda cache: cache.used_seconds):
        if excess is not None and freed >= excess:
            break
        remove(cache.path)
        freed += cache.bytes
    return freed


def _remove_leftovers(folder: Path) -> int:
    """Removes what killed writers have left, and damaged caches."""
    freed = 0
    for key in {match.group() for path in folder.glob("*") if (match := KEY.match(path.name))}:
        size = sum(file.stat().st_size for path in leftovers(folder, key) for file in path.glob("*"))
        lock = Lock.take(folder, key)  # which removes them
        if lock is not None:  # it is not being written
            freed += size
            lock.release()
    return freed
