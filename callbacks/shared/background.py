"""A worker thread for what may be slow, hang or fail: a user's function, a tracker, a write to a full disk."""

import atexit
import queue
import threading
from collections.abc import Callable
from typing import Any

from tfopt.warn import warn_once

_WAIT_SECONDS = 5.0


class Background:
    """Calls a function with each item in a thread of its own. `put` never blocks.

    While the function is slow or hangs, items beyond `most` are dropped and counted. That, an error of the function
    (which still gets the next item) and a thread that cannot start (all items are dropped) are each reported once.

    Args:
        name: The worker's name in messages: "tracker".
        function: Takes one item. It must not hold the callback, which could then not be collected.
        most: Items that may wait. Default 16: a few seconds' worth for what runs about once a second.
        at_end: Called in the thread after the last item, however late that ends.
    """

    def __init__(
        self,
        name: str,
        function: Callable[[Any], object],
        *,
        most: int = 16,
        at_end: Callable[[], object] = lambda: None,
    ):
        self.dropped = 0
        """Items that did not fit."""
        self.closed = False
        self.works = True
        """Whether the thread could be started."""
        self._name = name
        self._function = function
        self._at_end = at_end
        self._most = most
        # No Event or queue.Queue: garbage collection may call `close` while this very thread holds their locks.
        self._items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"tfopt-{name.replace(' ', '-')}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self.works = False
            warn_once(
                f"thread of {name}",
                f"Expected to start a thread for the {name}. Found: {error}. The training goes on without it. Check "
                "the process limit (ulimit -u; pids.max of the control group).",
            )

    def put(self, item: Any) -> None:
        """Queues an item; does nothing once closed."""
        if self.closed:
            return
        if self.works and self._items.qsize() < self._most:
            self._items.put(item)
            return
        self.dropped += 1
        if not self.works:
            return
        warn_once(
            f"full {self._name}",
            f"Expected the {self._name} to keep up. Found {self._most} items waiting for it. What does not fit is "
            "dropped; the training goes on. Check whether it hangs, or ask for less.",
        )

    def close(self, wait_seconds: float = _WAIT_SECONDS, *, rest_at_exit: bool = False) -> None:
        """Takes no more items and waits up to `wait_seconds` for the queued ones. A second call does nothing.

        What takes longer is reported, or with `rest_at_exit` waited for when Python exits, up to 5 s.
        """
        if self.closed:
            return
        self.closed = True
        self._items.put(None)
        # Garbage collection may run in the worker thread itself.
        if not self.works or self._thread is threading.current_thread():
            return
        self._thread.join(wait_seconds)
        if self._thread.is_alive() and rest_at_exit:
            atexit.register(self._thread.join, _WAIT_SECONDS)
        elif self._thread.is_alive():
            warn_once(
                f"late {self._name}",
                f"Expected the {self._name} to finish within {wait_seconds:g} s. Found it still running; tfopt stops "
                "waiting for it. Check whether it hangs.",
            )

    def _work(self) -> None:
        while (item := self._items.get()) is not None:
            self._call(self._function, item)
        self._call(self._at_end)

    def _call(self, function: Callable[..., object], *arguments: Any) -> None:
        try:
            function(*arguments)
        except BaseException as error:  # noqa: BLE001  a user's function must not end the thread
            text = f"Expected the {self._name} to work. Found: {error!r}. The training goes on."
            warn_once(f"{self._name} {type(error).__name__}", text, error=error)
