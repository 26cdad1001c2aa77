"""`fetch`: whole local copies of remote files, in spite of a network and servers that fail."""

import contextlib
import errno
import hashlib
import itertools
import json
import os
import random
import secrets
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from tfopt.errors import PipelineError, summarize_error
from tfopt.files import LineAppender
from tfopt.hardware.host_limits import MIB
from tfopt.pipelines.shared.paths import kept
from tfopt.warn import warn_once

_PIECE = 16 * MIB  # bytes that one request asks for
_FILES, _REQUESTS = 16, 16  # at once; up to as many pieces are in memory
_ATTEMPTS = 8  # of each request, over about a minute
_PAUSE = 0.5  # seconds before the second, and twice as long before each further one
_STALLED = 120  # seconds after which a request has failed
_PART = ".part"
# What file systems say of a file's version, beside its size. The times are the last resort.
_VERSIONS = (
    *("ETag", "etag", "md5Hash", "Content-MD5", "content_md5", "generation"),
    *("mtime", "LastModified", "last_modified", "Last-Modified", "updated", "created"),
)
_STAMPS = "stamps.jsonl"
_WILD = "*["  # of a glob; a "?" begins the query of a URL
_LASTING = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)  # errors not worth another try
_PASSING = (408, 425, 429)  # HTTP's refusals that are
T = TypeVar("T")


def fetch(paths: str | Sequence[str], folder: str | os.PathLike[str] | None = None) -> Any:
    """Copies remote files to a local disk, once, and returns the paths of the copies, for any source.

    Use it for data in object stores, on web servers and on network disks. It lists once, fetches 16 files at a time,
    and repeats requests that fail, stall or come short. A file appears once it is whole. Later calls fetch what is new
    or has changed, and remove what is gone from a folder. Processes of one machine share the copies: one fetches, and
    the others wait for it.

    Needs fsspec and its package for the protocol: `pip install 'tfopt[remote]' s3fs` for "s3://", `gcsfs` for "gs://",
    `adlfs` for "az://", `aiohttp` for "https://". Credentials are those of these packages, from the environment or
    their files.

    Args:
        paths: The URL of a folder, a file or a glob, or a list of URLs of files.
        folder: Where the copies are kept, preferably a local NVMe disk. Default: `fetched` in tfopt's cache folder
            (`~/.cache/tfopt`).

    Returns:
        The path of the copy if `paths` is the URL of a folder or a file; otherwise a list of paths, in the order given.
        Matches of a glob are sorted.

    Raises:
        TypeError: If `paths` is not a URL or a list of them.
        PipelineError: If fsspec or its package is missing, nothing is found or matches, a file cannot be fetched or
            changes meanwhile, or the disk is too small.

    Example:
        >>> from tfopt.pipelines import build_pipeline, fetch
        >>> build_pipeline(fetch("s3://bucket/photos", folder="/nvme"))  # doctest: +SKIP
        >>> build_pipeline(fetch("gs://bucket/train-*.tfrecord", folder="/nvme"))  # doctest: +SKIP
    """
    single = isinstance(paths, str)
    urls = [paths] if isinstance(paths, str) else paths
    if not isinstance(urls, Sequence) or not urls or not all(isinstance(url, str) for url in urls):
        raise TypeError(f"fetch() expects a URL or a list of URLs. Received: {paths!r}. Pass strings.")
    target = Path(os.path.abspath(folder or kept() / "fetched"))
    with ThreadPoolExecutor(_FILES) as threads:
        listed = list(threads.map(_listed, urls))
    whole = listed[0][0]
    if not single and any(is_folder for is_folder, _ in listed):
        raise PipelineError(
            f"Expected URLs of files in a list. Found a folder among {urls}. Fetch the folder in a call of its own."
        )
    files = [file for _, found in listed for file in found]
    places = {file.base: target / hashlib.sha256(file.base.encode()).hexdigest()[:16] for file in files}
    for base, place in places.items():
        _bring([file for file in files if file.base == base], place, all_there_is=whole)
    copies = [str(places[file.base] / "data" / file.name) for file in files]
    if whole:
        return str(places[files[0].base] / "data")
    return copies[0] if single and not any(sign in paths for sign in _WILD) else copies


@dataclass(frozen=True, slots=True)
class _Remote:
    """A file and its state when it was listed."""

    files: Any  # its file system
    path: str  # there
    base: str  # the URL of the folder that it lies in, or that was asked for
    name: str  # its path from there
    size: int | None
    version: str | None

    @property
    def stamp(self) -> list[Any]:
        return [self.name, self.size, self.version]

    def read(self, start: int, stop: threading.Event) -> bytes:
        """Returns the piece that starts there, all of it."""
        if self.size is None:
            return _persistently(self.path, lambda: _called(self.files, self.path, None, None), stop)
        end = min(start + _PIECE, self.size)

        def attempt() -> bytes:
            data = _called(self.files, self.path, start, end)
            if len(data) > end - start:
                raise PipelineError(
                    f"Expected {end - start:,} bytes of {self.path!r}. Found {len(data):,}: its server does not serve "
                    "parts of files, or the file has changed. Fetch it again, or put it on another server."
                )
            if len(data) < end - start:
                raise OSError(f"only {len(data):,} of {end - start:,} bytes came")
            return data

        return _persistently(self.path, attempt, stop)


def _listed(url: str) -> tuple[bool, list[_Remote]]:
    """Returns whether a URL is that of a folder, and the files that it stands for."""
    files, path = _file_system(url)
    files.invalidate_cache()
    signs = [path.index(sign) for sign in _WILD if sign in path]
    if signs:
        base, is_folder = path[: min(signs)].rpartition("/")[0], False
        found = _persistently(url, lambda: files.glob(path, detail=True))
    else:
        entry = _persistently(url, lambda: files.info(path))
        is_folder = entry["type"] == "directory" or url.endswith("/")  # a web server does not tell
        base = path.rstrip("/") if is_folder else path.rpartition("/")[0]
        found = _persistently(url, lambda: files.find(path, detail=True)) if is_folder else {path: entry}
    names = sorted(name for name, entry in found.items() if entry["type"] == "file")
    if not names:
        raise PipelineError(f"Expected files at {url!r}. Found none. Check the URL.")
    with ThreadPoolExecutor(_FILES) as threads:
        return is_folder, list(threads.map(lambda name: _remote(files, base, name, found[name]), names))


def _remote(files: Any, base: str, path: str, entry: dict[str, Any]) -> _Remote:
    if entry.get("size") is None or not any(entry.get(key) for key in _VERSIONS):
        entry = _persistently(path, lambda: files.info(path))  # a web server lists names alone
    name = path.removeprefix(base).lstrip("/")
    if not name or ".." in name.split("/"):
        raise PipelineError(f"Expected names of files that a disk can hold. Found {path!r}. Rename the file.")
    version = next((str(entry[key]) for key in _VERSIONS if entry.get(key)), None)
    return _Remote(files, path, files.unstrip_protocol(base), name, entry.get("size"), version)


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


def _bring(files: list[_Remote], place: Path, *, all_there_is: bool) -> None:
    """Fetches what is missing at a place or was changed; with `all_there_is`, removes what is not among `files`."""
    data = place / "data"
    with _alone(place) as stamps:
        have = {stamp[0]: stamp for stamp in map(json.loads, stamps.path.read_text("utf-8").splitlines())}
        for left in place.rglob(f".*{_PART}"):
            left.unlink()
        missing = [file for file in dict.fromkeys(files) if not _is_whole(data / file.name, have.get(file.name), file)]
        _expect_room(missing, place)
        for file in _copied(missing, data):
            stamps.append(json.dumps(file.stamp))
        if all_there_is:
            names = {file.name for file in files}
            for path in [path for path in data.rglob("*") if path.is_file()]:
                if str(path.relative_to(data)) not in names:
                    path.unlink()


@contextlib.contextmanager
def _alone(place: Path) -> Iterator[LineAppender]:
    """Waits until no other process fetches to a place, and keeps others waiting; yields what is known of its files."""
    while True:
        try:
            stamps = LineAppender(place / _STAMPS)
            break
        except BlockingIOError:
            warn_once(f"fetched by another {place}", f"Waiting for another process that is fetching files to {place}.")
            time.sleep(0.2)
        except OSError as error:
            raise PipelineError(
                f"Expected a folder to write to at {place}. Found: {summarize_error(error)}. Pass another `folder`."
            ) from error
    try:
        yield stamps
    finally:
        stamps.close()


def _is_whole(path: Path, stamp: list[Any] | None, file: _Remote) -> bool:
    """Whether the copy is the one that was fetched of this version. Without a version, it is fetched each time."""
    if stamp != file.stamp or file.version is None or not path.is_file():
        return False
    return file.size is None or path.stat().st_size == file.size


def _expect_room(files: list[_Remote], place: Path) -> None:
    needed, free = sum(file.size or 0 for file in files), shutil.disk_usage(place).free
    if needed > free:
        raise PipelineError(
            f"Expected room for {needed / MIB:,.0f} MiB at {place}. Found: {free / MIB:,.0f} MiB free. Pass "
            "another `folder`, or fetch fewer files."
        )


def _copied(files: list[_Remote], folder: Path) -> Iterator[_Remote]:
    """Copies files, and yields each that is whole. The first that fails ends it."""
    stop = threading.Event()
    with _progress(files) as advance, ThreadPoolExecutor(_REQUESTS) as requests, ThreadPoolExecutor(_FILES) as threads:

        def copy(file: _Remote) -> None:
            def bring(start: int, handle: int) -> None:
                data = file.read(start, stop)
                if os.pwrite(handle, data, start) < len(data):
                    raise OSError(errno.ENOSPC, "the disk is full")
                advance(len(data))

            with _whole(folder / file.name) as handle:
                starts = range(0, 1 if file.size is None else file.size, _PIECE)
                for _ in requests.map(bring, starts, itertools.repeat(handle)):
                    pass
                if len(starts) > 1:
                    _expect_same(file)

        copies = {threads.submit(copy, file): file for file in files}
        try:
            for done in as_completed(copies):
                done.result()
                yield copies[done]
        finally:
            stop.set()
            threads.shutdown(wait=False, cancel_futures=True)
            requests.shutdown(wait=False, cancel_futures=True)


@contextlib.contextmanager
def _whole(target: Path) -> Iterator[int]:
    """Yields the handle of a file that gets its name when it is whole and on the disk."""
    part = target.with_name(f".{secrets.token_hex(8)}{_PART}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as out:
            yield out.fileno()
            os.fsync(out.fileno())
        os.replace(part, target)
    except OSError as error:
        raise PipelineError(f"Expected to write {target}. Found: {summarize_error(error)}. Make room there.") from error
    finally:
        part.unlink(missing_ok=True)


def _expect_same(file: _Remote) -> None:
    """Refuses a file that changed between the requests for its pieces."""
    now = _remote(file.files, file.path.removesuffix(file.name), file.path, {})
    if now.stamp != file.stamp:
        raise PipelineError(
            f"Expected {file.path!r} to stay as it is. It changed while it was fetched. Fetch it again."
        )


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


@contextlib.contextmanager
def _progress(files: list[_Remote]) -> Iterator[Callable[[int], None]]:
    """Shows a bar if standard error is a terminal; yields the function that advances it."""
    console = Console(file=sys.stderr)
    columns = [
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    ]
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        sizes = [file.size for file in files]
        total = None if None in sizes else sum(size or 0 for size in sizes)
        task = bar.add_task(f"fetching {len(files):,} files", total=total)
        yield lambda size: bar.advance(task, size)
