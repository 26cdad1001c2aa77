"""Writes shards in threads; the caller waits when too many bytes are under way."""

import hashlib
import math
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from types import TracebackType
from typing import Self

import tensorflow as tf

from tfopt.hardware import host
from tfopt.pipelines.tfrecords.index import Shard, ends_sha256

# Enough for two default shards, so that one is compressed or hashed while the next one is filled.
_UNDER_WAY_BYTES = 256 * 2**20
_SUFFIX = {"": "", "GZIP": ".gz", "ZLIB": ".zz"}


class ShardWriters:
    """Writes shards one behind the other into a folder, as many at once as there are CPUs.

    Args:
        folder: Where they go.
        compression: "GZIP", "ZLIB", or "" for none.

    Example:
        >>> with ShardWriters("shards", "") as writers:  # doctest: +SKIP
        ...     writers.begin()
        ...     writers.put([b"one", b"two"])
        ...     shards = writers.finish()
    """

    def __init__(self, folder: str, compression: str):
        self._folder, self._compression = folder, compression
        # Shards begin in their order: those that hold the bytes under way are always among those that run.
        self._threads = ThreadPoolExecutor(max(1, math.ceil(host().cpus)))
        self._under_way = _Budget(_UNDER_WAY_BYTES)
        self._shards: list[Future[Shard]] = []
        self._queue: SimpleQueue[list[bytes] | None] = SimpleQueue()
        self._stopped: BaseException | None = None

    def begin(self) -> None:
        """Ends the shard that was being filled, and begins the next one."""
        self._queue.put(None)
        self._queue = SimpleQueue()
        name = f"records-{len(self._shards):05}.tfrecord{_SUFFIX[self._compression]}"
        self._shards.append(self._threads.submit(self._write, name, self._queue))

    def put(self, records: list[bytes]) -> None:
        """Hands records to the shard that was begun last.

        Raises:
            OSError, tf.errors.OpError: A shard could not be written.
        """
        if not records:
            return
        self._under_way.take(_size_bytes(records))
        if self._stopped is not None:
            raise self._stopped
        self._queue.put(records)

    def finish(self) -> tuple[Shard, ...]:
        """Waits until all shards are on the disk, and returns what they hold.

        Raises:
            OSError, tf.errors.OpError: A shard could not be written.
        """
        self._queue.put(None)
        return tuple(shard.result() for shard in self._shards)

    def _write(self, name: str, queue: "SimpleQueue[list[bytes] | None]") -> Shard:
        path, count = os.path.join(self._folder, name), 0
        try:
            with tf.io.TFRecordWriter(path, self._compression) as file:
                for records in iter(queue.get, None):
                    count += len(records)
                    self._write_records(file, records)
            return Shard(name, count, *_settle(path))
        except BaseException as error:
            self._stop(error)
            raise

    def _write_records(self, file: tf.io.TFRecordWriter, records: list[bytes]) -> None:
        try:
            for record in records:
                if self._stopped is not None:
                    raise self._stopped
                file.write(record)
        finally:
            self._under_way.give_back(_size_bytes(records))

    def _stop(self, error: BaseException) -> None:
        self._stopped = self._stopped or error
        self._under_way.lift()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None:
            self._stop(error)
        self._queue.put(None)
        self._threads.shutdown(cancel_futures=True)


class _Budget:
    """Bytes that may be under way at once; a single piece may exceed them."""

    def __init__(self, limit_bytes: int):
        self._limit_bytes, self._used_bytes, self._lifted = limit_bytes, 0, False
        self._changed = threading.Condition()

    def take(self, size_bytes: int) -> None:
        """Waits until these bytes fit."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._lifted or not self._used_bytes or self._used_bytes + size_bytes <= self._limit_bytes
            )
            self._used_bytes += size_bytes

    def give_back(self, size_bytes: int) -> None:
        """These bytes are written."""
        with self._changed:
            self._used_bytes -= size_bytes
            self._changed.notify()

    def lift(self) -> None:
        """Nobody waits any more: the writing was given up."""
        with self._changed:
            self._lifted = True
            self._changed.notify_all()


def _size_bytes(records: list[bytes]) -> int:
    return sum(map(len, records))


def _settle(path: str) -> tuple[int, str, str]:
    """Brings a file to the disk, and returns its size, its SHA-256, and that of its ends."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return file.tell(), digest, ends_sha256(path)
