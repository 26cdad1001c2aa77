"""The position of Keras' `fit` in its data: read, and found again in another process.

A dataset of `build_pipeline` reads from any position. Of another dataset that draws, the iterator's state is restored,
which holds buffers, counters and seeds. Where that cannot be had, data that are the same on every run are brought there
by as many iterators as before, since each draws an order of its own, and by reading what was read.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from tfopt.checkpoint.datasets import (
    all_counts,
    changes,
    exact_plan,
    is_complete,
    obstacle,
    order_of,
    places_of,
    positions_of,
    seeds_of,
)
from tfopt.checkpoint.openings import Opening, Openings, ValidationData
from tfopt.distribute.data_check.fits import begin_later
from tfopt.errors import summarize_error
from tfopt.internals.runtime import OwnedIterator
from tfopt.internals.training import ArrayDataAdapter
from tfopt.pipelines.shared import epochs as pipelines
from tfopt.text import readable_bytes
from tfopt.warn import warn_once

STATE = "data/iterator"
"""The name of the array that holds an iterator's state."""
_IGNORE, _FAIL = 1, 2  # tf.data.experimental.ExternalStatePolicy
_MOST_BYTES = 256 * 2**20  # of an iterator's state, which goes into each checkpoint
_BETTER = "Pass the same data, from build_pipeline(..., seed=...) or a tf.data.Dataset without Python functions."

Way = Literal["plan", "skip", "state", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where a `fit` is in its data. JSON values."""

    way: Way
    """How to find it again: by number, by skipping, by an iterator's state, or not at all."""
    batch: int
    """Batches that were read in this epoch; 0 before it."""
    over: bool
    """Whether no more of this epoch will be read."""
    reads: list[int]
    """Batches read from each iterator. Keras opens two an epoch if it knows the number of batches, and reads one."""
    batches: int | None
    """In an epoch, as far as Keras knows."""
    seen: int
    """Keras' count of batches read from the last iterator."""
    seeds: list[list[int]] | None = None
    """Of the stages of a `tf.data.Dataset` that draw, with the buffer of each; None in checkpoints of earlier versions,
    and of other data."""
    seed: int | None = None
    """That a pipeline was given; None for one that it drew."""
    places: list[list[int]] | None = None
    """The seed, epoch and batch from which the next iteration of each pipeline reads; None in earlier versions."""
    taken: list[list[int]] | None = None
    """The same of the iterator that is being read, with the batches that were read of it; None if there is none."""
    order: list[Any] | None = None
    """What else decides the order of a pipeline."""
    opened: list[int] | None = None
    """Which of all iterators of a shuffle the one is that was read last, and how many there are; None in earlier
    versions."""


class DataPosition:
    """Follows a `fit` through its data.

    Args:
        epochs: The `TFEpochIterator` of the running `fit`, before its first epoch.
    """

    def __init__(self, epochs: Any):
        self._epochs = epochs
        self._reads: list[int] = []  # batches of each iterator, without those of the running epoch
        self._batch = 0  # of the running epoch
        self._batch_before = 0  # of one that was resumed after its last step
        self._opened: list[int] = []  # which of all iterators of its shuffle each one is
        self._reading = 0  # iterators that were open at the last step, which read from the last of them
        self._last: Any = None  # iterator
        self._read_from: Any = None
        self._resumed: Any = None  # the iterator that the next opening returns
        self._open_stock: Any = epochs._get_iterator
        self._dataset = epochs.data_adapter.get_tf_dataset()
        self.openings = Openings(self._dataset)
        """Of the data."""
        self._was_opened = self.openings.count > 0  # by an earlier fit
        self._all_opened = self.openings.count  # before a validation, which may open some of the same shuffle
        self._plan = exact_plan(self._dataset)
        self._places = places_of(self._dataset)
        self._taken = self._next = self._now_at()  # at the last step
        self._begun_at = self._taken  # when the epoch began
        self._unsaved = ""  # why no iterator's state is saved
        self._obstacle = None if self._plan else obstacle(epochs.data_adapter, self._dataset)
        epochs._get_iterator = lambda: Opening(self._open)

    def _open(self) -> Any:
        if self._resumed is not None:
            resumed, self._resumed = self._resumed, None
            return resumed
        self._last = self._opened_stock()
        self._reads.append(0)
        return self._last

    def _opened_stock(self) -> Any:
        iterator = iter(self._open_stock())
        self.openings.count += 1
        self._all_opened = self.openings.count
        self._opened.append(self._all_opened)
        return iterator

    def begin_epoch(self) -> None:
        """Begins an epoch."""
        self._reads, self._batch, self._batch_before = self._now(), 0, 0
        self._begun_at = self._now_at()

    def step(self, batch: int) -> None:
        """Records how many batches of this epoch have been read."""
        if self._places and self._read_from is not self._last:
            # An iterator may read ahead of the step, into the epochs that a `repeat` adds.
            is_first = batch <= self._epochs.steps_per_execution
            self._taken = self._begun_at if is_first else [place.taken for place in self._places]
            self._reads[-1] += self._taken[0].batch if self._plan else 0  # of a plan that was moved
        self._next, self._all_opened = self._now_at(), self.openings.count
        self._batch, self._reading, self._read_from = batch, len(self._reads), self._last

    def _now_at(self) -> list[pipelines.Position]:
        """From where the next iteration of each pipeline reads."""
        return [place.position for place in self._places]

    def _now(self) -> list[int]:
        """The batches read from each iterator."""
        reads = list(self._reads)
        if self._batch:
            read = reads[self._reading - 1] + self._batch
            # With steps_per_execution, Keras counts the last execution as whole even if the data end within it.
            reads[self._reading - 1] = min(read, self._epochs._num_batches or read)
        return reads

    def save(self, *, in_epoch: bool, over: bool = False) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Returns the position as JSON values and arrays.

        Args:
            in_epoch: Whether the epoch is not over yet.
            over: Whether its batches have all been read, and only its validation is left.
        """
        reading = in_epoch and not over
        way, arrays = self._way(self._read_from if reading else self._last)
        if in_epoch and way == "none":
            self._warn(
                str(self._obstacle),
                "Resuming from a checkpoint within an epoch repeats that epoch from its start",
            )
        reads = self._now()[: self._reading] if reading else self._now()
        position = Position(
            way=way,
            batch=(self._batch or self._batch_before) if in_epoch else 0,
            over=over,
            reads=reads,
            batches=self._epochs._num_batches,
            seen=self._epochs._steps_seen,
            seeds=self._seeds(),
            seed=None if self._plan is None else self._plan.options.seed,
            places=positions_of(self._next if reading or over else self._now_at()),
            taken=self._begun(reading=reading),
            order=None if self._plan is None else order_of(self._plan),
            opened=[(self._opened[: len(reads)] or [0])[-1], self._all_opened if over else self.openings.count],
        )
        return asdict(position), arrays

    def _begun(self, *, reading: bool) -> list[list[int]] | None:
        """From where pipelines are read by the iterator that goes on; None if another one will be read."""
        if not reading and self._epochs.steps_per_epoch is None:  # Keras opens an iterator for each epoch
            return None
        read = next(iter(self._now()[self._reading - 1 if reading else -1 :]), 0)
        # Nobody asks an iterator for more of which all, as Keras knows, or nothing has been read.
        if not read or (self._plan is not None and read == self._epochs._num_batches):
            return None
        return positions_of(replace(taken, batch=read) if self._plan else taken for taken in self._taken)

    def _seeds(self) -> list[list[int]] | None:
        return seeds_of(self._dataset) if isinstance(self._dataset, tf.data.Dataset) and not self._plan else None

    def _way(self, iterator: Any) -> tuple[Way, dict[str, np.ndarray]]:
        if self._plan is not None:
            return "plan", {}
        if self._obstacle is not None:
            return "none", {}
        changing = changes(self._epochs.data_adapter, self._dataset)
        if changing is None and not self.openings.any_draws:
            return "skip", {}
        state = self._state(iterator) if isinstance(iterator, OwnedIterator) and not self._unsaved else None
        if state is not None and (changing is not None or is_complete(state, self._dataset)):
            return "state", {STATE: state}
        if changing is None and not (self._places and all_counts(self._dataset)):
            return "skip", {}  # opens as many iterators, or reads all that was read before
        self._obstacle = self._unsaved or changing or "a dataset made of a pipeline and another shuffle"
        return "none", {}

    def _state(self, iterator: Any) -> np.ndarray | None:
        """The state of an iterator, unless it is too large."""
        # Of arrays the state holds what Keras' random operation drew.
        policy = _IGNORE if isinstance(self._epochs.data_adapter, ArrayDataAdapter) else _FAIL
        try:
            saved = tf.raw_ops.SerializeIterator(
                resource_handle=iterator._iterator_resource, external_state_policy=policy
            )
        except tf.errors.OpError as error:
            self._unsaved = summarize_error(error)
            return None
        state = np.frombuffer(tf.io.serialize_tensor(saved).numpy(), np.uint8)
        if state.nbytes <= _MOST_BYTES:
            return state
        self._unsaved = (
            f"a dataset whose iterator's state takes {readable_bytes(state.nbytes)}, mostly elements in the buffer of "
            "a shuffle without a seed, or in a cache"
        )
        return None

    def fits(self, saved: Mapping[str, Any]) -> bool:
        """Whether the data seem to be those of a position that `save` returned."""
        return self._difference(Position(**saved)) is None

    def resume(
        self,
        saved: Mapping[str, Any],
        arrays: Mapping[str, np.ndarray],
        *,
        in_epoch: bool,
        validations: ValidationData,
    ) -> int:
        """Goes to a position that `save` returned; returns at which batch of its epoch the training goes on.

        Call it before the epoch begins, or within `on_epoch_begin` if the position lies in the epoch, after `resume` of
        the validation data.
        """
        position = Position(**saved)
        self._batch_before = position.batch if position.over else 0
        without = (self._obstacle or "a checkpoint without one") if position.way == "none" else None
        if reason := without or self._difference(position) or self._restore_iterator(position, arrays):
            return self._give_up(position, reason, in_epoch=in_epoch)
        reading = in_epoch and not position.over
        continued = reading or (self._epochs.steps_per_epoch is not None and bool(position.reads))
        taken, following = map(self._positions, (position.taken, position.places))
        for place, *moves in zip(self._places, *filter(None, [taken, following]), strict=False):
            if position.over and taken and place in validations.places:  # which reads before the training does
                read, at = validations.iterations, moves[1]
                later = [replace(at, epoch=at.epoch + number, batch=0) for number in range(1, read + 1)]
                moves = [at, *later[:-1], moves[0], later[-1]]
            # An iterator that is skipped through begins all epochs that it began before, one after the other.
            place.move(*moves[:1] if taken and position.way == "skip" else moves)
        if position.way == "plan":
            self._reads = []
            if continued:
                self._last = self._opened_stock()
                self._reads = [taken[0].batch if taken else 0]
        else:
            self._open_again(position, continued=continued)
            self._reads = list(position.reads)
            if position.way == "state":
                for place, at in zip(self._places, following, strict=False):
                    if place.position.epoch < at.epoch:  # the restored iterator may have begun a later one
                        place.move(at)
        self._read_from, self._taken = self._last, taken or self._taken
        self._next = self._now_at()
        if reading:
            self._reads[-1] -= position.batch
            self.step(position.batch)
        self._epochs._num_batches, self._epochs._steps_seen = position.batches, position.seen
        if reading:
            self._epochs._steps_seen -= position.batch  # Keras counts the skipped ones again
        if self._epochs.steps_per_epoch is None:
            self._resumed = self._last if reading else None  # Keras opens an iterator for each epoch
        elif continued:
            self._epochs._current_iterator = self._last
        if in_epoch:
            self._skip_steps(None if position.over else position.batch)
        return position.batch

    def _give_up(self, position: Position, reason: str, *, in_epoch: bool) -> int:
        """Begins the epoch again, unless all of it was read."""
        if position.over:
            self._skip_steps(None)
            return position.batch
        anew = "Its random draws begin anew" if position.way == "none" else "The data begin anew"
        self._warn(reason, "The epoch starts over" if in_epoch else f"{anew}, as in a new training")
        return 0

    def _positions(self, saved: list[list[int]] | None) -> list[pipelines.Position]:
        """The positions of pipelines in this process."""
        return [place.at(*each) for place, each in zip(self._places, saved or (), strict=False)]

    def _restore_iterator(self, position: Position, arrays: Mapping[str, np.ndarray]) -> str | None:
        """Gives an iterator the state that was saved, if one was; returns why it cannot have it, if it cannot."""
        if position.way != "state" or not position.reads:
            return None
        iterator = iter(self._open_stock())
        self.openings.count += 1
        if not isinstance(iterator, OwnedIterator):
            return "a strategy, whose iterators cannot take the state that one without a strategy has saved"
        state = tf.io.parse_tensor(arrays[STATE].tobytes(), tf.variant)
        try:
            tf.raw_ops.DeserializeIterator(resource_handle=iterator._iterator_resource, serialized=state)
        except tf.errors.OpError as error:
            return f"a dataset with other stages than in the checkpoint ({summarize_error(error)})"
        self._last = iterator
        return None

    def _open_again(self, position: Position, *, continued: bool) -> None:
        """Brings an iterator to the position, and what draws to where it was."""
        self._opened = []
        last, all_opened = position.opened or [len(position.reads)] * 2
        if position.way == "state" and position.reads:
            self.openings.count = all_opened  # which is in the state
        elif all_counts(self._dataset):
            for batches in position.reads:
                self._last = self._opened_stock()
                self._skip(batches)
        else:
            if continued:
                self.openings.reach(last - 1, self._open_stock)
                self._last = self._opened_stock()
                self._skip(position.reads[-1])
            self.openings.reach(all_opened, self._open_stock)
        self._opened = [last] * len(position.reads)

    def _skip(self, batches: int) -> None:
        for _ in range(batches):
            next(self._last, None)  # of data of unknown length, more may have been counted than there are

    def close(self) -> None:
        """Lets go of the iterators, so that they end with `fit` and not in some later garbage collection."""
        if self._epochs is not None:
            for place in self._places:
                place.settle()
            for name in ("_get_iterator", "_enumerate_iterator"):
                self._epochs.__dict__.pop(name, None)
        self._epochs = self._open_stock = self._dataset = self._last = self._read_from = self._resumed = None

    def _skip_steps(self, batch: int | None) -> None:
        """Makes the next epoch start at a batch, without reading those before; None skips all of it."""
        epochs = self._epochs

        def enumerate_rest() -> Iterator[tuple[int, int, Any]]:
            del epochs._enumerate_iterator
            if batch is None:
                return
            for begin, end, iterator in epochs._enumerate_iterator():
                if begin >= batch:
                    yield begin, end, iterator

        epochs._enumerate_iterator = enumerate_rest
        begin_later(epochs)

    def _difference(self, position: Position) -> str | None:
        """How the data differ from those of the checkpoint, if they do."""
        now, then = self._epochs._num_batches, position.batches
        if (position.way == "plan") != (self._plan is not None):
            return "another kind of dataset than in the checkpoint"
        if now is not None and then is not None and now != then:
            return f"{now:,} batches an epoch, and {then:,} in the checkpoint"
        if position.seeds not in (None, self._seeds()):
            return "a shuffle with another buffer or seed than in the checkpoint, such as one drawn in each process"
        if len(position.places or ()) != len(self._places):
            return "a checkpoint without the places of these pipelines, such as one of an earlier version"
        if self._plan is not None and position.seed != self._plan.options.seed:
            return f"seed={self._plan.options.seed}, and seed={position.seed} in the checkpoint"
        if self._plan is not None and position.order not in (None, order_of(self._plan)):
            return "a pipeline that is shuffled or batched otherwise than in the checkpoint"
        saved = self._positions(position.places)
        if any(place.lasting not in (None, at.seed) for place, at in zip(self._places, saved, strict=False)):
            return "a pipeline without seed=, whose cache in memory was read before it could go on"
        if position.way == "skip" and self._was_opened:
            return "a dataset that was read before in this process, whose shuffle goes on from there"
        if not position.over and position.batch % self._epochs.steps_per_execution:
            return f"steps_per_execution={self._epochs.steps_per_execution} after {position.batch:,} batches"
        return None

    def _warn(self, reason: str, consequence: str) -> None:
        warn_once(
            f"position {reason}",
            f"Expected data whose position can be found again. Found: {reason}. {consequence}. {_BETTER}",
        )
