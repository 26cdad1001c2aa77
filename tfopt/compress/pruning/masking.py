"""Masks: what they set to zero, and how zeros stay zero through training."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfopt.compress.pruning.graph import Graph
from tfopt.compress.pruning.units import Numbers


class Mask(NamedTuple):
    """Which numbers of a weight are kept."""

    weight: Any
    kept: Any
    """Booleans that broadcast to the weight's shape."""


def channel_masks(graph: Graph, cut: Numbers) -> list[Mask]:
    """Masks the weights that read channels or heads, so that nothing depends on those that are cut."""
    masks = []
    for axis in graph.axes:
        if axis.role == "reads":
            shape = [1] * len(axis.weight.shape)
            shape[axis.axis] = -1
            masks.append(Mask(axis.weight, np.isin(axis.units, cut, invert=True).reshape(shape)))
    return masks


def apply(masks: Iterable[Mask]) -> None:
    """Sets masked weights to zero."""
    for weight, kept in masks:
        weight.assign(weight * tf.cast(kept, weight.dtype))


def all_zero(masks: Iterable[Mask]) -> bool:
    """Whether all masked weights are zero."""
    return not any(np.any(np.asarray(tf.cast(weight.value, "float32")) * ~kept) for weight, kept in masks)


class Held:
    """Masks that the optimizer applies after each update, as a constraint of each weight, so within its step.

    A callback's own assignment would come late with `steps_per_execution`, and cost a launch per weight and step.
    """

    def __init__(self, masks: Sequence[Mask]):
        self._constraints = [_Constraint(mask.kept, mask.weight) for mask in masks]
        apply(masks)

    def set(self, masks: Sequence[Mask]) -> None:
        """Replaces the masks, which are those of the same weights, and applies them."""
        for constraint, mask in zip(self._constraints, masks, strict=True):
            constraint.mask.assign(mask.kept)
        apply(masks)

    def release(self) -> None:
        """Gives the weights back the constraints they had."""
        for constraint in reversed(self._constraints):
            constraint.weight.constraint = constraint.before


class _Constraint(keras.constraints.Constraint):
    def __init__(self, kept: Any, weight: Any):
        self.mask = tf.Variable(kept, trainable=False)
        self.weight, self.before = weight, weight.constraint
        weight.constraint = self

    def __call__(self, weight: Any) -> Any:
        value = weight if self.before is None else self.before(weight)
        return value * tf.cast(self.mask, value.dtype)
