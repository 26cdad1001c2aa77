"""What each iteration of a cached dataset reads and writes. Nothing here raises: a cache must not end a training."""

import contextlib
import hashlib
import logging
import os
import threading
import weakref
from pathlib import Path

import numpy as np
import tensorflow as tf

from tfopt.pipelines.cache.folder import make_room
from tfopt.pipelines.cache.writer import INDEX, ROWS, Lock, Writer, read_index

_WRITERS = 3  # at a time: one for the epoch, the others for iterations that may be only a look
_FAILURES = (OSError, ValueError, tf.errors.OpError)
_log = logging.getLogger("tfopt")
_guard = threading.RLock()  # one for all: a pipeline takes the lock of another one of its process
_stores: "weakref.WeakSet[Store]" = weakref.WeakSet()  # of this process


class Store:
    """A cache on disk under its key.

    Each iteration of the dataset is a session, known by a number. It reads the file that `begin` gives it, says in
    `end_of_rows` how far that went, and takes the rest from the source. Where there was no file, it also writes; the
    first session that is complete is published.

    Args:
        folder: The folder of all caches.
        key: The fingerprint of what is cached.
        count: The number of examples, None where unknown.
        expected_bytes: About how large the cache will be, None where unknown.
        limit_bytes: What all caches in the folder may take together; None for no limit.
        what: What is cached, for whoever looks at the folder.

    Attributes:
        count: The number of examples, None where unknown.
    """

    def __init__(
        self,
        folder: Path,
        key: str,
        *,
        count: int | None,
        expected_bytes: int | None,
        limit_bytes: int | None,
        what: str,
    ):
        self._folder, self._key, self.count, self._what = folder, key, count, what
        self._expected_bytes, self._limit_bytes = expected_bytes, limit_bytes
        self._sessions = 0
        self._given: dict[int, int] = {}  # how many examples a session's file gave, until it goes on
        self._lock: Lock | None = None
        self._writers: dict[int, Writer] = {}
        self._given_up = self._told = False
        _stores.add(self)

    @property
    def tag(self) -> int:
        """A number that stands in each of its records, and in no other cache's."""
        return int.from_bytes(hashlib.sha256(self._key.encode()).digest()[:7])

    @property
    def path(self) -> Path:
        """The folder of this cache."""
        return self._folder / self._key

    def begin(self) -> tuple[int, list[bytes], int]:
        """Begins a session.

        Returns:
            Its number; the file to read, none where there is no whole cache; and how many examples that holds, or -1.
        """
        with _guard:
            self._sessions += 1
            count = self._whole()
            if count is None:
                return self._sessions, [], -1
            with contextlib.suppress(OSError):
                os.utime(self.path / INDEX)  # the caches used least recently make room first
            return self._sessions, [os.fsencode(self.path / ROWS)], count

    def end_of_rows(self, session: int, position: int) -> bool:
        """Notes how many examples the file of a session gave; returns False."""
        with _guard:
            self._given[session] = position
        return False

    def go_on(self, session: int, held: int) -> tuple[np.int64, bool]:
        """Returns where in the source a session goes on, -1 where nothing is left, and whether it writes.

        Args:
            session: Its number.
            held: How many examples its file holds, -1 where there was none.
        """
        with _guard:
            position = self._given.pop(session)
            if held < 0:
                return np.int64(0), self._start_writing(session)
            if held == position:
                return np.int64(-1), False
            _log.warning(
                "The cache %s is damaged at example %d: the source is read from there on, and the cache will be "
                "written anew.",
                self.path,
                position,
            )
            with contextlib.suppress(OSError):
                (self.path / INDEX).unlink()
            return np.int64(position), False

    def write(self, session: int, record: bytes) -> None:
        """Writes the next record of a session, where it still writes."""
        with _guard:
            writer = self._writers.get(session)
            if writer is None:
                return
            try:
                if self._limit_bytes is not None and writer.size + len(record) > self._limit_bytes:
                    raise OSError(f"it exceeds the limit of {self._limit_bytes:,} bytes")
                writer.write(record)
                if writer.count == self.count:
                    self._publish(writer)
            except _FAILURES as error:
                self._give_up(error)

    def end_of_source(self, session: int) -> None:
        """Publishes what a session wrote, where the number of examples is known only now."""
        with _guard:
            writer = self._writers.get(session)
            if writer is None:
                return
            try:
                if self.count is not None:
                    raise OSError(f"the source gave {writer.count} examples in place of {self.count}")
                self._publish(writer)
            except _FAILURES as error:
                self._give_up(error)

    def stop_writing(self) -> None:
        """Drops what is being written, and unlocks."""
        with _guard:
            while self._writers:
                self._writers.popitem()[1].drop()
            if self._lock is not None:
                self._lock.release()
                self._lock = None

    def _whole(self) -> int | None:
        """The number of examples of the whole cache, None where there is none."""
        index = read_index(self.path)
        return None if index is None or self.count not in (None, index["count"]) else int(index["count"])

    def _start_writing(self, session: int) -> bool:
        if self._given_up or self._whole() is not None:  # another session was first
            return False
        try:
            if not self._take_lock():
                return False
            if len(self._writers) >= _WRITERS:  # iterations that were left, as Keras leaves the first of each epoch
                shortest = min(self._writers, key=lambda number: (self._writers[number].count, -number))
                self._writers.pop(shortest).drop()
            self._writers[session] = Writer(self._folder, self._key)
        except _FAILURES as error:
            self._give_up(error)
        return session in self._writers

    def _take_lock(self) -> bool:
        if self._lock is not None:
            return True
        lock = Lock.take(self._folder, self._key)
        if lock is None:
            for other in [store for store in _stores if store is not self and store.path == self.path]:
                other.stop_writing()  # of this process: a pipeline that was perhaps only looked at
            lock = Lock.take(self._folder, self._key)
        if lock is None:
            if not self._told:
                _log.warning("Another process writes the cache %s: the source is read meanwhile.", self.path)
            self._told = True
            return False
        self._lock = lock
        make_room(self._folder, self._key, self._expected_bytes, self._limit_bytes)
        return True

    def _publish(self, writer: Writer) -> None:
        writer.publish(self._what)
        self.stop_writing()

    def _give_up(self, error: Exception) -> None:
        self._given_up = True
        self.stop_writing()
        said = error.message if isinstance(error, tf.errors.OpError) else error
        _log.warning("Cannot write the cache %s (%s): the source is read in every epoch.", self.path, said)
