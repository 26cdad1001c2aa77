"""Remote files: what a URL stands for, and their bytes, asked for again when a network or a server fails."""

import random
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Literal, TypeVar
from urllib.parse import unquote

from tfopt.errors import PipelineError, summarize_error
from tfopt.hardware.host_limits import MIB

AT_ONCE = 64  # requests; up to as many pieces are in memory
_PIECE = 8 * MIB  # bytes that one request asks for
_ATTEMPTS = 8  # of each request, over about a minute
_PAUSE = 0.5  # seconds before the second, and twice as long before each further one
_STALLED = 120  # seconds after which a request has failed
# What file systems say of a file's version, beside its size. The times are the last resort.
_VERSIONS = (
    *("ETag", "etag", "md5Hash", "Content-MD5", "content_md5", "generation"),
    *("mtime", "LastModified", "last_modified", "Last-Modified", "updated", "created"),
)
_LASTING = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)  # errors not worth another try
_PASSING = (408, 425, 429)  # HTTP's refusals that are
_NO_FILE = re.compile("[?#]|/[.][.]/|/(mailto|javascript):")  # a link of a web server's listing, such as to sort it
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file and its state when it was listed."""

    files: Any  # its file system
    path: str  # there
    base: str  # the URL of the folder that it lies in, or that was asked for
    name: str  # its path from there
    size: int | None
    version: str | None

    @property
    def stamp(self) -> list[Any]:
        """What tells it from another version."""
        return [self.name, self.size, self.version]

    @property
    def starts(self) -> range:
        """Where its pieces start; a file of unknown size is one piece."""
        return range(0, 1 if self.size is None else self.size, _PIECE)

    def read(self, start: int, stop: threading.Event) -> bytes:
        """Returns the piece that starts there, all of it."""
        if self.size is None:
            return _persistently(self.path, lambda: _called(self.files, self.path, None, None), stop)
        end = min(start + _PIECE, self.size)

        def attempt() -> bytes:
            # One byte more than there should be shows that the file has grown.
            data = _called(self.files, self.path, start, end + (end == self.size))
            if len(data) > end - start:
                raise PipelineError(
                    f"Expected {end - start:,} bytes of {self.path!r}. Found {len(data):,}: its server does not serve "
                    "parts of files, or the file has changed. Fetch it again, or put it on another server."
                )
            if len(data) < end - start:
                raise OSError(f"only {len(data):,} of {end - start:,} bytes came")
            return data

        return _persistently(self.path, attempt, stop)

    def expect_unchanged(self) -> None:
        """Refuses a file that changed since it was listed."""
        if _state(self.files, self.path, {}) != (self.size, self.version):
            raise PipelineError(
                f"Expected {self.path!r} to stay as it is. It changed while it was fetched. Fetch it again."
            )


def listed(url: str) -> tuple[Literal["file", "glob", "folder"], list[RemoteFile]]:
    """Returns what a URL is that of, and the files that it stands for."""
    files, path = _file_system(url)
    files.invalidate_cache()
    bare, _ = _without_query(files, path)
    signs = [bare.index(sign) for sign in "*[" if sign in bare]  # a "?" begins the query of a URL
    if signs:
        from fsspec.utils import glob_translate

        base, is_folder = bare[: min(signs)].rpartition("/")[0], False
        depth, matches = bare[len(base) :].count("/"), re.compile(glob_translate(path)).match
        found = _below(files, base, None if "**" in bare else depth)
        found = {name: entry for name, entry in found.items() if matches(name)}
    else:
        entry = _info(files, path)
        is_folder = entry["type"] == "directory" or url.endswith("/")  # a web server does not tell
        base = bare.rstrip("/") if is_folder else bare.rpartition("/")[0]
        found = _below(files, path) if is_folder else {path: entry}
    if not found:
        raise PipelineError(f"Expected files at {url!r}. Found none. Check the URL.")
    with ThreadPoolExecutor(AT_ONCE) as threads:
        remote = list(threads.map(lambda name: _remote(files, base, name, found[name]), sorted(found)))
    return "glob" if signs else "folder" if is_folder else "file", remote


def _file_system(url: str) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise PipelineError(
            "Expected fsspec to be installed, which fetches files. Found: it is not. Run: pip install 'tfopt[remote]'"
        ) from error
    try:
        found: tuple[Any, str] = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise PipelineError(f"Expected a URL that fsspec can open. Found {url!r}: {summarize_error(error)}.") from error
    return found


def _below(files: Any, folder: str, depth: int | None = None) -> dict[str, Any]:
    """Returns the files below a folder, or so many levels of them, by their paths."""
    from fsspec.asyn import AsyncFileSystem
    from fsspec.spec import AbstractFileSystem

    stock = AsyncFileSystem._find if files.async_impl else AbstractFileSystem.find
    if depth is None and getattr(type(files), stock.__name__) is not stock:  # an object store lists all at once
        found = _persistently(folder, lambda: files.find(folder, detail=True))
        return {name: entry for name, entry in found.items() if entry["type"] != "directory"}
    # The stock way leaves out the folders that it failed to list.
    found, folders, seen = {}, [folder], {folder.rstrip("/")}
    with ThreadPoolExecutor(AT_ONCE) as threads:
        while folders and depth != 0:
            level = threads.map(lambda some: _persistently(some, lambda: files.ls(some, detail=True)), folders)
            folders, depth = [], None if depth is None else depth - 1
            for entry in [entry for some in level for entry in some]:
                name = entry["name"].replace("/./", "/") if _is_web(files) else entry["name"]
                if name.rstrip("/") in seen or (_is_web(files) and _NO_FILE.search(name)):
                    continue
                seen.add(name.rstrip("/"))
                if entry["type"] == "directory":
                    folders.append(name)
                else:
                    found[name] = entry
    return found


def _remote(files: Any, base: str, path: str, entry: dict[str, Any]) -> RemoteFile:
    bare, query = _without_query(files, path)
    name = bare.removeprefix(base)
    name = str(PurePosixPath((unquote(name) if _is_web(files) else name).lstrip("/")))
    if name == "." or ".." in name.split("/"):
        raise PipelineError(f"Expected names of files that a disk can hold. Found {path!r}. Rename the file.")
    return RemoteFile(files, path, files.unstrip_protocol(base) + query, name, *_state(files, path, entry))


def _state(files: Any, path: str, entry: dict[str, Any]) -> tuple[int | None, str | None]:
    """Returns the size and the version of a file, of which the listing said this."""
    # A web server lists names alone, and of a link it is not said what it leads to.
    if entry.get("type") != "file" or entry.get("size") is None or not any(entry.get(key) for key in _VERSIONS):
        entry = _info(files, path)
    if entry["type"] != "file":
        raise PipelineError(
            f"Expected files and folders. Found {path!r}, a link to a folder, or a device. Replace or remove it."
        )
    return entry.get("size"), next((str(entry[key]) for key in _VERSIONS if entry.get(key)), None)


def _info(files: Any, path: str) -> dict[str, Any]:
    """Returns what a file system says of a path."""

    def attempt() -> dict[str, Any]:
        try:
            found: dict[str, Any] = files.info(path)
        except FileNotFoundError as error:
            # What fsspec says of every failure of a web server.
            if error.__cause__ is None or getattr(error.__cause__, "status", None) in (404, 410):
                raise
            raise error.__cause__ from None
        return found

    return _persistently(path, attempt)


def _is_web(files: Any) -> bool:
    return "http" in files.protocol


def _without_query(files: Any, path: str) -> tuple[str, str]:
    """Splits a URL before its query, which is no part of the file's name."""
    bare = re.split("[?#]", path, maxsplit=1)[0] if _is_web(files) else path
    return bare, path[len(bare) :]


def _persistently(path: str, attempt: Callable[[], T], stop: threading.Event | None = None) -> T:
    """Returns what an attempt returns, the first or a later one."""
    for pause in [*(_PAUSE * 2**number for number in range(_ATTEMPTS - 1)), None]:
        try:
            return attempt()
        except _LASTING as error:
            raise PipelineError(
                f"Expected a file at {path!r}. Found: {type(error).__name__}, {summarize_error(error)}. "
                "Check the URL and the credentials."
            ) from error
        except PipelineError:
            raise
        except Exception as error:  # each package has its own
            status = getattr(error, "status", 0)
            refused = 400 <= status < 500 and status not in _PASSING
            if refused or pause is None or (stop is not None and stop.wait(pause * random.uniform(0.5, 1.5))):
                tries = "" if refused else f", in {_ATTEMPTS} tries"
                raise PipelineError(
                    f"Expected to fetch {path!r}. Found{tries}: {summarize_error(error)}. Check the URL, the "
                    "credentials and the network."
                ) from error
            if stop is None:
                time.sleep(pause)
    raise AssertionError


def _called(files: Any, path: str, start: int | None, end: int | None) -> bytes:
    """Returns bytes of a file, unless nothing comes for too long."""
    if not files.async_impl:
        return bytes(files.cat_file(path, start=start, end=end))
    from fsspec.asyn import sync

    return bytes(sync(files.loop, files._cat_file, path, start=start, end=end, timeout=_STALLED))
