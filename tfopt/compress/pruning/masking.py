"""Masks: what they set to zero, and how zeros stay zero through training."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfopt.compress.pruning.graph import Graph
from tfopt.compress.pruning.units import Numbers
from tfopt.errors import UnsupportedError
from tfopt.model.layers import layer_paths
from tfopt.model.products import has_kernel


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


def weight_masks(model: keras.Model, sparsity: float) -> list[Mask]:
    """Masks the smallest weights of each kernel, of which one stays.

    Raises:
        UnsupportedError: If there is no kernel, or one to which a layer adds LoRA weights, with which it has no zeros.
    """
    if adapted := [path for layer, path in layer_paths(model).items() if getattr(layer, "lora_enabled", False)]:
        raise UnsupportedError(
            f"Expected layers without LoRA weights, to set weights to zero. Found them in {', '.join(adapted)}. Save "
            "and load the model first, which adds them to the kernels."
        )
    values = [(kernel, np.asarray(tf.cast(kernel.value, "float32"))) for kernel, _ in kernels(model)]
    if not values:
        raise UnsupportedError(
            f"Expected a model with kernels, of dense layers or convolutions, say. Found none in {model.name!r}. Leave "
            "it as it is."
        )
    return [Mask(kernel, _largest(value, sparsity)) for kernel, value in values]


def kernels(model: keras.Model) -> list[tuple[Any, str]]:
    """The kernels of a model's layers, each with its layer's path."""
    return [
        (weight, path)
        for layer, path in layer_paths(model).items()
        if has_kernel(layer)
        for weight in layer._trainable_variables
        if len(weight.shape) > 1
    ]


def _largest(value: Any, sparsity: float) -> Any:
    kept = np.ones(value.size, bool)
    kept[np.argsort(abs(value), axis=None, kind="stable")[: min(round(value.size * sparsity), value.size - 1)]] = False
    return kept.reshape(value.shape)


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
