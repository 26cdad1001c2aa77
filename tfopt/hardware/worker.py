"""A thread that makes the calls which may never return."""

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")


class Worker:
    """A daemon thread that makes one call at a time, so that its callers wait no longer than they said.

    A hung call cannot be ended from Python; it can only be left alone. While one hangs, further calls fail at once
    instead of queueing behind it, and as soon as it returns the worker takes calls again.

    Args:
        name: The thread's name.

    Example:
        >>> Worker("example").call(lambda: 6 * 7, deadline_seconds=1.0)
        42
    """

    def __init__(self, name: str):
        self._name = name
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._overdue: _Job | None = None

    def call(self, function: Callable[[], Result], *, deadline_seconds: float) -> Result:
        """Returns what `function()` returns, or raises what it raises.

        Raises:
            TimeoutError: It did not return within the deadline, or a call before it still hangs.
        """
        job = _Job(function)
        with self._lock:
            if self._overdue is not None and not self._overdue.done.is_set():
                raise TimeoutError("an earlier call has not returned yet")
            self._start()
            self._jobs.put(job)
        if not job.done.wait(deadline_seconds):
            job.abandoned = True
            with self._lock:
                self._overdue = job
            raise TimeoutError(f"no answer within {deadline_seconds:g} s")
        if job.error is not None:
            raise job.error
        result: Result = job.result
        return result

    def _start(self) -> None:
        # A fork takes no threads along: the child finds a dead one, and a queue that may be locked for ever.
        if self._thread is None or not self._thread.is_alive():
            self._jobs = queue.SimpleQueue()
            self._thread = threading.Thread(target=_work, args=(self._jobs,), name=self._name, daemon=True)
            self._thread.start()


class _Job:
    """One call and what came of it."""

    def __init__(self, function: Callable[[], Any]):
        self.function = function
        self.done = threading.Event()
        self.abandoned = False
        self.result: Any = None
        self.error: BaseException | None = None


def _work(jobs: "queue.SimpleQueue[_Job]") -> None:
    while True:
        job = jobs.get()
        if not job.abandoned:
            try:
                job.result = job.function()
            except BaseException as error:  # noqa: BLE001  the caller gets it; the worker must live on
                job.error = error
        job.done.set()
        del job  # while the worker waits it must not keep a result, or an error's frames, alive
