"""Which fit a row belongs to, and where in it: the first columns of every file."""

import os
import secrets
import socket
import time
import weakref
from typing import Any

import keras

from tfopt.callbacks.shared.running_fit import running_list
from tfopt.callbacks.shared.workers import worker_rank

COORDINATES = ("run", "host", "pid", "rank", "epoch", "step", "time_seconds", "elapsed_seconds")
"""The columns, explained in docs/callbacks.md."""


class Run:
    """One `fit` in one process. All callbacks in fit's list share it, so that their files join."""

    def __init__(self) -> None:
        self.id = secrets.token_hex(4)  # not `random`, whose seed is the user's
        self.rank = worker_rank().rank
        self._process = {"run": self.id, "host": socket.gethostname(), "pid": os.getpid(), "rank": self.rank}
        self._began = time.monotonic()

    @property
    def elapsed_seconds(self) -> float:
        """Seconds since the first callback began, unaffected by clock changes."""
        return time.monotonic() - self._began

    def coordinates(self, *, epoch: int | None, step: int, ago: float = 0.0) -> dict[str, Any]:
        """Returns the value of each coordinate.

        Args:
            epoch: From 0; None if the loop announces no epochs.
            step: The optimizer's step count.
            ago: How long ago that was, in seconds.
        """
        elapsed = max(0.0, self.elapsed_seconds - ago)
        return self._process | {
            "epoch": epoch,
            "step": step,
            "time_seconds": time.time() - ago,
            "elapsed_seconds": elapsed,
        }


# By fit's list, with the callbacks that have begun.
_runs: weakref.WeakKeyDictionary[object, tuple[Run, weakref.WeakSet[Any]]] = weakref.WeakKeyDictionary()


def begin_run(callback: keras.callbacks.Callback) -> Run:
    """Returns the run that begins; call it from `on_train_begin`.

    The callbacks of one list get the same, or a new one if the list is used again. A callback without a list, in a loop
    that calls it by itself, gets its own.
    """
    key = running_list(callback) or callback
    run, begun = _runs.get(key, (None, weakref.WeakSet()))
    if run is None or callback in begun:
        run, begun = _runs[key] = Run(), weakref.WeakSet()
    begun.add(callback)
    return run
