"""Paths of data: what an argument may be, what TensorFlow can open, and how a changed file is noticed."""

import os
import stat
from collections.abc import Callable, Iterable, KeysView, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import tensorflow as tf

from tfopt.errors import PipelineError

_THREADS = 16  # for network file systems, where each answer is waited for
_CHUNK = 64  # files per task: handing over a single one costs more than asking the disk

Found = TypeVar("Found")


def as_path(what: str, value: Any) -> str:
    """Returns a path that is given as a string or a path object; `what` the caller expects is for the error."""
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(path, str):
        raise TypeError(f"Expected {what}. Received: {type(value).__name__}. Pass a string or a pathlib.Path.")
    return path


def expect_order(what: str, given: Any) -> None:
    """Refuses a set, whose order is another in each process."""
    if isinstance(given, Set) and not isinstance(given, KeysView):  # a dict keeps its order
        raise TypeError(
            f"Expected {what} in an order. Received: a {type(given).__name__}, whose order is another in each process. "
            "Pass sorted(...) of it."
        )


def is_remote(path: str) -> bool:
    """Whether a path is a URL, such as "gs://…"."""
    return "://" in path


def expect_reachable(path: str, *, by_tensorflow: bool = False) -> str:
    """Returns a path on this machine or, with `by_tensorflow`, a URL that TensorFlow can open; refuses other URLs."""
    schemes = tf.io.gfile.get_registered_schemes() if by_tensorflow else ()
    if is_remote(path) and path.partition("://")[0] not in schemes:
        raise PipelineError(
            f"Expected a path on this machine. Found {path!r}. Pass tfopt.pipelines.fetch({path!r}), which copies what "
            "is there to a local disk."
        )
    return path


def opened(path: str) -> Any:
    """Opens a file, remote or not, to read its bytes."""
    return tf.io.gfile.GFile(path, "rb") if is_remote(path) else open(path, "rb")  # the caller closes it


def names_in(folder: str) -> list[str]:
    """Returns the names of what is in a folder, remote or not, sorted."""
    return sorted(tf.io.gfile.listdir(folder) if is_remote(folder) else os.listdir(folder))


def absolute(path: str) -> str:
    """Returns a local path such that it survives `os.chdir`; remote ones stay as they are."""
    return path if is_remote(path) else os.path.abspath(path)


def expect_utf8(path: str) -> str:
    """Returns a path that TensorFlow can open; refuses names that are not UTF-8."""
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise PipelineError(f"Expected file names in UTF-8. Found {path!r}. Rename the file.") from error
    return path


def local_path(path: str) -> str:
    """Returns the absolute path of a file on this machine; refuses URLs and names that are not UTF-8."""
    return absolute(expect_utf8(expect_reachable(path)))


def file_stamps(paths: Iterable[str | os.PathLike[str]]) -> list[list[str | int]]:
    """Returns `[absolute path, size in bytes, time of last change in nanoseconds]` of each file, in the order given.

    For fingerprints: a file that is replaced, rewritten or cut gets another stamp. A change that keeps size and time
    goes unnoticed. Refuses folders, and files that do not exist or cannot be looked at; remote ones that TensorFlow can
    open are looked at too.
    """
    return for_each_path(_stamp, [os.fspath(path) for path in paths])


def for_each_path(look: Callable[[str], Found], paths: Sequence[str]) -> list[Found]:
    """Returns what a function finds of each path, called in several threads."""
    chunks = [paths[start : start + _CHUNK] for start in range(0, len(paths), _CHUNK)]
    with ThreadPoolExecutor(_THREADS) as threads:
        return [found for some in threads.map(lambda chunk: list(map(look, chunk)), chunks) for found in some]


def _stamp(path: str) -> list[str | int]:
    try:
        if is_remote(path):
            found = tf.io.gfile.stat(path)
            is_folder, stamp = found.is_directory, [path, found.length, found.mtime_nsec]
        else:
            status = os.stat(path)
            is_folder = stat.S_ISDIR(status.st_mode)
            stamp = [os.path.abspath(path), status.st_size, status.st_mtime_ns]
    except (OSError, tf.errors.OpError) as error:
        cause = error.strerror if isinstance(error, OSError) else error.message
        raise PipelineError(f"Expected a file at {path!r}. Found none: {cause}. Check the path.") from error
    if is_folder:
        raise PipelineError(f"Expected a file at {path!r}. Found a folder. Pass the files in it.")
    return stamp


def kept() -> Path:
    """Returns the folder of what is kept between runs: `tfopt` in XDG_CACHE_HOME, by default ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "tfopt"


def kept_of_images() -> Path:
    """Returns the folder of what plans found of image files."""
    return kept() / "images"
