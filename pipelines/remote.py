"""`fetch`: whole local copies of remote files, in spite of a network and servers that fail."""

import contextlib
import errno
import hashlib
import itertools
import json
import os
import secrets
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path, PurePosixPath
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from tfopt.errors import PipelineError, summarize_error
from tfopt.files import LineAppender
from tfopt.hardware.host_limits import MIB
from tfopt.pipelines.remote_files import AT_ONCE, RemoteFile, listed
from tfopt.pipelines.shared.paths import kept
from tfopt.warn import warn_once

_PART = ".part"
_STAMPS = "stamps.jsonl"


def fetch(paths: str | Sequence[str], folder: str | os.PathLike[str] | None = None) -> Any:
    """Copies remote files to a local disk, once, and returns the paths of the copies, for any source.

    Use it for data in object stores, on web servers and on network disks. It lists once, sends up to 64 requests at a
    time, and repeats requests that fail, stall or are cut short. A file appears once it is whole. Later calls fetch
    what is new or has changed, and remove what is gone from a folder. Processes of one machine share the copies: one
    fetches, and the others wait for it.

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
        PipelineError: If fsspec or its package is missing, nothing is found or matches, a folder cannot be listed, a
            file cannot be fetched or changes meanwhile, two would have the same path, or the disk is too small.

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
    with ThreadPoolExecutor(AT_ONCE) as threads:
        found = list(threads.map(listed, urls))
    kind = found[0][0]
    whole = kind == "folder"
    if not single and any(each == "folder" for each, _ in found):
        raise PipelineError(
            f"Expected URLs of files in a list. Found a folder among {urls}. Fetch the folder in a call of its own."
        )
    files = [file for _, some in found for file in some]
    _expect_places(files, target, whole=whole)
    places = {file.base: target / hashlib.sha256(file.base.encode()).hexdigest()[:16] for file in files}
    for base, place in places.items():
        _bring([file for file in files if file.base == base], place, all_there_is=whole)
    copies = [str(places[file.base] / "data" / file.name) for file in files]
    if whole:
        return str(places[files[0].base] / "data")
    return copies[0] if single and kind == "file" else copies


def _expect_places(files: list[RemoteFile], target: Path, *, whole: bool) -> None:
    """Refuses files of which one would take the place of another, and copies inside the folder that is copied."""
    paths = {(file.base, file.name): file.path for file in files}
    for file in files:
        above = [(file.base, str(folder)) for folder in PurePosixPath(file.name).parents]
        for other in {paths[place] for place in [(file.base, file.name), *above] if place in paths} - {file.path}:
            raise PipelineError(
                f"Expected names of files that a disk can hold together. Found {other!r} and {file.path!r}. Rename one."
            )
    root = files[0].base.removeprefix("file://")
    if whole and target.is_relative_to(root):
        raise PipelineError(
            f"Expected `folder` outside of the folder to fetch, {root!r}. Found {str(target)!r}. Pass another one."
        )


def _bring(files: list[RemoteFile], place: Path, *, all_there_is: bool) -> None:
    """Fetches what is missing at a place or was changed; with `all_there_is`, removes what is not among `files`."""
    data = place / "data"
    with _alone(place) as stamps:
        have = {stamp[0]: stamp for stamp in map(json.loads, stamps.path.read_text("utf-8").splitlines())}
        for left in place.rglob(f".*{_PART}"):
            left.unlink()
        if all_there_is:
            _remove_others(data, {file.name for file in files})
        missing = [file for file in dict.fromkeys(files) if not _is_whole(data / file.name, have.get(file.name), file)]
        _expect_room(missing, place)
        for file in missing:
            if file.name in have:  # what is replaced may stay without a stamp of its own
                stamps.append(json.dumps([file.name, None, None]))
        for file in _copied(missing, data):
            stamps.append(json.dumps(file.stamp))


def _remove_others(folder: Path, names: set[str]) -> None:
    """Removes the files that have none of these names, and the folders that then are empty."""
    for path in sorted(folder.rglob("*"), reverse=True):  # what is in a folder before the folder
        if path.is_dir() and not path.is_symlink():
            if not any(path.iterdir()):
                path.rmdir()
        elif str(path.relative_to(folder)) not in names:
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


def _is_whole(path: Path, stamp: list[Any] | None, file: RemoteFile) -> bool:
    """Whether the copy is the one that was fetched of this version. Without a version, it is fetched each time."""
    if stamp != file.stamp or file.version is None or not path.is_file():
        return False
    return file.size is None or path.stat().st_size == file.size


def _expect_room(files: list[RemoteFile], place: Path) -> None:
    needed, free = sum(file.size or 0 for file in files), shutil.disk_usage(place).free
    if needed > free:
        raise PipelineError(
            f"Expected room for {needed / MIB:,.0f} MiB at {place}. Found: {free / MIB:,.0f} MiB free. Pass "
            "another `folder`, or fetch fewer files."
        )


def _copied(files: list[RemoteFile], folder: Path) -> Iterator[RemoteFile]:
    """Copies files, and yields each that is whole. The first that fails ends it."""
    stop = threading.Event()
    with _progress(files) as advance, ThreadPoolExecutor(AT_ONCE) as requests, ThreadPoolExecutor(AT_ONCE) as threads:

        def copy(file: RemoteFile) -> None:
            def bring(start: int, handle: int) -> None:
                data = file.read(start, stop)
                if os.pwrite(handle, data, start) < len(data):
                    raise OSError(errno.ENOSPC, "the disk is full")
                advance(len(data))

            with _whole(folder / file.name, durable=len(file.starts) != 1 or file.size is None) as handle:
                for _ in requests.map(bring, file.starts, itertools.repeat(handle)):
                    pass
                if len(file.starts) != 1:
                    file.expect_unchanged()

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
def _whole(target: Path, *, durable: bool) -> Iterator[int]:
    """Yields the handle of a file that gets its name when it is whole."""
    part = target.with_name(f".{secrets.token_hex(8)}{_PART}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as out:
            yield out.fileno()
            # After a power failure the end of a file may be missing, as its size tells; of several pieces, any.
            if durable:
                os.fsync(out.fileno())
        os.replace(part, target)
    except OSError as error:
        raise PipelineError(
            f"Expected to write {target}. Found: {summarize_error(error)}. Make room there, or pass another `folder`."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


@contextlib.contextmanager
def _progress(files: list[RemoteFile]) -> Iterator[Callable[[int], None]]:
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
