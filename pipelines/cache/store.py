"""What each iteration of a cached dataset reads and writes. Nothing here raises: a cache must not end a training."""

import contextlib
import hashlib
import logging
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.pipelines.cache.folder import INDEX, ROWS, Lock, Writer, make_room, read_index

_WRITERS = 3  # at a time: one for the epoch, the others for iterations that may be abandoned
_FAILURES = (OSError, ValueError, tf.errors.OpError)
_log = logging.getLogger("tfopt")
_guard = threading.RLock()  # one for all: a pipeline may take the lock from another one in its process
_stores: "weakref.WeakSet[Store]" = weakref.WeakSet()  # of this process


class Store:
    """A cache on disk under its key.

    Each iteration of the dataset is a session with a number. It reads the file `begin` returns, reports in
    `end_of_rows` how far that went, and takes the rest from the source. If there was no file, it also writes; the first
    complete session is published.
    """

    def __init__(
        self,
        folder: Path,
        find_key: Callable[[], str],  # called again before publishing: what the key covers may have changed
        *,
        count: int | None,  # of examples; None if unknown
        expected_bytes: int | None,
        limit_bytes: int | None,  # of all caches in the folder together; None for no limit
        what: str,  # a description of the content, for readers of the folder
    ):
        self._folder, self._key, self.count, self._what = folder, find_key(), count, what
        self._find_key = find_key
        self._expected_bytes, self._limit_bytes = expected_bytes, limit_bytes
        self._sessions = 0
        self._given: dict[int, int] = {}  # how many examples a damaged file gave, until the session goes on
        self._lock: Lock | None = None
        self._writers: dict[int, Writer] = {}
        self._given_up = self._warned = False
        _stores.add(self)

    @property
    def tag(self) -> int:
        """A number to which each of its records adds its position."""
        return int.from_bytes(hashlib.sha256(self._key.encode()).digest()[:8]) >> 2

    @property
    def path(self) -> Path:
        """The folder of this cache."""
        return self._folder / self._key

    def begin(self) -> tuple[int, Any, int, int, int]:
        """Begins a session.

        Returns its number; an array of the file to read; how many examples that holds; the end of its records' marks,
        which begin with the tag; and how far these are apart. Without a whole cache, the array is empty and the number
        of examples -1.
        """
        with _guard:
            self._sessions += 1
            whole = self._whole()
            if whole is None:
                return self._sessions, np.array([], dtype=object), -1, self.tag, 1
            with contextlib.suppress(OSError):
                os.utime(self.path / INDEX)  # the caches used least recently make room first
            count, step = whole
            return (
                self._sessions,
                np.array([os.fsencode(self.path / ROWS)], dtype=object),
                count,
                self.tag + count,
                step,
            )

    def end_of_rows(self, session: int, mark: int) -> bool:
        """Notes that the record of this mark is damaged or missing in the file of a session; returns False."""
        with _guard:
            self._given[session] = mark - self.tag
        return False

    def go_on(self, session: int, held: int) -> tuple[Any, bool]:
        """Returns where in the source a session goes on, an empty array if nothing is left, and whether it writes.

        `held` is how many examples its file holds, -1 if there was none.
        """
        with _guard:
            position = self._given.pop(session, None)
            if held < 0:
                return np.array([0]), self._start_writing(session)
            if position is None:
                return np.array([], np.int64), False
            _log.warning(
                "The cache %s is damaged at example %d: the source is read from there on, and the cache will be "
                "rewritten.",
                self.path,
                position,
            )
            with contextlib.suppress(OSError):
                (self.path / INDEX).unlink()
            return np.array([position]), False

    def write(self, session: int, record: bytes, count: int) -> None:
        """Writes the next record of a session, of so many examples, if it still writes."""
        with _guard:
            writer = self._writers.get(session)
            if writer is None:
                return
            try:
                if self._limit_bytes is not None and writer.size + len(record) > self._limit_bytes:
                    raise OSError(f"it exceeds the limit of {self._limit_bytes:,} bytes")
                writer.write(record, count)
                if writer.count == self.count:
                    self._publish(writer)
            except _FAILURES as error:
                self._give_up(error)

    def end_of_source(self, session: int) -> int:
        """Publishes what a session wrote, if the number of examples is known only now; returns 0."""
        with _guard:
            writer = self._writers.get(session)
            try:
                if writer is not None and self.count is not None:
                    raise OSError(f"the source gave {writer.count} examples instead of {self.count}")
                if writer is not None:
                    self._publish(writer)
            except _FAILURES as error:
                self._give_up(error)
        return 0

    def stop_writing(self) -> None:
        """Drops what is being written, and unlocks."""
        with _guard:
            while self._writers:
                self._writers.popitem()[1].drop()
            if self._lock is not None:
                self._lock.release()
                self._lock = None

    def _whole(self) -> tuple[int, int] | None:
        """Returns how many examples the whole cache and each of its records hold, or None."""
        index = read_index(self.path)
        if index is None or self.count not in (None, index["count"]):
            return None
        return index["count"], index["rows"]

    def _start_writing(self, session: int) -> bool:
        if self._given_up or self._whole() is not None:  # another session was first
            return False
        try:
            if not self._take_lock():
                return False
            if len(self._writers) >= _WRITERS:  # abandoned iterations, as Keras abandons the first of each epoch
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
                other.stop_writing()  # of this process: perhaps a pipeline that was only looked at
            lock = Lock.take(self._folder, self._key)
        if lock is None:
            if not self._warned:
                _log.warning("Another process writes the cache %s: the source is read meanwhile.", self.path)
            self._warned = True
            return False
        self._lock = lock
        make_room(self._folder, self._key, self._expected_bytes, self._limit_bytes)
        return True

    def _publish(self, writer: Writer) -> None:
        try:
            unchanged = self._find_key() == self._key
        except Exception:  # noqa: BLE001 - whatever reading the user's objects and files raises by now
            unchanged = False
        if not unchanged:
            raise OSError(
                "its data, or what its functions use, have changed since the pipeline was built; build it again"
            )
        writer.publish(self._what)
        self.stop_writing()

    def _give_up(self, error: Exception) -> None:
        self._given_up = True
        self.stop_writing()
        said = error.message if isinstance(error, tf.errors.OpError) else error
        _log.warning("Cannot write the cache %s (%s): the source is read in every epoch.", self.path, said)
