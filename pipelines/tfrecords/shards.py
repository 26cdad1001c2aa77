"""Writes shards in parallel, into a folder that appears whole or not at all."""

import contextlib
import math
import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from types import TracebackType
from typing import Self

import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.files import lock, sync
from tfopt.hardware import host
from tfopt.pipelines.tfrecords.format import Shard, ends_sha256, file_sha256

# Two default shards, so that one is compressed or hashed while the next one is filled.
_PENDING_BYTES = 256 * 2**20
_SUFFIX = {"": "", "GZIP": ".gz", "ZLIB": ".zz"}


@contextlib.contextmanager
def published(folder: str) -> Iterator[str]:
    """Yields a temporary folder, which is renamed to `folder` if the body ends without an error.

    `folder` may exist if it is empty. The writer holds a lock; what a killed writer left behind is emptied and reused.
    """
    folder = os.path.realpath(folder)
    _expect_room(folder)
    parent, name = os.path.split(folder)
    os.makedirs(parent, exist_ok=True)
    temporary = os.path.join(parent, f".{name}.writing")
    handle = _locked(temporary, folder)
    try:
        _empty(temporary)
        yield temporary
        os.fsync(handle)
        _expect_room(folder)
        os.rename(temporary, folder)
        sync(parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    finally:
        os.close(handle)


class ShardWriters:
    """Writes shards one after the other into a folder, as many at once as there are CPUs.

    `put` and `finish` raise OSError or OpError if a shard could not be written.
    """

    def __init__(self, folder: str, compression: str):
        self._folder, self._compression = folder, compression
        # Threads take shards in order, so the shards that hold the pending bytes are always among those that run.
        self._threads = ThreadPoolExecutor(max(1, math.ceil(host().cpus)))
        self._pending_bytes, self._changed = 0, threading.Condition()
        self._shards: list[Future[Shard]] = []
        self._queue: SimpleQueue[list[bytes] | None] = SimpleQueue()
        self._stopped: BaseException | None = None

    def begin(self) -> None:
        """Ends the current shard and begins the next one."""
        self._queue.put(None)
        self._queue = SimpleQueue()
        name = f"records-{len(self._shards):05}.tfrecord{_SUFFIX[self._compression]}"
        self._shards.append(self._threads.submit(self._write, name, self._queue))

    def put(self, records: list[bytes]) -> None:
        """Hands records to the current shard; waits while too many bytes are pending."""
        size_bytes = _size_bytes(records)
        with self._changed:
            # A single piece may exceed the limit.
            self._changed.wait_for(
                lambda: self._stopped or not self._pending_bytes or self._pending_bytes + size_bytes <= _PENDING_BYTES
            )
            self._pending_bytes += size_bytes
        if self._stopped is not None:
            raise self._stopped
        self._queue.put(records)

    def finish(self) -> tuple[Shard, ...]:
        """Waits until all shards are on disk; returns them in order."""
        self._queue.put(None)
        return tuple(shard.result() for shard in self._shards)

    def _write(self, name: str, queue: "SimpleQueue[list[bytes] | None]") -> Shard:
        path, count = os.path.join(self._folder, name), 0
        try:
            with tf.io.TFRecordWriter(path, self._compression) as file:
                for records in iter(queue.get, None):
                    if self._stopped is not None:
                        raise self._stopped
                    for record in records:
                        file.write(record)
                    count += len(records)
                    with self._changed:
                        self._pending_bytes -= _size_bytes(records)
                        self._changed.notify()
            sync(path)
            return Shard(name, count, os.path.getsize(path), file_sha256(path), ends_sha256(path))
        except BaseException as error:
            self._stop(error)
            raise

    def _stop(self, error: BaseException) -> None:
        with self._changed:
            self._stopped = self._stopped or error
            self._changed.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None:
            self._stop(error)
        self._queue.put(None)
        self._threads.shutdown(cancel_futures=True)


def _size_bytes(records: list[bytes]) -> int:
    return sum(map(len, records))


def _expect_room(folder: str) -> None:
    if os.path.isdir(folder) and not os.listdir(folder):
        return
    if os.path.lexists(folder):
        raise PipelineError(
            f"Expected a new or empty folder, to write records into. Found something at {folder!r}. Remove it, or "
            "write to another folder."
        )


def _locked(temporary: str, folder: str) -> int:
    """Makes the temporary folder if need be; returns a handle that holds its lock."""
    while True:
        os.makedirs(temporary, exist_ok=True)
        try:
            handle = lock(temporary, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # published or removed by its writer just now
            continue
        if handle is None:
            raise PipelineError(
                f"Expected to be the only writer of {folder!r}. Another process is writing it now. Wait for it, or "
                "write to another folder."
            )
        return handle


def _empty(folder: str) -> None:
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)
