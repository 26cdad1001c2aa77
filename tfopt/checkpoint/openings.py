"""The iterators of a dataset that draws: each that is opened has another order, for all datasets with that shuffle."""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import tensorflow as tf

from tfopt.checkpoint.datasets import drawing, draws_by_opening, places_of, positions_of

_OPENED = "_tfopt_opened"  # an attribute of stages that draw


class Openings:
    """How many iterators of a dataset have been opened in this process, also for other datasets with its shuffle.

    Args:
        dataset: A dataset; nothing is counted of one that does not draw.
        copied: Whether a strategy copies it, with a shuffle of its own.
    """

    def __init__(self, dataset: Any, *, copied: bool):
        stages = drawing(dataset)
        self._counting: list[Any] = [SimpleNamespace()] if stages and copied else stages
        self.any_draws = bool(stages)
        """Whether any stage of the dataset draws."""

    @property
    def count(self) -> int:
        """The number."""
        return max((getattr(stage, _OPENED, 0) for stage in self._counting), default=0)

    @count.setter
    def count(self, number: int) -> None:
        for stage in self._counting:
            setattr(stage, _OPENED, number)

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
        dataset: The data, if they are a dataset.
    """

    def __init__(self, dataset: tf.data.Dataset | None):
        self._dataset, self._openings = dataset, Openings(dataset, copied=False)
        self.places = [] if dataset is None else places_of(dataset)
        """Of the pipelines from which they are made."""
        self.before = self.now()
        """Where they were when the running validation began, or the last one."""

    def now(self) -> dict[str, Any]:
        """Returns where they are, as JSON values."""
        return {"opened": self._openings.count, "places": positions_of(place.position for place in self.places)}

    def begin(self, epochs: Any) -> None:
        """Begins a validation, given its `TFEpochIterator`."""
        self.before = self.now()
        if "_get_iterator" not in vars(epochs):
            stock = epochs._get_iterator
            epochs._get_iterator = lambda: Opening(lambda: self._open(stock))

    def _open(self, stock: Callable[[], Any]) -> Any:
        self._openings.count += 1
        return iter(stock())

    def resume(self, found: Mapping[str, Any]) -> None:
        """Brings the pipelines to where `now` or `before` was."""
        for place, at in zip(self.places, found["places"], strict=False):
            place.move(place.at(*at))

    def resume_draws(self, found: Mapping[str, Any]) -> None:
        """Does so with another dataset that draws, after the training data, which may share its shuffle."""
        if self._dataset is not None and draws_by_opening(self._dataset):
            self._openings.reach(found["opened"], lambda: self._dataset)
        self.before = self.now()
