"""`fetch`: whole local copies of remote files by fsspec, in spite of a network and servers that fail."""

import asyncio
import contextlib
import errno
import hashlib
import json
import os
import random
import re
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

from rich.console import Console
from rich.progress import DownloadColumn, Progress, TransferSpeedColumn

from tfopt.errors import PipelineError, summarize_error
from tfopt.files import LineAppender, sync
from tfopt.hardware.host_limits import MIB
from tfopt.pipelines.shared.paths import kept
from tfopt.warn import warn_once

_AT_ONCE = 128  # files: fsspec's own number where 1,024 files may be open
_PAUSES = tuple(0.5 * 2**number for number in range(7))  # seconds before a request is repeated
_STALLED = 120  # seconds without a byte after which a web server's answer has failed
_LARGE = 8 * MIB  # bytes of a file that may change while it is fetched
# What file systems say of a file's version, beside its size. The times are the last resort.
_VERSIONS = (
    *("ETag", "etag", "md5Hash", "Content-MD5", "content_md5", "generation"),
    *("mtime", "LastModified", "last_modified", "Last-Modified", "updated", "created"),
)
_LASTING = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)  # errors not worth another try
_PASSING = (408, 425, 429)  # HTTP's refusals that are
_NO_FILE = re.compile("[?#]|/[.][.]/|/(mailto|javascript):")  # a link of a web server's listing, such as to sort it


@dataclass(slots=True)
class _File:
    files: Any  # its file system
    path: str  # there
    base: str  # the URL of the folder that it lies in, or that was asked for
    name: str  # its path from there
    state: list[Any] | None  # its size and version; None if the listing does not tell


def fetch(paths: str | Sequence[str], folder: str | os.PathLike[str] | None = None) -> Any:
    """Copies remote files to a local disk, once, and returns the paths of the copies, for any source.

    Use it for data in object stores, on web servers and on network disks. It lists once, copies up to 128 files at a
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
    found = _run(_each(lambda asked: _listed(*asked), [(url, *_file_system(url)) for url in urls]))
    kind, _ = found[0]
    if not single and any(each == "folder" for each, _ in found):
        raise PipelineError(
            f"Expected URLs of files in a list. Found a folder among {urls}. Fetch the folder in a call of its own."
        )
    files = [file for _, some in found for file in some]
    root = files[0].base.removeprefix("file://")
    if kind == "folder" and target.is_relative_to(root):
        raise PipelineError(
            f"Expected `folder` outside of the folder to fetch, {root!r}. Found {str(target)!r}. Pass another one."
        )
    by_base: dict[str, dict[str, _File]] = {}
    for file in files:
        by_base.setdefault(file.base, {})[file.name] = file
    places = {base: target / hashlib.sha256(base.encode()).hexdigest()[:16] for base in by_base}
    for file in files:  # before any is fetched
        _expect_own_place(file, by_base[file.base])
    for base, some in by_base.items():
        try:
            _bring(some, places[base], all_there_is=kind == "folder")
        except OSError as error:
            raise PipelineError(
                f"Expected to write to {target}. Found: {summarize_error(error)}. Make room there, or pass another "
                "`folder`."
            ) from error
    if kind == "folder":
        return str(places[files[0].base] / "data")
    copies = [str(places[file.base] / "data" / file.name) for file in files]
    return copies[0] if single and kind == "file" else copies


def _file_system(url: str) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs

        files, path = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise PipelineError(
            f"Expected a URL that fsspec can open. Found {url!r}: {summarize_error(error)}. Check the URL, or run "
            "pip install 'tfopt[remote]' and fsspec's package for its protocol."
        ) from error
    files.invalidate_cache()
    return files, path


async def _listed(url: str, files: Any, path: str) -> tuple[str, list[_File]]:
    """Returns whether a URL is that of a "file", a "glob" or a "folder", and the files that it stands for."""
    bare, _ = _without_query(files, path)
    signs = [bare.index(sign) for sign in "*[" if sign in bare]  # a "?" begins the query of a URL
    if signs:
        from fsspec.utils import glob_translate

        kind, base, matches = "glob", bare[: min(signs)].rpartition("/")[0], re.compile(glob_translate(path)).match
        found = await _below(files, base, None if "**" in bare else bare[len(base) :].count("/"))
        found = {name: entry for name, entry in found.items() if matches(name)}
    else:
        # Only the slash tells folders of a web server. Its files are looked at later, if at all.
        entry = {"type": "file"} if _is_web(files) else await _ask(files, "info", path)
        kind = "folder" if entry["type"] == "directory" or url.endswith("/") else "file"
        base = bare.rstrip("/") if kind == "folder" else bare.rpartition("/")[0]
        found = await _below(files, path) if kind == "folder" else {path: entry}
    if not found:
        raise PipelineError(f"Expected files at {url!r}. Found none. Check the URL.")
    return kind, [_file(files, base, name, found[name]) for name in sorted(found)]


async def _below(files: Any, folder: str, depth: int | None = None) -> dict[str, Any]:
    """Returns the files below a folder, or so many levels of them, by their paths."""
    from fsspec.asyn import AsyncFileSystem
    from fsspec.spec import AbstractFileSystem

    stock = AsyncFileSystem._find if files.async_impl else AbstractFileSystem.find
    if depth is None and getattr(type(files), stock.__name__) is not stock:  # an object store lists all at once
        listed = await _ask(files, "find", folder, detail=True)
        return {name: entry for name, entry in listed.items() if entry["type"] != "directory"}
    # The stock way leaves out the folders that it failed to list, whose copies would then be removed.
    found, folders, seen = {}, [folder], {folder.rstrip("/")}
    while folders and depth != 0:
        level = await _each(lambda some: _ask(files, "ls", some, detail=True), folders)
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


def _file(files: Any, base: str, path: str, entry: dict[str, Any]) -> _File:
    bare, query = _without_query(files, path)
    name = bare.removeprefix(base)
    name = str(PurePosixPath((unquote(name) if _is_web(files) else name).lstrip("/")))
    if name == "." or ".." in name.split("/"):
        raise PipelineError(f"Expected names of files that a disk can hold. Found {path!r}. Rename the file.")
    state = _state(entry)
    told = entry["type"] == "file" and None not in state  # of a link it is not said what it leads to
    return _File(files, path, files.unstrip_protocol(base) + query, name, state if told else None)


def _state(entry: Mapping[str, Any]) -> list[Any]:
    """Size and version of a file, each None if that is not told."""
    return [entry.get("size"), next((str(entry[key]) for key in _VERSIONS if entry.get(key)), None)]


def _expect_own_place(file: _File, beside: dict[str, _File]) -> None:
    """Refuses a file that would take the place of another one of its base."""
    for name in (file.name, *map(str, PurePosixPath(file.name).parents)):
        if (other := beside.get(name, file).path) != file.path:
            raise PipelineError(
                f"Expected names of files that a disk can hold together. Found {other!r} and {file.path!r}. Rename one."
            )


def _bring(files: dict[str, _File], place: Path, *, all_there_is: bool) -> None:
    """Fetches what is missing at a place or was changed; with `all_there_is`, removes what is not among `files`."""
    with contextlib.closing(_alone(place)) as stamps:
        have = {stamp["name"]: stamp for stamp in map(json.loads, stamps.path.read_text("utf-8").splitlines())}
        shutil.rmtree(place / "parts", ignore_errors=True)  # what a kill left
        (place / "parts").mkdir()
        if all_there_is:
            _remove_others(place / "data", set(files))
        # A web server lists names alone. To ask for the state of many files takes as long as to fetch small ones.
        asked = files if len(files) <= _AT_ONCE else have
        untold = [file for file in files.values() if file.state is None]
        _run(_each(_look, [file for file in untold if file.name in asked or not _is_web(file.files)]))
        missing = [file for file in files.values() if not _is_whole(file, place, have.get(file.name, {}))]
        sizes = [file.state and file.state[0] for file in missing]
        needed, free = sum(size or 0 for size in sizes), shutil.disk_usage(place).free
        if needed > free:
            raise PipelineError(
                f"Expected room for {needed / MIB:,.0f} MiB at {place}. Found: {free / MIB:,.0f} MiB free. Pass "
                "another `folder`, or fetch fewer files."
            )
        for folder in {os.path.dirname(f"{place}/data/{file.name}") for file in missing}:
            os.makedirs(folder, exist_ok=True)
        try:
            with _progress(len(missing), None if None in sizes else needed) as done:
                _run(_each(lambda file: _copy(file, place, stamps, done), missing))
        finally:
            shutil.rmtree(place / "parts", ignore_errors=True)


def _alone(place: Path) -> LineAppender:
    """Returns what is known of the files at a place, and keeps other processes waiting until that is closed."""
    while True:
        with contextlib.suppress(BlockingIOError):
            return LineAppender(place / "fetched.jsonl")
        warn_once(f"fetched by another {place}", f"Waiting for another process that is fetching files to {place}.")
        time.sleep(0.2)


@contextlib.contextmanager
def _progress(count: int, size: int | None) -> Iterator[Any]:
    """Shows a bar if standard error is a terminal; yields fsspec's callback of all files together."""
    from fsspec.callbacks import Callback

    console = Console(file=sys.stderr)
    columns = (*Progress.get_default_columns(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"fetching {count:,} files", total=size)
        hooks = {} if bar.disable else {"bar": lambda size, value: bar.update(task, completed=value)}
        yield Callback(hooks=hooks)


def _remove_others(folder: Path, names: set[str]) -> None:
    """Removes the files that have none of these names, and the folders that then are empty."""
    for path in sorted(folder.rglob("*"), reverse=True):  # what is in a folder before the folder
        if path.is_dir():
            with contextlib.suppress(OSError):  # not empty
                path.rmdir()
        elif str(path.relative_to(folder)) not in names:
            path.unlink()


async def _look(file: _File) -> None:
    """Asks for a file's state."""
    entry = await _ask(file.files, "info", file.path)
    if entry["type"] != "file":
        raise PipelineError(
            f"Expected files and folders. Found {file.path!r}, a link to a folder, or a device. Replace or remove it."
        )
    file.state = _state(entry)


def _is_whole(file: _File, place: Path, stamp: dict[str, Any]) -> bool:
    """Whether the copy is the one that was fetched of this version. Without a version, it is fetched each time."""
    copy, told = place / "data" / file.name, file.state is not None and file.state[1] is not None
    return told and stamp.get("remote") == file.state and copy.is_file() and stamp["copy"] == _stat(copy)


def _stat(path: str | Path) -> list[int]:
    """What tells a copy from a later one, and from one whose end a power failure took."""
    found = os.stat(path)
    return [found.st_size, found.st_mtime_ns]


async def _copy(file: _File, place: Path, stamps: LineAppender, done: Any) -> None:
    """Fetches a file, which gets its name when it is whole."""
    part = f"{place}/parts/{secrets.token_hex(8)}"
    listed, options = file.state, {"callback": done} if file.files.async_impl else {}
    changed = f"Expected {file.path!r} to stay as it is. It changed while it was fetched. Fetch it again."

    async def note(response: Any) -> None:  # what a web server tells of a file that it begins to send
        size = None if "Content-Encoding" in response.headers else response.content_length
        file.state = listed or _state({"size": size} | {key: response.headers.get(key) for key in _VERSIONS})

    def check() -> list[int]:
        arrived, (size, _) = _stat(part), file.state or (None, None)
        if size is not None and arrived[0] < size:
            raise OSError(f"only {arrived[0]:,} of {size:,} bytes came")
        if size is not None and arrived[0] > size:
            raise PipelineError(changed)
        if not file.files.async_impl:
            done.relative_update(arrived[0])
        return arrived

    if _is_web(file.files):
        from aiohttp import ClientTimeout

        options |= {
            "timeout": ClientTimeout(sock_connect=_STALLED, sock_read=_STALLED),  # not five minutes for a whole file
            "headers": {**file.files.kwargs.get("headers", {}), "Accept-Encoding": "identity"},
            "raise_for_status": note,
        }
    arrived = await _ask(file.files, "get_file", file.path, part, check=check, **options)
    state = file.state
    if arrived[0] > _LARGE:
        file.files.invalidate_cache()
        await _look(file)
        if any(None not in pair and pair[0] != pair[1] for pair in zip(state or (), file.state or (), strict=False)):
            raise PipelineError(changed)
        if not _is_web(file.files):  # written in pieces, of which a power failure may take any
            await asyncio.to_thread(sync, part)
    os.replace(part, f"{place}/data/{file.name}")
    stamps.append(json.dumps({"name": file.name, "remote": state, "copy": arrived}))


def _is_web(files: Any) -> bool:
    return "http" in files.protocol


def _without_query(files: Any, path: str) -> tuple[str, str]:
    """Splits a URL before its query, which is no part of the file's name."""
    bare = re.split("[?#]", path, maxsplit=1)[0] if _is_web(files) else path
    return bare, path[len(bare) :]


async def _ask(
    files: Any, method: str, path: str, *arguments: Any, check: Callable[[], Any] | None = None, **options: Any
) -> Any:
    """Returns what a method of a file system returns, the first time or a later one. OSError: the disk here is full."""
    for pause in (*_PAUSES, None):
        try:
            if files.async_impl:
                found = await getattr(files, f"_{method}")(path, *arguments, **options)
            else:
                found = await asyncio.to_thread(getattr(files, method), path, *arguments, **options)
            return check() if check else found
        except PipelineError:
            raise
        except Exception as error:  # each package has its own
            if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
                raise
            # Of a web server's file fsspec says that it is not found, whatever failed.
            cause = (isinstance(error, FileNotFoundError) and _is_web(files) and error.__cause__) or error
            status = getattr(cause, "status", 0)
            lasting = isinstance(cause, _LASTING) or (400 <= status < 500 and status not in _PASSING)
            if lasting or pause is None:
                tries = "" if lasting else f", in {len(_PAUSES) + 1} tries"
                raise PipelineError(
                    f"Expected a file at {path!r}. Found{tries}: {type(cause).__name__}, {summarize_error(cause)}. "
                    "Check the URL, the credentials and the network."
                ) from cause
        await asyncio.sleep(pause * random.uniform(0.5, 1.5))
    raise AssertionError


async def _each(call: Callable[[Any], Coroutine[Any, Any, Any]], items: Sequence[Any]) -> list[Any]:
    """Calls a function of each item, for so many at once. The first error ends all."""
    found, waiting = [None] * len(items), iter(enumerate(items))

    async def work() -> None:
        for number, item in waiting:
            found[number] = await call(item)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in items[:_AT_ONCE]:
                group.create_task(work())
    except ExceptionGroup as errors:
        first = errors.exceptions[0]
        raise first from first.__cause__
    return found


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    """Runs a coroutine in fsspec's thread, until its end or that of this call, such as by Ctrl-C."""
    from fsspec.asyn import get_loop

    future = asyncio.run_coroutine_threadsafe(work, get_loop())
    try:
        return future.result()
    finally:
        future.cancel()
