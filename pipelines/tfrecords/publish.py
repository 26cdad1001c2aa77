"""A folder that appears whole or not at all: it is written beside its place, and published by one rename."""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator

from tfopt.errors import PipelineError


@contextlib.contextmanager
def published(folder: str) -> Iterator[str]:
    """Gives the path of a temporary folder, which becomes `folder` where the body ends without an error.

    The temporary folder is locked as long as its writer lives; one that a killed writer left is emptied and used.

    Args:
        folder: The folder to make. It may exist if it is empty.

    Raises:
        PipelineError: The folder holds something, is a file, or another process is writing it.
    """
    folder = os.path.realpath(folder)
    _expect_room(folder)
    parent, name = os.path.split(folder)
    os.makedirs(parent, exist_ok=True)
    temporary = os.path.join(parent, f".{name}.writing")
    handle = _locked(temporary, folder)
    try:
        try:
            _empty(temporary)
            yield temporary
            os.fsync(handle)
            _expect_room(folder)
            os.rename(temporary, folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        _sync(parent)
    finally:
        os.close(handle)


def _expect_room(folder: str) -> None:
    if os.path.isdir(folder) and not os.listdir(folder):
        return
    if os.path.lexists(folder):
        raise PipelineError(
            f"Expected a new or empty folder, to write records into. Found something at {folder!r}. Remove it, or "
            "write to another folder."
        )


def _locked(temporary: str, folder: str) -> int:
    """Returns the handle of the temporary folder, made if need be, that holds its lock."""
    while True:
        os.makedirs(temporary, exist_ok=True)
        try:
            handle = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # published or removed by its writer just now
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(handle)
            raise PipelineError(
                f"Expected to be the only writer of {folder!r}. Another one is writing it now. Wait for it, or write "
                "to another folder."
            ) from error
        if _is_at(temporary, handle):
            return handle
        os.close(handle)


def _is_at(path: str, handle: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(handle))
    except FileNotFoundError:
        return False


def _empty(folder: str) -> None:
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)


def _sync(folder: str) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
