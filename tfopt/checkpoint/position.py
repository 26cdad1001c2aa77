"""The position of Keras' `fit` in its data: read, and found again in another process.

A seeded `build_pipeline` is built again from the position. For another dataset that yields the same on every run, as
many iterators are opened as before, since each draws its own order, and batches of the last one are skipped. If the
order changes on every run, as with unseeded arrays, the iterator's state is restored.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import tensorflow as tf
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from tensorflow.python.data.ops.iterator_ops import OwnedIterator
from tensorflow.python.ops import gen_dataset_ops

from tfopt.checkpoint.datasets import (
    all_counts,
    changes,
    draws_by_opening,
    exact_plan,
    few_of,
    is_complete,
    iterations_before,
    obstacle,
    seeds_of,
)
from tfopt.distribute.data_check.fits import begin_later
from tfopt.errors import summarize_error
from tfopt.pipelines.device.device_stage import stage_of
from tfopt.text import readable_bytes
from tfopt.warn import warn_once

STATE = "data/iterator"
"""The name of the array that holds an iterator's state."""
_IGNORE, _FAIL = 1, 2  # tf.data.experimental.ExternalStatePolicy
_CONTINUED = "_tfopt_continued"  # an attribute of a pipeline: its iterations are not those of an uninterrupted script
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
    """Of the stages of a `tf.data.Dataset` that draw; None in checkpoints of earlier versions, and of other data."""


class DataPosition:
    """Follows a `fit` through its data.

    Args:
        epochs: The `TFEpochIterator` of the running `fit`, before its first epoch.
        prepared: Makes of a dataset what `fit` iterates: distributed, or copied to the device.
    """

    def __init__(self, epochs: Any, prepared: Callable[[Any], Any]):
        self._epochs, self._prepared = epochs, prepared
        self._reads: list[int] = []  # batches of each iterator, without those of the running epoch
        self._batch = 0  # of the running epoch
        self._batch_before = 0  # of one that was resumed after its last step
        self._reading = 0  # iterators that were open at the last step, which read from the last of them
        self._last: Any = None  # iterator
        self._read_from: Any = None
        self._resumed: Any = None  # the iterator that the next opening returns
        self._open_stock: Any = epochs._get_iterator
        self._dataset = epochs.data_adapter.get_tf_dataset()
        self._plan = exact_plan(self._dataset)
        self._obstacle = None if self._plan else obstacle(epochs.data_adapter, self._dataset)
        epochs._get_iterator = lambda: Opening(self._open)

    def _open(self) -> Any:
        if self._resumed is not None:
            opened, self._resumed = self._resumed, None
            return opened
        self._last = iter(self._open_stock())
        self._reads.append(0)
        return self._last

    def begin_epoch(self) -> None:
        """Begins an epoch."""
        self._reads, self._batch, self._batch_before = self._now(), 0, 0

    def step(self, batch: int) -> None:
        """Records how many batches of this epoch have been read."""
        self._batch, self._reading, self._read_from = batch, len(self._reads), self._last

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
        position = Position(
            way=way,
            batch=(self._batch or self._batch_before) if in_epoch else 0,
            over=over,
            reads=self._now()[: self._reading] if reading else self._now(),
            batches=self._epochs._num_batches,
            seen=self._epochs._steps_seen,
            seeds=self._seeds(),
        )
        return asdict(position), arrays

    def _seeds(self) -> list[list[int]] | None:
        return seeds_of(self._dataset) if isinstance(self._dataset, tf.data.Dataset) and not self._plan else None

    def _way(self, iterator: Any) -> tuple[Way, dict[str, np.ndarray]]:
        if self._plan is not None:
            return "plan", {}
        if self._obstacle is not None:
            return "none", {}
        changing = changes(self._epochs.data_adapter, self._dataset)
        if changing is None and not all_counts(self._dataset):
            return "skip", {}
        state = self._state(iterator) if isinstance(iterator, OwnedIterator) else None
        if changing is None:  # skipping would read all that was read before
            return ("skip", {}) if state is None or not is_complete(state, self._dataset) else ("state", {STATE: state})
        if state is None:
            self._obstacle = self._obstacle or changing
            return "none", {}
        return "state", {STATE: state}

    def _state(self, iterator: Any) -> np.ndarray | None:
        """The state of an iterator, unless it is too large."""
        # Of arrays the state holds what Keras' random operation drew.
        policy = _IGNORE if isinstance(self._epochs.data_adapter, ArrayDataAdapter) else _FAIL
        try:
            saved = gen_dataset_ops.serialize_iterator(iterator._iterator_resource, external_state_policy=policy)
        except tf.errors.OpError as error:
            self._obstacle = summarize_error(error)
            return None
        state = np.frombuffer(tf.io.serialize_tensor(saved).numpy(), np.uint8)
        if state.nbytes <= _MOST_BYTES:
            return state
        self._obstacle = (
            f"a dataset whose iterator's state takes {readable_bytes(state.nbytes)}, mostly elements in the buffer of "
            "a shuffle without a seed, or in a cache"
        )
        return None

    def resume(self, saved: Mapping[str, Any], arrays: Mapping[str, np.ndarray], *, in_epoch: bool) -> int:
        """Goes to a position that `save` returned; returns at which batch of its epoch the training goes on.

        Call it before the epoch begins, or within `on_epoch_begin` if the position lies in the epoch.
        """
        position = Position(**saved)
        self._batch_before = position.batch if position.over else 0
        without = (self._obstacle or "a checkpoint without one") if position.way == "none" else None
        if reason := without or self._difference(position):
            return self._give_up(position, reason, in_epoch=in_epoch)
        if self._plan is not None:
            vars(self._dataset)[_CONTINUED] = True
        reading = in_epoch and not position.over
        continued = reading or (self._epochs.steps_per_epoch is not None and bool(position.reads))
        if position.way == "plan":
            if not self._move(position.reads, continued=continued):
                return self._give_up(position, str(self._obstacle), in_epoch=in_epoch)
        else:
            self._open_again(position, arrays)
        self._reads = list(position.reads)
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

    def _move(self, reads: list[int], *, continued: bool) -> bool:
        """Goes on with the pipeline from a position on; returns whether it was found."""
        assert self._plan is not None
        before = reads[:-1] if continued else reads
        for _ in before:
            self._begin()
        first = few_of(self._begin())
        read = sum(batches > 0 for batches in before)
        begun = iterations_before(self._plan, len(before), read, first, self._first_of)
        if begun is None:
            self._obstacle = "a pipeline that yields different batches now, or was iterated too often before fit"
            self._plan = None  # its iterations are no longer counted from those of `fit` alone
            return False
        moved = self._plan.at(begun[1], reads[-1] if continued else 0, opened=begun[0])
        dataset = self._prepared(moved.build())
        self._open_stock = lambda: dataset
        if continued:
            self._last = iter(dataset)
        return True

    def _begin(self) -> Any:
        """A new iterator of what `fit` iterates; of a device stage over indices, so that nothing is loaded."""
        stage = stage_of(self._dataset)
        return iter(self._open_stock() if stage is None else stage.elements)

    def _first_of(self, dataset: Any) -> Any:
        stage = stage_of(dataset)
        return few_of(self._prepared(dataset) if stage is None else stage.elements)

    def _open_again(self, position: Position, arrays: Mapping[str, np.ndarray]) -> None:
        """Opens as many iterators as before, and brings the last one to the position."""
        everything = position.way == "skip" and all_counts(self._dataset)
        for number, batches in enumerate(position.reads, 1):
            self._last = iter(self._open_stock())
            if everything or (position.way == "skip" and number == len(position.reads)):
                for _ in range(batches):
                    next(self._last, None)  # of data of unknown length, more may have been counted than there are
        if position.way == "state" and position.reads:
            state = tf.io.parse_tensor(arrays[STATE].tobytes(), tf.variant)
            gen_dataset_ops.deserialize_iterator(self._last._iterator_resource, state)

    def close(self) -> None:
        """Lets go of the iterators, so that they end with `fit` and not in some later garbage collection."""
        if self._epochs is not None:
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
            return "a shuffle with another seed than in the checkpoint, such as one that is drawn in each process"
        if self._plan is not None and _CONTINUED in vars(self._dataset):
            return "a pipeline that an earlier fit of this script continued; build one for each fit"
        if not position.over and position.batch % self._epochs.steps_per_execution:
            return f"steps_per_execution={self._epochs.steps_per_execution} after {position.batch:,} batches"
        return None

    def _warn(self, reason: str, consequence: str) -> None:
        warn_once(
            f"position {reason}",
            f"Expected data whose position can be found again. Found: {reason}. {consequence}. {_BETTER}",
        )


class Opening:
    """What `iter` is called on."""

    def __init__(self, opened: Callable[[], Any]):
        self._opened = opened

    def __iter__(self) -> Any:
        return self._opened()


class ValidationData:
    """Counts how often a `fit` opens its validation data: each time, a shuffle in them draws another order.

    If the training data are part of the same dataset, they share that shuffle.
    """

    def __init__(self) -> None:
        self.opened = 0
        """How often they were opened."""
        self.opened_before = 0
        """The same when the running validation began, or the last one."""

    def begin(self, epochs: Any) -> None:
        """Begins a validation, given its `TFEpochIterator`."""
        self.opened_before = self.opened
        if "_get_iterator" not in vars(epochs):
            stock = epochs._get_iterator
            epochs._get_iterator = lambda: Opening(lambda: self._open(stock))

    def _open(self, stock: Callable[[], Any]) -> Any:
        self.opened += 1
        return iter(stock())

    def resume(self, opened: int, dataset: tf.data.Dataset | None) -> None:
        """Opens the dataset as often as before, if its order depends on that; None for other data."""
        self.opened = self.opened_before = opened
        if dataset is not None and draws_by_opening(dataset):
            for _ in range(opened):
                iter(dataset)
