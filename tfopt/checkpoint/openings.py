"""The iterators of a dataset that draws: each that is opened has another order, for all datasets with that shuffle."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfopt.checkpoint.datasets import drawing, draws_by_opening, places_of, positions_of
from tfopt.internals.training import TFEpochIterator

_OPENED = "_tfopt_opened"  # an attribute of stages that draw


class Openings:
    """How many iterators of a dataset have been opened in this process, also for other datasets with its shuffle.

    Args:
        dataset: A dataset; nothing is counted of one that does not draw. A strategy that distributes it reads its
            shuffle, too.
    """

    def __init__(self, dataset: Any):
        self._counting = drawing(dataset)
        self.any_draws = bool(self._counting)
        """Whether any stage of the dataset draws."""

    @property
    def count(self) -> int:
        """The number."""
        return max((getattr(stage, _OPENED, 0) for stage in self._counting), default=0)

    @count.setter
    def count(self, number: int) -> None:
        for stage in self._counting:
            setattr(stage, _OPENED, number)

    def shares(self, other: "Openings") -> bool:
        """Whether both datasets have a shuffle in common."""
        return any(stage is another for stage in self._counting for another in other._counting)

    def reach(self, number: int, data: Callable[[], Any]) -> None:
        """Opens iterators of the data until there are so many."""
        while self.any_draws and self.count < number:
            iter(data())
            self.count += 1


class Opening:
    """What `iter` is called on."""

    def __init__(self, opened: Callable[[], Any]):
        self._opened = opened

    def __iter__(self) -> Any:
        return self._opened()


class ValidationData:
    """Follows the validation data of a `fit`: a pipeline's place in them, or how often another dataset was opened.

    Each time, a shuffle in them draws another order. If the training data are part of the same dataset, they share that
    shuffle.

    Args:
        model: The model that trains.
        dataset: The data, if they are a dataset.
        steps: Of a validation, if `fit` was told.
    """

    def __init__(self, model: keras.Model, dataset: tf.data.Dataset | None, steps: int | None):
        self._dataset, self._epochs = dataset, None
        self.openings = Openings(dataset)
        """Of the data."""
        self.places = [] if dataset is None else places_of(dataset)
        """Of the pipelines from which they are made."""
        self._is_running = False
        # Under a strategy Keras reads a batch before each validation, to build the model: from the iterator of the
        # validation before, if that has left it.
        self._leaves_iterator = False
        self._builds = model._distribute_strategy is not None
        self.before = self.now()
        """Where they were when the running validation began, or the last one."""
        if dataset is not None:  # Keras would make it later, where nothing learns of what the build opens
            self._epochs = model._eval_epoch_iterator = TFEpochIterator(
                x=dataset,
                distribute_strategy=model.distribute_strategy,
                steps_per_execution=model.steps_per_execution,
                steps_per_epoch=steps,
                shuffle=False,
            )
            stock = self._epochs._get_iterator
            self._epochs._get_iterator = lambda: Opening(lambda: self._open(stock))

    def now(self) -> dict[str, Any]:
        """Returns where they are, as JSON values."""
        places = positions_of(place.position for place in self.places)
        return {"opened": self.openings.count, "places": places, "leaves_iterator": self._leaves_iterator}

    def _open(self, stock: Callable[[], Any]) -> Any:
        if not self._is_running:
            self._is_running, self.before = True, self.now()
        self.openings.count += 1
        return iter(stock())

    @property
    def iterations(self) -> int:
        """How many iterators the next validation reads."""
        return 1 + (self._builds and not self._leaves_iterator)

    def end(self) -> None:
        """Ends a validation."""
        self._is_running = False
        if (epochs := self._epochs) is not None:
            self._leaves_iterator = epochs.steps_per_epoch is not None and epochs._current_iterator is not None

    def resume(self, found: Mapping[str, Any]) -> None:
        """Brings the pipelines to where `now` or `before` was."""
        if self._epochs is None:
            return
        for place, at in zip(self.places, found["places"], strict=False):
            place.move(place.at(*at))
        self._leaves_iterator = found.get("leaves_iterator", False)
        if self._leaves_iterator and self._builds:
            epochs = self._epochs

            def nothing() -> Iterator[Any]:
                del epochs._enumerate_iterator
                return iter(())

            epochs._enumerate_iterator = nothing

    def resume_draws(self, found: Mapping[str, Any]) -> None:
        """Does so with another dataset that draws, after the training data, which may share its shuffle."""
        if draws_by_opening(self._dataset):
            self.openings.reach(found["opened"], lambda: self._dataset)
        self.before = self.now()
