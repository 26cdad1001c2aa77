"""What the iterations of a cached dataset read and write. Nothing here raises: a cache must not end a training."""

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tfopt.pipelines.cache.folder import INDEX, Lock, Reader, Writer, make_room, read_index

_log = logging.getLogger("tfopt")
_guard = threading.RLock()  # one for all: a pipeline may take the lock from another one in its process
_stores: "weakref.WeakSet[Store]" = weakref.WeakSet()  # of this process


class Store:
    """A cache on disk under its key.

    Each iteration of the dataset is a session with a number. If the cache is whole when it begins, it reads rows up to
    the first that is damaged, and takes the rest from the source. Whatever it takes from there it writes; once all
    examples are written, by as many iterations as it takes, they are published.
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
        self._given: dict[int, int] = {}  # how many examples sessions had of the cache
        self._damaged: set[int] = set()  # sessions that met a damaged row
        self._computed: dict[int, int] = {}  # how many examples sessions had of the source, if their number is unknown
        self._reader: Reader | None = None
        self._lock: Lock | None = None
        self._writer: Writer | None = None
        self._given_up = self._warned = False
        _stores.add(self)

    @property
    def path(self) -> Path:
        """The folder of this cache."""
        return self._folder / self._key

    def begin(self) -> tuple[int, int]:
        """Begins a session; returns its number, and how many examples the cache holds, -1 if there is no whole one."""
        with _guard:
            self._sessions += 1
            if not self._find():
                return self._sessions, -1
            with contextlib.suppress(OSError):
                os.utime(self.path / INDEX)  # the caches used least recently make room first
            return self._sessions, self._reader.index["count"]  # type: ignore[union-attr]

    def read(self, size: int | None, positions: Any) -> tuple[Any, Any]:
        """Returns rows and their sums, as `Reader.read` does; those of a disk that fails do not match."""
        try:
            return self._reader.read(size, positions)  # type: ignore[union-attr]
        except OSError as error:
            _log.warning("Cannot read the cache %s (%s).", self.path, error)
            rows = np.full(len(positions), b"", object) if size is None else np.zeros((len(positions), size), np.uint8)
            return rows, np.zeros((len(positions), 8), np.uint8)

    def gives(self, session: int, rows: int, good: bool) -> bool:
        """Counts rows that a session gives; returns False if they are not `good`, which ends what the cache gives."""
        session = int(session)
        if good:
            self._given[session] = self._given.get(session, 0) + int(rows)
        else:
            self._damaged.add(session)
        return good

    def go_on(self, session: int, held: int) -> tuple[Any, bool]:
        """Returns after how many examples a session goes on with the source, in an array, and whether it writes.

        The array is empty if nothing is left. `held` is what `begin` returned.
        """
        with _guard:
            session = int(session)
            given = self._given.pop(session, 0)
            if held >= 0 and session not in self._damaged:
                return np.array([], np.int64), False
            if held >= 0:
                self._damaged.remove(session)
                _log.warning(
                    "The cache %s is damaged: after %d examples the source is read, and the cache will be rewritten.",
                    self.path,
                    given,
                )
                with contextlib.suppress(OSError):
                    (self.path / INDEX).unlink()
            return np.array([given]), self._starts_writing()

    def write(self, session: int, positions: Any, rows: Any, sums: Any) -> int:
        """Writes rows, as `Writer.write` does, and publishes the cache once it is whole; returns 0."""
        with _guard:
            if self.count is None:
                self._computed[int(session)] = self._computed.get(int(session), 0) + len(positions)
            try:
                if self._writer is not None:
                    self._writer.write(positions, rows, sums)
                    if self._limit_bytes is not None and self._writer.size > self._limit_bytes:
                        raise OSError(f"it exceeds the limit of {self._limit_bytes:,} bytes")
                    self._publish(self.count)
            except OSError as error:
                self._give_up(error)
        return 0

    def end_of_source(self, session: int, skipped: int) -> int:
        """Publishes what is written, if the number of examples is known only now and all of them are; returns 0.

        The number is that of the examples the session computed, if it skipped none. What is written says nothing:
        other sessions write at the same time.
        """
        with _guard:
            count = self._computed.pop(int(session), None)
            try:
                self._publish(None if skipped else count)
            except OSError as error:
                self._give_up(error)
        return 0

    def stop_writing(self) -> None:
        """Drops what is being written, and unlocks."""
        with _guard:
            if self._writer is not None:
                self._writer.drop()
            if self._lock is not None:
                self._lock.release()
            self._writer = self._lock = None

    def _find(self) -> bool:
        """Whether there is a whole cache, which `_reader` then reads."""
        index = read_index(self.path)
        if index is None or self.count not in (None, index["count"]):
            return False
        if self._reader is None or self._reader.index != index:
            try:
                self._reader = Reader(self.path, index)
            except (OSError, ValueError):
                with contextlib.suppress(OSError):
                    (self.path / INDEX).unlink()
                return False
        return True

    def _starts_writing(self) -> bool:
        if self._given_up or self._find():  # another iteration was first
            return False
        try:
            if self._writer is None and self._take_lock():
                self._writer = Writer(self._folder, self._key, self.count)
        except OSError as error:
            self._give_up(error)
        return self._writer is not None

    def _take_lock(self) -> bool:
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

    def _publish(self, count: int | None) -> None:
        if self._writer is None or self._writer.count != count:
            return
        try:
            unchanged = self._find_key() == self._key
        except Exception:  # noqa: BLE001 - whatever reading the user's objects and files raises by now
            unchanged = False
        if not unchanged:
            raise OSError(
                "its data, or what its functions use, have changed since the pipeline was built; build it again"
            )
        self._writer.publish(self._what)
        self.stop_writing()

    def _give_up(self, error: Exception) -> None:
        self._given_up = True
        self.stop_writing()
        _log.warning("Cannot write the cache %s (%s): the source is read in every epoch.", self.path, error)
