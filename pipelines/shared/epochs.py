"""Positions in the data of a pipeline, what the draws of an epoch follow from, and the dataset of all epochs."""

import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.pipelines.shared.elements import without_autograph
from tfopt.pipelines.shared.seeding import (
    PARTS,
    either,
    in_batches,
    in_turns,
    many_at_once,
    permutation,
    shuffle,
    steps_of,
)


@dataclass(frozen=True, slots=True)
class Position:
    """A place in the data of a pipeline."""

    seed: int | None  # of all draws; None in a plan whose dataset draws one
    epoch: int = 0  # counted from 0
    batch: int = 0  # batches of that epoch that come before

    @property
    def is_start(self) -> bool:
        """Whether nothing comes before."""
        return self.epoch == self.batch == 0

    def __str__(self) -> str:
        return f"epoch {self.epoch}, batch {self.batch}"


class Place:
    """The position from which the next iteration of a dataset reads.

    An iteration takes it when its first batch is read, and leaves the start of the following epoch to the next one. So
    one that is begun and not read changes nothing, and `move` sends the next one anywhere.
    """

    def __init__(self, position: Position, *, given: bool = True):
        self._given = given  # whether the seed was, not drawn
        self._lock = threading.Lock()
        self._next = [position]
        self._tickets: set[int] = set()  # of iterations that took their position in this process
        self.taken = position
        """That of the last iteration which began."""
        self.lasting: int | None = None
        """The seed of an order that all iterations share, such as that of a cache in memory, once one has been read."""

    @property
    def position(self) -> Position:
        """That of the next iteration."""
        return self._next[0]

    def move(self, *positions: Position) -> None:
        """Has the next iterations begin at these positions, one each; those after them, at the epochs that follow."""
        with self._lock:
            self._next = list(positions)

    def settle(self) -> None:
        """Forgets positions of iterators that were not read, but for the last one."""
        with self._lock:
            self._next = self._next[-1:]

    def at(self, seed: int, epoch: int, batch: int) -> Position:
        """Returns a position that was saved, under the seed that this dataset was given, if it was given one."""
        return Position(self.position.seed if self._given else seed, epoch, batch)

    def lasting_seed(self, *, drawn: bool) -> int:
        """Returns the seed of an order that is read now, and kept; notes one that was `drawn`."""
        seed = self.position.seed or 0
        if drawn:
            self.lasting = seed
        return seed

    def take(self, _: Any) -> Any:
        """Returns the seed, epoch and batch of an iteration that begins, and a number of its own: int64 (4,)."""
        with self._lock:
            taken, ticket = self._next[0], secrets.randbits(62)
            self._follow(taken, *self._next[1:])
            self._tickets.add(ticket)
        return np.array([taken.seed or 0, taken.epoch, taken.batch, ticket], np.int64)

    def begin(self, numbers: Any) -> tuple[int, int]:
        """Begins an iteration, given what `take` returned; returns its seed and epoch.

        An iterator that TensorFlow restores does so too, perhaps in another process, where it has not taken it.
        """
        *position, ticket = map(int, numbers)
        with self._lock:
            if ticket in self._tickets:
                self._tickets.remove(ticket)
            else:
                self._follow(Position(*position))
        return position[0], position[1]

    def _follow(self, taken: Position, *waiting: Position) -> None:
        self.taken = taken
        self._next = [*waiting] or [replace(taken, epoch=taken.epoch + 1, batch=0)]  # never empty: others look at it


def drawn_seed() -> int:
    """Returns a random seed, the same on every run after `tf.random.set_seed`."""
    with tf.device("CPU:0"):
        return int(tf.random.uniform((), maxval=2**31 - 1, dtype=tf.int64))


def reduced(seed: int) -> int:
    """Returns a seed of any size in 32 bits."""
    return int(np.random.SeedSequence(seed).generate_state(1)[0])  # stable across NumPy's versions


@dataclass(frozen=True, slots=True)
class _Draw:
    """What draws, and by what."""

    part: str  # one of PARTS
    mixed: int | None  # the number of a part of a mixture
    seed: int | None  # its own, reduced
    lasts: bool  # whether all epochs share it

    def key(self, seed: int, epoch: int) -> Any:
        """Returns the numbers that decide the draw: int64 (2,)."""
        root = (seed, *([] if self.mixed is None else [self.mixed])) if self.seed is None else (self.seed,)
        of = [0 if self.lasts else epoch + 1, PARTS.index(self.part), len(root), *root]
        return np.random.SeedSequence(of).generate_state(2, np.uint64).view(np.int64)  # stable across NumPy's versions


class Keys:
    """The keys of all draws in an epoch, in the order in which the graph that makes it asks for them.

    NumPy computes them: in the graph they would take some thirty nodes each, which TensorFlow optimises in each epoch.
    """

    def __init__(self) -> None:
        self._draws: list[_Draw] = []

    def place(self, draw: _Draw) -> int:
        """Returns at which place the key of a draw is."""
        if draw not in self._draws:
            self._draws.append(draw)
        return self._draws.index(draw)

    def of(self, seed: int, epoch: int) -> Any:
        """Returns the keys in one epoch: int64 (2 * draws)."""
        return np.concatenate([np.zeros(0, np.int64), *(draw.key(seed, epoch) for draw in self._draws)])


@dataclass(frozen=True, slots=True)
class Epoch:
    """One reading of all data, in the graph that makes its dataset."""

    number: Any  # int64 scalar, from 0
    batch: Any  # int64 scalar: batches of it that are left out at first
    key_at: Callable[[_Draw], Any]
    mixed: int | None = None  # the number of a part of a mixture
    seed: int | None = None  # its own, reduced

    @classmethod
    def first(cls, seed: int) -> "Epoch":
        """Returns the first epoch under a seed, outside of a graph."""

        def key_at(draw: _Draw) -> Any:
            with tf.device("CPU:0"):  # eager constants go to the GPU where there is one
                return tf.constant(draw.key(seed, 0), tf.int64)

        return cls(tf.constant(0, tf.int64), 0, key_at)

    def of_part(self, number: int, seed: int | None) -> "Epoch":
        """Returns the same epoch of a part of a mixture, which may have a seed of its own."""
        return replace(self, mixed=number, seed=None if seed is None else reduced(seed))

    def key(self, part: str, reading: Any = 0) -> Any:
        """Returns what decides the draws of one of `PARTS`: int64, shape (2,).

        `reading` tells readings of the same data in one epoch apart, an integer or int64 scalar.
        """
        key = self.key_at(_Draw(part, self.mixed, self.seed, lasts=False))
        return key if isinstance(reading, int) else key + tf.stack([tf.constant(0, tf.int64), reading])

    def lasting_key(self, part: str) -> Any:
        """Returns the same for draws that all epochs share."""
        return self.key_at(_Draw(part, self.mixed, self.seed, lasts=True))


@dataclass(frozen=True, slots=True)
class Readings:
    """How often an epoch reads the elements whose order is decided, and what it leaves out at first."""

    times: int = 1
    whole: Any = 0  # readings
    rest: Any = 0  # elements of the reading after those

    @property
    def is_one(self) -> bool:
        """Whether that is one whole reading."""
        return self.times == 1 and isinstance(self.rest, int) and not self.rest

    def each(self, one: Callable[[Any], Any]) -> Any:
        """Returns the dataset of what a function returns for each reading, given its number from 0."""
        if self.times == 1:
            return self.without_rest(one(0))
        numbers = tf.data.Dataset.range(tf.cast(self.whole, tf.int64), self.times)
        return self.without_rest(numbers.flat_map(without_autograph(one)))

    def again(self, dataset: Any) -> Any:
        """Returns a dataset in the same order for each reading."""
        return self.without_rest(dataset if self.times == 1 else dataset.repeat(self.times - self.whole))

    def without_rest(self, dataset: Any) -> Any:
        """Returns a dataset of what is left of the readings."""
        return dataset if isinstance(self.rest, int) and not self.rest else dataset.skip(self.rest)

    def left(self, count: int) -> Any:
        """Returns how many elements are left, of so many in each reading."""
        return tf.maximum(tf.cast(count * (self.times - self.whole) - self.rest, tf.int64), 0)


def in_epochs(place: Place, made: Callable[[Epoch], Any], length: int | None, outside: Sequence[Any] = ()) -> Any:
    """Returns a dataset of which each iteration is what a function makes of its epoch, taken with its first element.

    Args:
        place: Where the epochs are taken from.
        made: Called once, in a graph.
        length: Elements of a whole epoch; None if unknown. Keras takes the steps of all epochs from the dataset, also
            if the first one begins in its middle.
        outside: Datasets that are not made in each epoch.
    """
    around, keys = tf.__internal__.autograph.control_status_ctx(), Keys()

    @without_autograph
    def epoch(taken: Any) -> Any:
        def begin(numbers: Any) -> Any:
            seed, number = place.begin(numbers)
            return np.concatenate([[number], keys.of(seed, number)])

        begun = _called(begin, taken)
        with around:  # users' functions are converted as outside of this one
            return made(Epoch(begun[0], taken[2], _in(keys, begun[1:])))

    # What is taken is an element, which a saved iterator keeps.
    taken = tf.data.Dataset.range(1).map(without_autograph(lambda first: _called(place.take, first)))
    dataset = taken.flat_map(epoch)
    dataset._inputs = lambda: [taken, *outside]  # for those who look for functions
    # An iterator of a shuffle makes that of its input when it is first read. TensorFlow sets up all functions for each,
    # and Keras opens two an epoch and reads one.
    late = shuffle(dataset, 1, tf.constant([1, 1], tf.int64))
    return late if length is None else _of_length(late, length)


def in_one_order(place: Place, mixed: int | None, seed: int | None, made: Callable[[Epoch], Any]) -> Any:
    """Returns a dataset that a function makes of an epoch whose number is not used, since all iterations are alike.

    Args:
        place: Has the seed, unless `seed` is given.
        mixed: The number of the part of a mixture, if it is one.
        seed: Its own.
        made: Called once, in a graph.
    """
    keys = Keys()

    @without_autograph
    def order(begun: Any) -> Any:
        zero = tf.constant(0, tf.int64)
        return made(Epoch(zero, zero, _in(keys, begun), mixed, None if seed is None else reduced(seed)))

    # What decides the order is an element, as in `in_epochs`.
    begun = tf.data.Dataset.range(1).map(
        without_autograph(lambda first: _called(lambda _: keys.of(place.lasting_seed(drawn=seed is None), 0), first))
    )
    return begun.flat_map(order)


def _in(keys: Keys, begun: Any) -> Callable[[_Draw], Any]:
    """Returns how a draw finds its key among all keys of an epoch."""
    pairs = tf.reshape(begun, (-1, 2))
    return lambda draw: pairs[keys.place(draw)]


def reshuffled(dataset: Any, buffer: int, epoch: Epoch, reading: Any, *, rests: bool) -> Any:
    """Returns a dataset shuffled otherwise in each reading of each epoch; with `rests`, the very first one as it is."""
    shuffled = shuffle(dataset, buffer, epoch.key("shuffle", reading))
    if not rests:
        return shuffled
    first = tf.logical_and(tf.equal(epoch.number, 0), tf.equal(tf.cast(reading, tf.int64), 0))
    return either(first, dataset, shuffled)


def in_one_permutation(count: int, place: Place, mixed: int | None, seed: int | None) -> Any:
    """Returns one permutation of the numbers below `count` for all iterations, that of a cache; as `in_one_order`."""

    def cut(size: int | None, *, full: bool = False) -> Any:
        def drawn(epoch: Epoch) -> Any:
            order = permutation(count, epoch.lasting_key("mix"))
            return order if size is None else in_batches(order, size, full=full)

        made = in_one_order(place, mixed, seed, drawn)
        return made.apply(tf.data.experimental.assert_cardinality(steps_of(count, size or 1, full=full)))

    return many_at_once(cut)


def _called(function: Callable[[Any], Any], element: Any) -> Any:
    """Returns the int64 vector that a Python function returns for an element, in a graph."""
    # `stateful`, no iterator could be saved; and without the element, TensorFlow would compute it when it optimises.
    found = tf.numpy_function(function, [element], tf.int64, stateful=False)
    found.set_shape([None])
    return found


def _of_length(dataset: Any, length: int) -> Any:
    """Returns a dataset that says this of its length, and may end before."""
    # TensorFlow takes a choice for endless if one of its datasets is. This one is never read; assert_cardinality would
    # raise an error at the end of a shorter iteration.
    endless = dataset.take(0).apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))
    chosen = in_turns(tf.data.Dataset.from_tensors(tf.constant(0, tf.int64)).repeat(), [dataset, endless])
    if length == tf.data.INFINITE_CARDINALITY:
        return chosen
    # `take` would not ask for the end, without which a cache in memory is not whole. TensorFlow does not run a function
    # that only passes on what it is given.
    numbered = tf.data.Dataset.zip(chosen, tf.data.Dataset.range(length))
    return numbered.map(without_autograph(lambda element, _: element))
