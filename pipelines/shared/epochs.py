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
    in_batches,
    many_at_once,
    permutation,
    shuffle,
    steps_of,
)

_JOINED = -1


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
        self._tickets = {_JOINED}  # of iterations that took their position in this process
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

    def join(self, _: Any) -> Any:
        """Returns the same of the iteration that began last, without a number of its own."""
        taken = self.taken
        return np.array([taken.seed or 0, taken.epoch, taken.batch, _JOINED], np.int64)

    def begin(self, numbers: Any) -> Position:
        """Begins an iteration, given what `take` or `join` returned; returns its position.

        An iterator that TensorFlow restores does so too, perhaps in another process, where it has not taken it.
        """
        *position, ticket = map(int, numbers)
        with self._lock:
            if ticket not in self._tickets:
                self._tickets.add(ticket)
                self._follow(Position(*position))
        return Position(*position)

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
class Draw:
    """What draws, and by what."""

    part: str  # one of PARTS
    lasts: bool = False  # whether all epochs share it
    mixed: int | None = None  # the number of a part of a mixture
    seed: int | None = None  # its own, reduced

    def key(self, position: Position) -> Any:
        """Returns the numbers that decide the draw: int64 (2,)."""
        root = [position.seed or 0] + ([] if self.mixed is None else [self.mixed])
        root = root if self.seed is None else [self.seed]
        of = [0 if self.lasts else position.epoch + 1, PARTS.index(self.part), len(root), *root]
        return np.random.SeedSequence(of).generate_state(2, np.uint64).view(np.int64)  # stable across NumPy's versions


class Keys:
    """The keys of all draws in an epoch, in the order in which the graph that makes it asks for them.

    NumPy computes them: in the graph they would take some thirty nodes each, which TensorFlow optimises in each epoch.
    """

    def __init__(self) -> None:
        self._draws: list[Draw] = []

    def place(self, draw: Draw) -> int:
        """Returns at which place the key of a draw is."""
        if draw not in self._draws:
            self._draws.append(draw)
        return self._draws.index(draw)

    def of(self, position: Position) -> Any:
        """Returns the keys in an epoch: int64 (2 * draws)."""
        return np.concatenate([np.zeros(0, np.int64), *(draw.key(position) for draw in self._draws)])


@dataclass(frozen=True, slots=True)
class Readings:
    """How often an epoch reads the elements whose order is decided, and what it leaves out at first."""

    skipped: Any = 0  # elements, of all readings
    times: int = 1
    count: int = 0  # elements, if there are several readings

    def each(self, one: Callable[[Any], Any]) -> Any:
        """Returns the dataset of what a function returns for each reading, given its number from 0."""
        if self.times == 1:
            return self.without(self.skipped, one(0))
        numbers = tf.data.Dataset.range(self.whole, self.times)
        return self.without(self.rest, numbers.flat_map(without_autograph(one)))

    def again(self, dataset: Any) -> Any:
        """Returns a dataset in the same order for each reading."""
        return self.without(self.rest, dataset if self.times == 1 else dataset.repeat(self.times - self.whole))

    @property
    def whole(self) -> Any:
        """Readings that are left out: int64 scalar."""
        return tf.cast(self.skipped // self.count if self.times > 1 else 0, tf.int64)

    @property
    def rest(self) -> Any:
        """Elements that are left out of the next one: an integer or int64 scalar."""
        return self.skipped % self.count if self.times > 1 else self.skipped

    @staticmethod
    def without(skipped: Any, dataset: Any) -> Any:
        """Returns a dataset without its first elements."""
        return dataset if isinstance(skipped, int) and not skipped else dataset.skip(skipped)

    def left(self, count: int) -> Any:
        """Returns how many elements are left, of so many in each reading: int64 scalar."""
        return tf.maximum(tf.cast(count * self.times - self.skipped, tf.int64), 0)


@dataclass(frozen=True, slots=True)
class Epoch:
    """One reading of all data, in the graph that makes a dataset of it."""

    number: Any  # int64 scalar, from 0
    batch: Any  # int64 scalar: batches of it that are left out at first
    key_at: Callable[[Draw], Any]
    readings: Readings = Readings()  # by the stage that decides the order
    mixed: int | None = None  # the number of a part of a mixture
    seed: int | None = None  # its own, reduced

    @classmethod
    def first(cls, seed: int) -> "Epoch":
        """Returns the first epoch under a seed, outside of a graph."""

        def key_at(draw: Draw) -> Any:
            with tf.device("CPU:0"):  # eager constants go to the GPU where there is one
                return tf.constant(draw.key(Position(seed)), tf.int64)

        return cls(tf.constant(0, tf.int64), tf.constant(0, tf.int64), key_at)

    def of_part(self, number: int, seed: int | None, readings: Readings) -> "Epoch":
        """Returns the same epoch of a part of a mixture, which may have a seed of its own."""
        return replace(self, mixed=number, seed=None if seed is None else reduced(seed), readings=readings)

    def key(self, part: str, reading: Any = 0) -> Any:
        """Returns what decides the draws of one of `PARTS`: int64, shape (2,).

        `reading` tells readings of the same data in one epoch apart, an integer or int64 scalar.
        """
        key = self.key_at(Draw(part, False, self.mixed, self.seed))
        return key if isinstance(reading, int) else key + tf.stack([tf.constant(0, tf.int64), reading])

    def lasting_key(self, part: str) -> Any:
        """Returns the same for draws that all epochs share."""
        return self.key_at(Draw(part, True, self.mixed, self.seed))


def in_epochs(
    place: Place,
    made: Callable[[Epoch], Any],
    *,
    begins: bool = True,
    outside: Sequence[Any] = (),
) -> Any:
    """Returns a dataset of which each iteration is what a function makes of its epoch.

    TensorFlow sets up what is in this function anew for each iteration, twice: it should be little.

    Args:
        place: Where the epochs are taken from.
        made: Called once, in a graph.
        begins: Whether an iteration begins here, and takes its position with its first element. Otherwise it is that of
            the iteration that began last, so something before must have begun it by then.
        outside: Datasets that the function reads, and does not make.
    """
    around, keys = tf.__internal__.autograph.control_status_ctx(), Keys()

    @without_autograph
    def epoch(taken: Any) -> Any:
        def begin(numbers: Any) -> Any:
            position = place.begin(numbers)
            return np.concatenate([[position.epoch], keys.of(position)])

        begun = _called(begin, taken)
        with around:  # users' functions are converted as outside of this one
            return made(Epoch(begun[0], taken[2], _in(keys, begun[1:])))

    # What is taken is an element, which a saved iterator keeps.
    take = place.take if begins else place.join
    taken = tf.data.Dataset.range(1).map(without_autograph(lambda first: _called(take, first)))
    dataset = taken.flat_map(epoch)
    dataset._inputs = lambda: [taken, *outside]  # for those who look for functions
    return dataset


def in_chunks(place: Place, chunk: Callable[[Position, int], Any], chunks: int, *, begins: bool) -> Any:
    """Returns a dataset of vectors that Python makes of each iteration's position: int64 (of any length).

    TensorFlow sets up less for it than for `in_epochs`, of which it has `place` and `begins`.

    Args:
        place: Where the positions are taken from.
        chunk: Given the position and a number from 0, returns a vector.
        chunks: How many there are.
        begins: Whether an iteration begins here.
    """
    take = place.take if begins else place.join

    def step(taken: Any, number: Any) -> Any:
        taken = taken if taken.any() else take(number)
        return taken, chunk(place.begin(taken), int(number))

    @without_autograph
    def called(taken: Any, number: Any) -> Any:
        following, drawn = tf.numpy_function(step, [taken, number], [tf.int64, tf.int64], stateful=False)
        return tf.ensure_shape(following, [4]), tf.ensure_shape(drawn, [None])

    # What is taken is a state, which a saved iterator keeps.
    dataset = tf.data.Dataset.range(chunks).scan(tf.zeros(4, tf.int64), called)
    dataset._functions = list  # for those who look for a user's
    return dataset


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
        own = None if seed is None else reduced(seed)
        return made(Epoch(zero, zero, _in(keys, begun), mixed=mixed, seed=own))

    # What decides the order is an element, as in `in_epochs`.
    begun = tf.data.Dataset.range(1).map(
        without_autograph(
            lambda first: _called(lambda _: keys.of(Position(place.lasting_seed(drawn=seed is None))), first)
        )
    )
    return begun.flat_map(order)


def _in(keys: Keys, begun: Any) -> Callable[[Draw], Any]:
    """Returns how a draw finds its key among all keys of an epoch."""
    pairs = tf.reshape(begun, (-1, 2))
    return lambda draw: pairs[keys.place(draw)]


def reshuffled(dataset: Any, buffer: int, epoch: Epoch, reading: Any, *, rests: bool) -> Any:
    """Returns a dataset shuffled otherwise in each reading of each epoch; with `rests`, the very first one as it is."""
    size: Any = buffer
    if rests:
        first = tf.logical_and(tf.equal(epoch.number, 0), tf.equal(tf.cast(reading, tf.int64), 0))
        size = tf.where(first, tf.constant(1, tf.int64), buffer)
    return shuffle(dataset, size, epoch.key("shuffle", reading))


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
