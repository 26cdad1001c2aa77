"""The share of its time that `fit` waits for input.

A step takes its batch inside a `tf.function`, where no callback can time it. But for its autotuning, tf.data records
the gaps between the end of one `get_next` and the start of the next. The gap after a step's `get_next` is the time the
step worked; the rest of the step it waited.
"""

from dataclasses import dataclass, replace
from typing import Any

import keras
import tensorflow as tf

from tfopt.callbacks.shared.running_fit import variable_of_a_caller

_KEPT = 100  # gaps that tf.data remembers
_FEWEST = 5  # a share from fewer gaps varies too much


@dataclass(slots=True)
class _Balance:
    """Steps with their time, and the gaps of all or most of them."""

    steps: int = 0
    seconds: float = 0.0
    gaps: int = 0
    gap_seconds: float = 0.0

    def wait_percent(self, since: "_Balance") -> float | None:
        gaps, seconds = self.gaps - since.gaps, self.seconds - since.seconds
        if gaps < _FEWEST or seconds <= 0:
            return None
        working = (self.steps - since.steps) * (self.gap_seconds - since.gap_seconds) / gaps
        return min(100.0, max(0.0, 100 * (1 - working / seconds)))


def takes_one_batch_per_step(model: keras.Model) -> bool:
    """Whether each step takes one batch, so that the gaps between batches are those between steps."""
    if model.steps_per_execution != 1:
        return False  # a batch is taken while the previous step still runs
    # With eager steps the shares were wrong by up to a half when tried.
    return not (model.run_eagerly or tf.config.functions_run_eagerly())


class InputWait:
    """Follows the steps of `fit` and the gaps recorded by the iterator they take their batches from.

    A share is None if it is unknown: under a distribution strategy, whose iterators record no gaps; for a dataset whose
    autotuning is off; and from fewer than five gaps. An epoch's last step is left out, as no gap follows it.
    """

    def __init__(self) -> None:
        self._iterator: Any = None
        self._open: float | None = None  # the time of the step whose gap has not ended
        self.begin()

    @property
    def room(self) -> int:
        """How many steps may end before `end_step` must be called for them: tf.data forgets older gaps."""
        return _KEPT - self._unread

    def begin(self) -> None:
        """Starts a training."""
        self._drop_iterator()
        self._total = _Balance()
        self._seen: dict[str, _Balance] = {}  # the total at each reader's last call
        self._taken = 0  # batches up to the last gap that is counted
        self._unread = 0

    def end_first_step(self, seconds: float | None) -> None:
        """Finds the iterator after an epoch's first step. Call it from `on_train_batch_end`.

        Args:
            seconds: How long the step took; None leaves it out, for a step that compiles.
        """
        self._iterator, self._taken = variable_of_a_caller("iterator", tf.data.Iterator), 0
        self._read_gaps()
        self._taken += int(seconds is None)
        self._open = seconds

    def end_step(self, seconds: float) -> None:
        """Counts a step, and reads the gaps before tf.data forgets them."""
        if self._open is not None:
            self._total.steps += 1
            self._total.seconds += self._open
        self._open = seconds
        self._unread += 1
        if self._unread >= _KEPT:
            self._read()

    def percent(self, reader: str) -> float | None:
        """Returns the share in percent since this reader's last call."""
        self._read()
        since, self._seen[reader] = self._seen.get(reader, _Balance()), replace(self._total)
        return self._total.wait_percent(since)

    def end_epoch(self) -> float | None:
        """Returns the epoch's share in percent, and drops the iterator, which keeps the pipeline's resources alive."""
        percent = self.percent("epoch")
        self._drop_iterator()
        return percent

    def _drop_iterator(self) -> None:
        self._iterator = self._open = None

    def _read(self) -> None:
        before, self._unread = self._taken, 0
        gaps = self._read_gaps()
        new = min(self._taken - before, len(gaps))
        if new > 0:
            self._total.gaps += new
            self._total.gap_seconds += sum(gaps[-new:]) / 1e6

    def _read_gaps(self) -> list[int]:
        """Returns the gaps that tf.data remembers, in microseconds."""
        if self._iterator is None:
            return []
        try:
            model = tf.data.experimental.get_model_proto(self._iterator)
        except (tf.errors.OpError, ValueError):  # autotuning is off; not the iterator of one pipeline
            self._iterator = None
            return []
        self._taken = max(self._taken, model.nodes[model.output].num_elements)
        return list(model.gap_times)
