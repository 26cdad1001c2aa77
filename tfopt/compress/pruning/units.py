"""Units: channels, or heads, that can only be cut together, and the axes of weights on which they lie."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import keras
import numpy as np

Numbers = Any
"""An array of unit numbers, one a channel."""
Role = Literal["makes", "reads", "carries"]
_OTHER_AXIS = "computes along another axis"


@dataclass(slots=True)
class Axis:
    """An axis of a layer's weight, along which its channels or heads lie."""

    weight: Any
    axis: int
    units: Numbers
    """The unit to which each index belongs."""
    role: Role
    """Whether the weight makes these channels, reads them, or works on each alone, as batch normalization does."""


class Owner(NamedTuple):
    """What makes units: the channels of a layer's output, or the heads inside it."""

    layer: keras.Layer
    kind: Literal["channels", "heads"]


@dataclass(slots=True)
class Units:
    """All units of a model. Those tied to each other are cut together; one that is pinned is never cut."""

    axes: dict[tuple[int, int], Axis] = field(default_factory=dict)
    """By the id of the weight and the axis."""
    made: dict[Owner, Numbers] = field(default_factory=dict)
    sizes: dict[keras.Layer, Callable[[Callable[[Numbers], int]], dict[str, Any]]] = field(default_factory=dict)
    """What to change in the config of a layer, given a function that counts the kept channels."""
    passed: dict[keras.Layer, Numbers | None] = field(default_factory=dict)
    """What layers without weights pass on, whose config holds its size; None if nothing of it can be cut."""
    _parents: list[int] = field(default_factory=list)
    _pins: dict[int, str] = field(default_factory=dict)

    def new(self, count: int) -> Numbers:
        """Returns new units, each on its own."""
        first = len(self._parents)
        self._parents.extend(range(first, first + count))
        return np.arange(first, first + count)

    def pinned(self, count: int, reason: str) -> Numbers:
        """Returns new units that are never cut."""
        units = self.new(count)
        self.pin(units, reason)
        return units

    def pin(self, units: Numbers, reason: str) -> None:
        """Keeps units whatever happens; the first reason counts."""
        for unit in np.unique(units).tolist():
            self._pins.setdefault(unit, reason)

    def tie(self, one: Numbers, other: Numbers) -> None:
        """Lets each unit of one array be cut only together with the other's at the same place."""
        for a, b in zip(np.ravel(one).tolist(), np.ravel(other).tolist(), strict=True):
            a, b = self._root(a), self._root(b)
            self._parents[max(a, b)] = min(a, b)

    def lie_on(self, weight: Any, axis: int, units: Numbers, role: Role) -> None:
        """Notes the units along an axis of a weight, which in another call of its layer must be the same ones."""
        axis %= len(weight.shape)
        before = self.axes.setdefault((id(weight), axis), Axis(weight, axis, units, role))
        if before.units is not units:
            self.tie(before.units, units)

    def roots(self) -> Numbers:
        """Returns for each unit the one that stands for all those tied to it."""
        return np.array([self._root(unit) for unit in range(len(self._parents))], int)

    def reasons(self) -> dict[int, str]:
        """Why units stay, by the one that stands for those tied to it."""
        found: dict[int, str] = {}
        for unit, reason in self._pins.items():
            found.setdefault(self._root(unit), reason)
        return found

    def _root(self, unit: int) -> int:
        while self._parents[unit] != unit:
            self._parents[unit] = unit = self._parents[self._parents[unit]]
        return unit


class NotUnderstoodError(Exception):
    """How an operation treats the channels of its inputs is not known."""


@dataclass(frozen=True, slots=True)
class Channels:
    """The units along one axis of a tensor."""

    axis: int
    units: Numbers


@dataclass(frozen=True, slots=True)
class Fixed:
    """A tensor of which nothing can be cut."""

    origin: str
    """What it is, as a part of a sentence."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A symbolic tensor, and its units."""

    shape: Sequence[int | None]
    channels: Channels | Fixed


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a layer or operation, as the rules see it."""

    operation: Any
    name: str
    """With its path and class, as a part of a sentence."""
    inputs: Sequence[Tensor]
    arguments: dict[str, Any]
    """By name; the tensors among them as `Tensor`."""
    units: Units
    output_shape: Sequence[int | None]

    def along(self, tensor: Tensor, axis: int) -> Numbers:
        """Returns the units along an axis of an input, those of other axes being kept."""
        size, found = tensor.shape[axis], tensor.channels
        if size is None:
            raise NotUnderstoodError
        if isinstance(found, Fixed):
            return self.units.pinned(size, f"{found.origin} is joined with them")
        if found.axis != axis % len(tensor.shape):
            self.keep(tensor, _OTHER_AXIS)
            return self.units.pinned(size, f"{self.name} {_OTHER_AXIS}")
        return found.units

    def keep(self, tensor: Tensor, why: str) -> None:
        """Keeps the units of an input; `why` follows the name of the operation."""
        if isinstance(tensor.channels, Channels):
            self.units.pin(tensor.channels.units, f"{self.name} {why}")

    def makes(self, count: int, kind: Literal["channels", "heads"] = "channels") -> Numbers:
        """Returns the units that the layer makes, the same ones in each of its calls."""
        owner = Owner(self.operation, kind)
        if owner not in self.units.made:
            self.units.made[owner] = self.units.new(count)
        return self.units.made[owner]

    def resize(self, config: Callable[[Callable[[Numbers], int]], dict[str, Any]]) -> None:
        """Notes what to change in the layer's config."""
        self.units.sizes[self.operation] = config

    def passes_in_every_call(self, units: Numbers | None) -> None:
        """Lets the calls of a layer whose config holds the size of its output pass on the same units."""
        before = self.units.passed.setdefault(self.operation, units)
        if before is units is None:
            return
        if before is None or units is None or len(before) != len(units):
            reason = "is called on other inputs too"
            if before is not None:
                self.units.pin(before, f"{self.name} {reason}")
            raise NotUnderstoodError(reason)
        self.units.tie(before, units)
