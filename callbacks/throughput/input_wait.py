"""How much of its time `fit` waits for a batch, from the gaps that tf.data records between batches."""

from dataclasses import dataclass, replace
from typing import Any

import keras
import tensorflow as tf

from tfopt.callbacks.shared.running_fit import running_iterator
from tfopt.model.batches import steps_at_once

_GAPS_KEPT = 100  # by tf.data
_LONGEST_GAP_SECONDS = 10.0  # tf.data keeps no longer one
_FEWEST_GAPS, _FEWEST_SECONDS = 5, 1.0  # a share from fewer gaps in less time varies too much
_UNCLEAR_PERCENT = 5  # of the time: a share that is further in doubt is unknown


@dataclass(slots=True)
class _Balance:
    """Steps with their time, and the gaps of all or most of them."""

    steps: int = 0
    seconds: float = 0.0
    gaps: int = 0
    gap_seconds: float = 0.0
    too_long: int = 0
    """Steps whose gap was too long to be kept."""
    too_long_seconds: float = 0.0
    """Their time."""

    def wait_percent(self, since: "_Balance") -> float | None:
        gaps, seconds = self.gaps - since.gaps, self.seconds - since.seconds
        if not gaps or seconds <= 0 or (gaps < _FEWEST_GAPS and seconds < _FEWEST_SECONDS):
            return None
        # These worked for at least as long as a gap may be; the rest of their time may have been either.
        too_long, too_long_seconds = self.too_long - since.too_long, self.too_long_seconds - since.too_long_seconds
        if 100 * (too_long_seconds - too_long * _LONGEST_GAP_SECONDS) > _UNCLEAR_PERCENT * seconds:
            return None
        steps = self.steps - since.steps - too_long
        working = steps * (self.gap_seconds - since.gap_seconds) / gaps + too_long_seconds
        return min(100.0, max(0.0, 100 * (1 - working / seconds)))


def takes_one_batch_per_step(model: keras.Model) -> bool:
    """Whether each step takes one batch, so that the gaps between batches are those between steps."""
    if steps_at_once(model) != 1:
        return False  # a batch is taken while a previous step still runs
    # With eager steps the shares were wrong by up to a half when tried.
    return not (getattr(model, "run_eagerly", False) or tf.config.functions_run_eagerly())


class InputWait:
    """Follows the steps of `fit` and the gaps recorded by the iterator they take their batches from.

    The gap after a batch, until the next one is asked for, is the time in which its step worked; the rest of the step's
    time, before, was waiting. The gap is known once the next step has ended, so each step is added then.

    A share is None if it is unknown: under a distribution strategy, whose iterators record no gaps; for a dataset whose
    autotuning is off; from fewer than five gaps within a second; and if more than a twentieth of the time belongs to
    steps that worked too long for tf.data to keep their gap. An epoch's last step is left out, as no gap follows it.
    """

    def __init__(self) -> None:
        self._iterator: Any = None
        self.begin()

    @property
    def room(self) -> int:
        """How many steps may end before they must be added: tf.data forgets older gaps."""
        return _GAPS_KEPT - self._unread

    def begin(self) -> None:
        """Starts a training."""
        self._drop_iterator()
        self._total = _Balance()
        self._seen: dict[str, _Balance] = {}  # the total at each reader's last call
        self._taken = 0  # batches up to the last gap that is counted
        self._unread = 0
        self._long_steps: list[float] = []  # since the gaps were read
        self._gaps: list[int] = []  # as read last
        self._skipped = 0  # gaps among the next ones read
        self._lost = 0  # gaps too long to be kept, of steps not yet added

    def find(self, *, skipped_seconds: float | None) -> bool:
        """Finds the iterator after an epoch's first step, and returns whether it records gaps.

        Call it from `on_train_batch_end`. Of a step that compiled, give its time: it is left out.
        """
        found = running_iterator()
        self._iterator, self._taken = found if isinstance(found, tf.data.Iterator) else None, 0
        self._gaps = self._read_gaps()
        self._taken += int(skipped_seconds is not None)
        self._skipped = int(skipped_seconds is not None and skipped_seconds < _LONGEST_GAP_SECONDS)
        self._lost = 0
        return self._iterator is not None

    def add(self, seconds: float) -> None:
        """Adds a step after the next one has ended, and reads the gaps before tf.data forgets them."""
        self._total.steps += 1
        self._total.seconds += seconds
        self._unread += 1
        if seconds >= _LONGEST_GAP_SECONDS:
            self._long_steps.append(seconds)
        if self._unread >= _GAPS_KEPT:
            self._read()

    def percent(self, reader: str, *, peek: bool = False) -> float | None:
        """Returns the share in percent since this reader's last call; a call that peeks does not count as one."""
        if self._unread:
            self._read()
        since = self._seen.get(reader, _Balance())
        if not peek:
            self._seen[reader] = replace(self._total)
        return self._total.wait_percent(since)

    def end_epoch(self) -> float | None:
        """Returns the epoch's share in percent, and drops the iterator, which keeps the pipeline's resources alive."""
        percent = self.percent("epoch")
        self._drop_iterator()
        return percent

    def _drop_iterator(self) -> None:
        self._iterator = None

    def _read(self) -> None:
        before, added, self._unread = self._taken, self._unread, 0
        last, self._gaps = self._gaps, self._read_gaps()
        new, appended = self._taken - before, _appended(last, self._gaps)
        lost = max(0, new + self._skipped - appended) if appended < _GAPS_KEPT else 0
        new, self._skipped = new - lost, 0
        too_long = sorted(self._long_steps, reverse=True)[: self._lost + lost]
        self._long_steps.clear()
        self._total.too_long += len(too_long)
        self._total.too_long_seconds += sum(too_long)
        # The gap after a step holds a later callback's time, which counts for the next step, and that is added later.
        left = self._lost + lost - len(too_long)
        self._lost = min(left, lost) if added else left
        new = min(new, len(self._gaps))
        if new > 0:
            self._total.gaps += new
            self._total.gap_seconds += sum(self._gaps[-new:]) / 1e6

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


def _appended(before: list[int], after: list[int]) -> int:
    """How many gaps were appended to a list from whose front the oldest are dropped."""
    old = min(len(before), len(after))
    while after[:old] != before[len(before) - old :]:
        old -= 1
    return len(after) - old
