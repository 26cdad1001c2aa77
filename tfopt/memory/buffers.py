"""The memory that a step's tensors take over time: whose it is, when it is freed, and what is alive at the peak."""

import collections
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfopt.model.layers import calls_wrapped, layer_paths

FORWARD, BACKWARD, UPDATE = range(3)
"""Phases of a training step."""

_BLOCK = 256  # bytes; TensorFlow's allocator rounds up to it


class Peak(NamedTuple):
    """What a step holds when it holds most, in bytes, apart from its variables and its batch."""

    total: int
    gradients: int
    """Of variables, waiting for the optimizer."""
    activations: collections.Counter[tuple[str, ...]]
    """What the forward pass keeps for the backward pass: by the operation that made it and those that called it, the
    innermost first."""


class Phases:
    """Tells the forward pass, the backward pass and the optimizer's update apart, by the names of operations.

    Args:
        optimizers: Names of the optimizers.
    """

    def __init__(self, optimizers: Iterable[str]):
        names = "|".join(map(re.escape, optimizers))
        self._update = re.compile(rf"(^|/)({names})(_\d+)?/" if names else "$^")
        self._backward = re.compile(r"(^|/)gradient(_tape|s)(_\d+)?/")

    def named(self, name: str) -> int:
        """The phase that an operation's name shows. Callers count what follows from a gradient as backward."""
        if self._update.search(name):
            return UPDATE
        return BACKWARD if self._backward.search(name) else FORWARD


@dataclass(slots=True, eq=False)
class Buffer:
    """Memory of a tensor."""

    size: int
    names: tuple[str, ...]
    """As in `Peak.activations`; empty for variables and arguments of the step."""
    phase: int
    start: int
    end: int | None = None
    references: int = 1
    readers: set[int] = field(default_factory=set)
    """The phases of the operations that read it."""


@dataclass(slots=True, eq=False)
class TensorList:
    """A list of tensors, as loops keep them for their gradient."""

    items: list["Value"] = field(default_factory=list)
    references: int = 1


@dataclass(slots=True, eq=False)
class Variable:
    """A variable, whose memory a read shares."""

    buffer: Buffer
    references: int = 1


Value = Buffer | TensorList | Variable | None
"""What stands for a tensor; None for one that takes no memory."""


class Ledger:
    """Counts the bytes alive and remembers what was alive at their peak."""

    def __init__(self) -> None:
        self.live = 0
        """Bytes."""
        self._most = self._most_at = self._clock = 0
        self._alive: set[Buffer] = set()
        self._ended: list[Buffer] = []
        """Those alive at the peak so far that are freed by now."""

    def new(self, size: int, names: tuple[str, ...], phase: int) -> Buffer:
        """Allocates a buffer; its one reference is the caller's."""
        self._clock += 1
        buffer = Buffer(rounded(size), names, phase, self._clock)
        self._alive.add(buffer)
        self.live += buffer.size
        if self.live > self._most:
            self._most, self._most_at = self.live, self._clock
        return buffer

    def release(self, *values: Value) -> None:
        """Gives back a reference to each; the last one frees the memory."""
        for value in values:
            if value is None:
                continue
            value.references -= 1
            if value.references:
                continue
            if isinstance(value, TensorList):
                self.release(*value.items)
            elif isinstance(value, Buffer):
                self._clock += 1
                value.end = self._clock
                self.live -= value.size
                self._alive.remove(value)
                if value.start <= self._most_at:
                    self._ended.append(value)

    def store(self, variable: Variable, buffer: Buffer) -> None:
        """Makes a buffer the memory of a variable."""
        self.release(variable.buffer)
        variable.buffer = buffer

    def own(self, given: TensorList) -> TensorList:
        """Returns the list itself if nobody else holds it, or else a copy."""
        if given.references == 1:
            return given
        share(*given.items)
        self.release(given)
        return TensorList(list(given.items))

    def peak(self, given: int) -> Peak:
        """What was alive at the peak, beyond the `given` bytes of variables and batch."""
        ended = (one for one in self._ended if one.end is not None and one.end > self._most_at)
        found = [one for one in (*self._alive, *ended) if one.start <= self._most_at and one.names]
        activations: collections.Counter[tuple[str, ...]] = collections.Counter()
        for one in found:
            if one.phase == FORWARD and one.readers & {BACKWARD, UPDATE}:
                activations[one.names] += one.size
        gradients = sum(one.size for one in found if one.phase == BACKWARD and UPDATE in one.readers)
        return Peak(self._most - given, gradients, activations)


def share(*values: Value) -> None:
    """Adds a reference to each."""
    for value in values:
        if value is not None:
            value.references += 1


def rounded(size: int) -> int:
    """The bytes that TensorFlow's allocator hands out for a size."""
    return -(-size // _BLOCK) * _BLOCK


@contextmanager
def scopes_recorded(model: keras.Model) -> Iterator[dict[str, str]]:
    """Records, by name scope, the path of the layer that is called in it."""
    paths = layer_paths(model)
    scopes: dict[str, str] = {}

    def recorded(layer: keras.Layer, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            scopes[tf.get_current_name_scope()] = paths[layer]
            return method(*args, **kwargs)

        return call

    with calls_wrapped(list(paths), recorded):
        yield scopes


def layer_of(name: str, scopes: Mapping[str, str]) -> str | None:
    """The path of the innermost layer in whose scope an operation lies."""
    parts = name.split("/")
    # From outside in: a function's operations bear the name of its call before their own.
    for start in range(len(parts)):
        for end in range(len(parts) - 1, start, -1):
            path = scopes.get("/".join(parts[start:end]))
            if path is not None:
                return path
    return None
