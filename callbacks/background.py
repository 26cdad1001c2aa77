"""A thread of its own for what may be slow, hang or fail: a user's function, a tracker, a file on a full disk."""

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

import keras

from tfopt.callbacks.order import running_list
from tfopt.warn import warn_once

_WAIT_SECONDS = 5.0


class Background:
    """Calls a function with one item after the other, in a thread of its own. Whoever hands items over never waits.

    Items that do not fit, because the function is slow or hangs, are dropped and counted. That is reported once, as is
    an error of the function, which is called again with the next item, and a thread that cannot be started: then all
    items are dropped.

    Args:
        name: What works there, as messages name it: "tracker".
        function: Takes an item. It must not hold the callback, which could then not be collected.
        most: Items that may wait. Default 16.

    Attributes:
        dropped: Items that did not fit.
        closed: Whether it takes no more items.
        works: Whether its thread could be started.

    Example:
        >>> background = Background("tracker", print)
        >>> background.put("later")
        >>> background.close()
        later
    """

    def __init__(self, name: str, function: Callable[[Any], object], *, most: int = 16):
        self.dropped = 0
        self._name = name
        self._function = function
        self._most = most
        self.closed = False
        self.works = True
        # No event and no queue.Queue: the garbage collection may close it while this very thread holds their locks.
        self._items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"tfopt-{name.replace(' ', '-')}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self.works = False
            warn_once(
                f"thread of {name}",
                f"Expected to start a thread for the {name}. Found: {error}. The training goes on without it. Look at "
                "the limit of processes (ulimit -u; pids.max of the control group).",
            )

    def put(self, item: Any) -> None:
        """Hands an item over; does nothing once closed."""
        if self.closed:
            return
        if self.works and self._items.qsize() < self._most:
            self._items.put(item)
            return
        self.dropped += 1
        if not self.works:
            return
        text = f"Expected the {self._name} to keep up. Found {self._most} items waiting for it. What does not fit is "
        warn_once(f"full {self._name}", f"{text}dropped; the training goes on. Look whether it hangs, or ask for less.")

    def close(self, wait_seconds: float = _WAIT_SECONDS) -> None:
        """Takes no more items and waits for those there are, though not for ever. A second call does nothing."""
        if self.closed:
            return
        self.closed = True
        self._items.put(None)
        # In the thread itself the garbage collection may run.
        if not self.works or self._thread is threading.current_thread():
            return
        self._thread.join(wait_seconds)
        if self._thread.is_alive():
            text = f"Expected the {self._name} to be done within {wait_seconds:g} s. Found it at work still, "
            warn_once(f"late {self._name}", f"{text}and it is waited for no longer. Look whether it hangs.")

    def _work(self) -> None:
        while (item := self._items.get()) is not None:
            try:
                self._function(item)
            except BaseException as error:  # noqa: BLE001  what a user handed in must not end the thread
                text = f"Expected the {self._name} to work. Found: {error!r}. The training goes on."
                warn_once(f"{self._name} {type(error).__name__}", text, error=error)


def end_with_fit(callback: keras.callbacks.Callback, end: Callable[[], object]) -> None:
    """Calls a function when the fit that runs is over, also where an exception ends it without `on_train_end`.

    Call it from the callback's `on_train_begin`.

    Args:
        callback: Whose fit. Without one, it is done when the callback goes.
        end: It must hold neither the callback nor fit's list, which could then not be collected.
    """
    # Nobody tells a callback of an exception in another one, or of Ctrl-C; but fit's own list goes then.
    weakref.finalize(running_list() or callback, end)
