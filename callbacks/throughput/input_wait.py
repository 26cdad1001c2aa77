"""What share of a step `fit` waits for its input.

The step takes its batch inside a `tf.function`, where no callback can time it. But tf.data itself keeps, for its
autotuning, the gaps between the end of one taking and the start of the next. The gap behind a step's taking is what the
step worked; the rest of its time it waited.
"""

from dataclasses import dataclass, replace
from typing import Any

import keras
import tensorflow as tf

from tfopt.callbacks.callers import variable_of_a_caller

_KEPT = 100  # gaps that tf.data keeps
_FEWEST = 5  # a share of fewer gaps varies too much


@dataclass(slots=True)
class _Balance:
    """Steps with their time, and the gaps of those steps or of most of them."""

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


def takes_a_batch_a_step(model: keras.Model) -> bool:
    """Whether the gaps between batches are those between steps."""
    if model.steps_per_execution != 1:
        return False  # a batch is taken while the step before still runs
    # Tried with eager steps: shares were wrong by up to a half.
    return not (model.run_eagerly or tf.config.functions_run_eagerly())


class InputWait:
    """Follows the steps of `fit`, one batch at a time, and the gaps of the iterator that they take their batches from.

    Shares are None where nothing is known: under a distribution strategy, whose iterators keep no gaps, for a dataset
    whose autotuning is off, and where fewer than five gaps were seen. An epoch's last step is left out, as no gap
    follows it.
    """

    def __init__(self) -> None:
        self._iterator: Any = None
        self._open: float | None = None  # the seconds of the step whose gap has not ended
        self.begin()

    @property
    def room(self) -> int:
        """How many steps may end before `end_step` is called for them: tf.data forgets the gaps of more."""
        return _KEPT - self._unread

    def begin(self) -> None:
        """Starts a training."""
        self._let_go()
        self._total = _Balance()
        self._seen: dict[str, _Balance] = {}  # the total as each reader last saw it
        self._taken = 0  # batches, up to the last gap that is accounted for
        self._unread = 0

    def end_first_step(self, seconds: float | None) -> None:
        """Finds the iterator. Call it from `on_train_batch_end`.

        Args:
            seconds: What the epoch's first step took; None leaves the step out, as one that compiles.
        """
        self._iterator, self._taken = variable_of_a_caller("iterator", tf.data.Iterator), 0
        self._read_gaps()
        self._taken += int(seconds is None)
        self._open = seconds

    def end_step(self, seconds: float) -> None:
        """Counts another step, and reads the gaps before tf.data forgets them."""
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
        """Returns the epoch's share in percent, and lets the iterator go: it holds what the pipeline holds."""
        percent = self.percent("epoch")
        self._let_go()
        return percent

    def _let_go(self) -> None:
        self._iterator = self._open = None

    def _read(self) -> None:
        before, self._unread = self._taken, 0
        gaps = self._read_gaps()
        new = min(self._taken - before, len(gaps))
        if new > 0:
            self._total.gaps += new
            self._total.gap_seconds += sum(gaps[-new:]) / 1e6

    def _read_gaps(self) -> list[int]:
        """Returns the gaps that tf.data keeps, in microseconds."""
        if self._iterator is None:
            return []
        try:
            model = tf.data.experimental.get_model_proto(self._iterator)
        except (tf.errors.OpError, ValueError):  # no tuning; no iterator of one pipeline
            self._iterator = None
            return []
        self._taken = max(self._taken, model.nodes[model.output].num_elements)
        return list(model.gap_times)
