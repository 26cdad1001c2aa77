"""Processes that train one model together, and how they agree to save at the same step."""

from typing import Any

import keras
import numpy as np

from tfopt.distribute.cluster.together import total
from tfopt.pipelines.sources.parts import worker_place

_CHECK_SECONDS = 1.0  # between agreements
_MOST_STEPS = 1000


class Processes:
    """The processes of a training; a single process agrees with itself.

    Args:
        model: The model that trains.
    """

    def __init__(self, model: keras.Model):
        self._strategy = model.distribute_strategy
        index, self.count = worker_place(self._strategy)
        """How many there are."""
        self.replicas = self._strategy.num_replicas_in_sync
        """In all processes."""
        self.first = index * (self.replicas // self.count)
        """The number of this process's first replica among all."""
        self._checked = (0, 0.0)  # step and time of the last agreement
        self._next = 1  # step
        self.is_chief = self.first == 0
        """Whether this process writes."""

    def total(self, value: Any) -> np.ndarray:
        """Returns the sum of all processes' arrays; every process must call it at the same point."""
        return total(self._strategy, value)

    def joined(self, values: np.ndarray) -> np.ndarray:
        """Returns the values of all replicas in replica order, given this process's."""
        everywhere = np.zeros((self.replicas, *values.shape[1:]), values.dtype)
        everywhere[self.first : self.first + len(values)] = values
        return self.total(everywhere)

    def agree(self, step: int, seconds: float, *wishes: bool) -> tuple[bool, ...]:
        """Returns which of the wishes any process has. Call it after every step.

        Several processes communicate about once a second; in between, it returns False for each wish.

        Args:
            step: The number of the step that has ended.
            seconds: The time, monotonic.
            wishes: This process's.
        """
        if self.count == 1:
            return wishes
        if step < self._next:
            return (False,) * len(wishes)
        before, then = self._checked
        each = (seconds - then) / max(1, step - before) if before else _CHECK_SECONDS
        *sums, total = self.total(np.array([*wishes, each], np.float64))
        # The same in all processes, since it is computed from a sum.
        self._next = step + int(np.clip(_CHECK_SECONDS * self.count / max(total, 1e-9), 1, _MOST_STEPS))
        self._checked = (step, seconds)
        return tuple(bool(wished) for wished in sums)
