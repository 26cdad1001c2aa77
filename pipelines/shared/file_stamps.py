"""What tells the files of a source from others, without reading them."""

import os
import stat
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import tensorflow as tf

from tfopt.errors import PipelineError

_THREADS = 16  # for network file systems, where each answer is waited for
_AT_ONCE = 256  # files a task: handing over a single one costs more than asking the disk


def files(paths: Iterable[str | os.PathLike[str]]) -> list[list[str | int]]:
    """Returns the path, size and time of last change of each file.

    Put it into a fingerprint: a file that is replaced, written again or cut then gives another. It does not see a
    change that leaves size and time as they were.

    Args:
        paths: The files, also remote ones that TensorFlow can open ("gs://…"). A relative path counts as the absolute
            one.

    Returns:
        `[path, size in bytes, time in nanoseconds]` of each, in the order given.

    Raises:
        PipelineError: A file does not exist, is a folder, or cannot be asked.

    Example:
        >>> files(["photos/cat.jpg"])  # doctest: +SKIP
        [['/data/photos/cat.jpg', 51200, 1760000000000000000]]
    """
    names = [os.fspath(path) for path in paths]
    groups = [names[start : start + _AT_ONCE] for start in range(0, len(names), _AT_ONCE)]
    with ThreadPoolExecutor(_THREADS) as threads:
        return [entry for group in threads.map(_entries, groups) for entry in group]


def _entries(paths: list[str]) -> list[list[str | int]]:
    return [_remote(path) if "://" in path else _local(path) for path in paths]


def _local(path: str) -> list[str | int]:
    try:
        found = os.stat(path)
    except OSError as error:
        raise PipelineError(f"Expected a file at {path!r}. Found none: {error.strerror}. Check the path.") from error
    if stat.S_ISDIR(found.st_mode):
        raise _folder(path)
    return [os.path.abspath(path), found.st_size, found.st_mtime_ns]


def _remote(path: str) -> list[str | int]:
    try:
        found = tf.io.gfile.stat(path)
    except tf.errors.OpError as error:
        raise PipelineError(f"Expected a file at {path!r}. Found none: {error.message}. Check the path.") from error
    if found.is_directory:
        raise _folder(path)
    return [path, found.length, found.mtime_nsec]


def _folder(path: str) -> PipelineError:
    return PipelineError(f"Expected a file at {path!r}. Found a folder. Pass the files in it.")
