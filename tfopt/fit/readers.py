"""Which callbacks read a step's logs, and when it is time to read them."""

import math
import time
import warnings
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfopt.fit.logs import LazyLogs

_SECONDS = 1.0  # a progress bar that stands still longer looks broken
_STEPS_IN_A_ROW = 3  # a callback that reads on so many is taken to read on all


class Readers:
    """Hands logs to the callbacks of one list, to each as it needs them.

    - Keras' progress bar gets them every `log_every` steps, on an epoch's first and last, and after a second.
    - Keras' TensorBoard gets them on the steps that it writes, and not on those on which it only reads.
    - A callback with a true `needs_every_step` gets numbers, after the step has ended.
    - All others get `LazyLogs`, for which nothing waits unless they read.

    Callbacks that make every step wait are named in a warning, once: those that say so, Keras' TerminateOnNaN and
    TensorBoard(update_freq="batch") before they do, others when they have.

    Args:
        log_every: Steps.
        clock: Seconds, monotonic.
    """

    def __init__(self, log_every: int, *, clock: Callable[[], float] = time.monotonic):
        self._log_every = log_every
        self._clock = clock
        self._shown: float = math.inf  # the batch that the progress bar shows
        self._shown_at = 0.0
        self._reads: dict[int, int] = {}  # by callback: steps in a row on which it was the first to read
        self._named: list[keras.callbacks.Callback] = []
        self._begun = False

    def hand(self, callbacks: keras.callbacks.CallbackList, hook: str, batch: int, logs: LazyLogs) -> None:
        """Calls a hook of each callback, in their order.

        Args:
            callbacks: The list.
            hook: "on_train_batch_end" or the like.
            batch: The step's number in its epoch.
            logs: The step's logs.
        """
        if not self._begun:
            self._begun = True
            self._warn([callback for callback in callbacks.callbacks if _is_known_to_wait(callback, hook)])
        for callback in callbacks.callbacks:
            kind = type(callback)
            if kind is keras.callbacks.ProgbarLogger and _shows(callback, hook):
                if self._due(batch, callback.target):
                    getattr(callback, hook)(batch, logs=logs)
                else:
                    callback.seen = batch + 1  # its total where nobody knew how many there are
            elif kind is keras.callbacks.TensorBoard:
                getattr(callback, hook)(batch, logs=logs if tf.summary.should_record_summaries() else None)
            else:
                self._call(callback, hook, batch, logs)

    def _call(self, callback: keras.callbacks.Callback, hook: str, batch: int, logs: LazyLogs) -> None:
        if getattr(callback, "needs_every_step", False):
            logs.read()
        unread = not logs.were_read
        getattr(callback, hook)(batch, logs=logs)
        if not unread:
            return
        reads = self._reads.get(id(callback), 0) + 1 if logs.were_read else 0
        self._reads[id(callback)] = reads
        if reads == _STEPS_IN_A_ROW and callback not in self._named:
            self._warn([callback])

    def _due(self, batch: int, target: int | None) -> bool:
        now = self._clock()
        first, last = batch <= self._shown, target is not None and batch + 1 >= target
        if first or last or batch - self._shown >= self._log_every or now - self._shown_at >= _SECONDS:
            self._shown, self._shown_at = batch, now
            return True
        return False

    def _warn(self, callbacks: list[keras.callbacks.Callback]) -> None:
        self._named += callbacks
        if callbacks:
            names = " and ".join(dict.fromkeys(type(callback).__name__ for callback in callbacks))
            warnings.warn(
                f"Expected callbacks that leave a step's logs unread, so that the next step need not wait for it. "
                f"Found {names}, for which the device is waited for on every step: what is trained and logged stays "
                "right, but nothing overlaps. Read the logs on some steps only, or at the end of the epoch.",
                stacklevel=2,
            )


def _is_known_to_wait(callback: keras.callbacks.Callback, hook: str) -> bool:
    if getattr(callback, "needs_every_step", False):
        return True
    every_batch = isinstance(callback, keras.callbacks.TensorBoard) and callback.update_freq == 1
    return hook == "on_train_batch_end" and (every_batch or isinstance(callback, keras.callbacks.TerminateOnNaN))


def _shows(bar: Any, hook: str) -> bool:
    """Whether a progress bar would read the logs."""
    return bar.verbose == 1 and not (hook == "on_test_batch_end" and bar._called_in_fit)
