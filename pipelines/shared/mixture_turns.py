"""In which order the parts of a mixture take turns, so that each keeps its share all along."""

import heapq
import itertools
import math
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.pipelines.shared.elements import without_autograph

_MOST = 2**30  # for the sum of the weights: in `turns`, its square must stay below 2**62
_CHUNK = 1024  # turns that are computed at once
_NUMBERS = range(sys.maxsize)  # of turns


@dataclass(frozen=True, slots=True)
class Schedule:
    """A fixed order in which parts take turns.

    A tree of pairs, built as Huffman's code is. Of the n turns of a pair, its left side has n times its share, rounded
    to the nearest whole number. So of the first n turns, each of two parts has its share to within half a turn, and
    each of any number of parts to within 1.7 turns: half a turn on each level, scaled by the part's share of the pair
    below it. Huffman's order makes these pairs grow as Fibonacci's numbers do, or faster.
    """

    weights: tuple[int, ...]  # without a common divisor; the order repeats after their sum

    @property
    def period(self) -> int:
        """Turns after which the order repeats."""
        return sum(self.weights)

    def share(self, part: int) -> float:
        """Returns a part's share of the turns."""
        return self.weights[part] / self.period

    def counts(self, turns: Any) -> list[Any]:
        """Returns how many of the first so many turns each part has; of an array of numbers, arrays."""
        periods, left = turns // self.period, turns % self.period
        counts = [periods * weight for weight in self.weights]

        def count(node: "_Node", turns: Any) -> None:
            if node.part is not None:
                counts[node.part] = counts[node.part] + turns
                return
            lefts = node.left_of(turns)
            count(node.sides[0], lefts)
            count(node.sides[1], turns - lefts)

        count(_tree(self.weights), left)
        return counts

    def turns_within(self, part: int, count: int) -> int:
        """Returns how many turns there are before a part takes one more than `count`."""
        return bisect_right(_NUMBERS, count, key=lambda turns: self.counts(turns)[part]) - 1

    def turns_until(self, part: int, count: int) -> int:
        """Returns after how many turns a part has taken `count`."""
        return bisect_left(_NUMBERS, count, key=lambda turns: self.counts(turns)[part])

    def turns(self, numbers: Any) -> Any:
        """Returns which part has each of these turns, counted from 0, as int64 tensors."""

        def turn(node: "_Node", numbers: Any) -> Any:
            if node.part is not None:
                return tf.fill(tf.shape(numbers), tf.constant(node.part, tf.int64))
            lefts = node.left_of(numbers)
            left, right = (turn(side, of) for side, of in zip(node.sides, (lefts, numbers - lefts), strict=True))
            return tf.where(node.left_of(numbers + 1) > lefts, left, right)

        return turn(_tree(self.weights), numbers % self.period)

    def dataset(self, first: Any, end: int | None) -> Any:
        """Returns a dataset of which part has each turn from `first` on, to before `end`; endless for None."""
        stop = tf.int64.max - _CHUNK if end is None else end

        @without_autograph
        def chunk(start: Any) -> Any:
            return tf.data.Dataset.from_tensor_slices(
                self.turns(tf.range(start, tf.minimum(start + _CHUNK, stop), dtype=tf.int64))
            )

        return tf.data.Dataset.range(first, stop, _CHUNK).flat_map(chunk)


@dataclass(frozen=True, slots=True)
class OwnTurns(Schedule):
    """The turns that one of several processes has, which divide each batch of a mixture in blocks."""

    block: int
    index: int
    parts: int

    def of_whole(self, numbers: Any) -> Any:
        """Returns which turns of the whole schedule these are, counted from 0."""
        return (numbers // self.block * self.parts + self.index) * self.block + numbers % self.block

    def turns(self, numbers: Any) -> Any:
        """As `Schedule.turns`."""
        return Schedule.turns(self, self.of_whole(numbers))

    def counts(self, turns: Any) -> list[Any]:
        """As `Schedule.counts`, of an integer or of an int64 scalar in a graph."""
        if isinstance(turns, int):
            return np.bincount(self.turns(np.arange(turns)), minlength=len(self.weights)).tolist()
        chosen = self.turns(tf.range(turns))
        return [tf.math.count_nonzero(tf.equal(chosen, part)) for part in range(len(self.weights))]

    def taken(self, turns: int) -> list[Any]:
        """Returns which examples of each part the first so many turns take, in int64 arrays."""
        numbers = np.arange(turns)
        before = Schedule.counts(self, self.of_whole(numbers))
        chosen = self.turns(numbers).numpy()
        return [before[part][chosen == part] for part in range(len(self.weights))]


def schedule(weights: Sequence[float]) -> Schedule:
    """Returns the schedule of these positive weights, exact for those that are decimal numbers of a few digits."""
    exact = [Fraction(str(weight)) for weight in weights]
    common = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * common) for weight in exact]
    divisor = math.gcd(*whole)
    whole = [weight // divisor for weight in whole]
    if sum(whole) > _MOST:
        whole = [max(1, round(Fraction(weight * (_MOST - len(whole)), sum(whole)))) for weight in whole]
    return Schedule(tuple(whole))


@dataclass(frozen=True, slots=True)
class _Node:
    """A part, or a pair of nodes."""

    weight: int
    part: int | None = None
    sides: tuple["_Node", ...] = ()

    def left_of(self, turns: Any) -> Any:
        """Returns how many of its first so many turns go to the left side."""
        return (2 * turns * self.sides[0].weight + self.weight) // (2 * self.weight)


def _tree(weights: Sequence[int]) -> _Node:
    """Joins the two lightest nodes to a pair until one is left."""
    number = itertools.count()  # the order of equal ones
    waiting = [(weight, next(number), _Node(weight, part)) for part, weight in enumerate(weights)]
    heapq.heapify(waiting)
    while len(waiting) > 1:
        (lighter, _, first), (heavier, _, second) = heapq.heappop(waiting), heapq.heappop(waiting)
        both = lighter + heavier
        # The left side begins: the heavier one, or of equal ones that which was given first.
        sides = (first, second) if lighter == heavier else (second, first)
        heapq.heappush(waiting, (both, next(number), _Node(both, sides=sides)))
    return waiting[0][2]
