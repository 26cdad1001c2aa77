"""How many steps are launched ahead of the device."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import tensorflow as tf


class InFlight:
    """Bounds the steps that were launched and have not ended, so that the batches they hold do not pile up.

    Every `most // 2`-th step is marked, and a mark waited for before more than `most` steps
    are out. A thread of its own does the waiting: what TensorFlow copies from a GPU is ready when everything launched
    before the copy was asked for has ended, so asking in time, and not when the bound is reached, is what keeps the
    device busy meanwhile.

    Args:
        most: Steps in flight, at most.
        idle: Whether there is nothing to wait for. A CPU has done a step when its call returns.

    Attributes:
        waits_every: Steps from one wait to the next; 1 where each has ended when its call returns.
    """

    def __init__(self, most: int, *, idle: bool):
        self._every = max(1, most // 2)
        self._marks_out = most // self._every
        self._idle = idle
        self.waits_every = 1 if idle else self._every
        self._unmarked = 0
        self._marks: deque[Future[Any]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tfopt-fit")  # starts with its first task

    def launched(self, outputs: Any) -> None:
        """Counts a step, and waits where that makes one too many for the next.

        Args:
            outputs: What the step returned.
        """
        if self._idle:
            return
        self._unmarked += 1
        if self._unmarked == self._every:
            self._unmarked = 0
            self._marks.append(self._thread.submit(_end_of(outputs)))
            if len(self._marks) == self._marks_out:
                self._marks.popleft().result()


def _end_of(outputs: Any) -> Callable[[], Any]:
    """What returns when the step with these outputs has ended."""
    leaves = tf.nest.flatten(outputs, expand_composites=True)
    if not leaves or not isinstance(leaves[0], tf.Tensor):
        return tf.test.experimental.sync_devices
    # A prediction may be large; one number of it comes as late as all of it. And two threads may not read one tensor
    # at a time: the main one may be reading this.
    number = tf.identity(leaves[0]) if leaves[0].shape.rank == 0 else tf.reshape(leaves[0], [-1])[:1]
    return number.numpy
