"""Reads off the graph how a layer computes its attention weights: what is scaled, added and masked before softmax.

Only what is understood whole is taken: any other operation on the way keeps the layer's own path.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from tfopt.kernels.attention.masks import MASKED, mask_of_addend, number

_MOST_STEPS = 64


@dataclass(frozen=True, slots=True)
class Product:
    """A product of two tensors, as in einsum."""

    letters: tuple[str, str]
    result: str
    operands: tuple[tf.Tensor, tf.Tensor]
    shape: tf.TensorShape | None = None
    """Of the result, once it is computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Attention weights: softmax of (scale · product + addends, where masks allow)."""

    product: Product
    scale: float = 1.0
    masks: tuple[tf.Tensor, ...] = ()
    addends: tuple[tf.Tensor, ...] = ()
    fill: float = -math.inf
    """The score of what is masked; the largest of several."""
    zeros: bool = False
    """Whether the weights of a query that may attend to nothing are zeros."""


def read_weights(tensor: tf.Tensor, products: Mapping[Any, Product]) -> Weights | str | None:
    """Returns how attention weights are computed, why that is unknown, or None if they are no attention weights.

    Args:
        tensor: Of a graph.
        products: By a reference to their result.
    """
    zeroed = None
    tensor = given = _stripped(tensor)
    if tensor.op.type == "SelectV2" and number(tensor.op.inputs[2]) == 0:
        zeroed, inner = tensor.op.inputs[0], _stripped(tensor.op.inputs[1])
        if inner.op.type == "Softmax":
            tensor = inner
    if tensor.op.type != "Softmax":
        return _between(tensor, products)
    found = _read_scores(tensor.op.inputs[0], products)
    if isinstance(found, str):
        return found if _reaches(tensor, products) else None
    if zeroed is None:
        return found
    # As Keras' Softmax layer: the mask of the scores makes the weights zeros, which changes rows that are masked whole.
    same = [mask.ref() for mask in found.masks] == [zeroed.ref()]
    return replace(found, zeros=True) if same else _between(given, products)


def _between(tensor: tf.Tensor, products: Mapping[Any, Product]) -> str | None:
    """What lies between softmax and the weights; None if they are no attention weights."""
    waiting, seen, is_weights = [tensor], dict[str, str](), False
    while waiting and len(seen) < _MOST_STEPS:
        operation = waiting.pop(0).op
        if operation.type == "Softmax":
            is_weights |= _reaches(operation.outputs[0], products)
        elif operation.name not in seen:
            seen[operation.name] = operation.type
            waiting += operation.inputs
    if not is_weights:
        return None
    kinds = [*seen.values()]
    return "dropout" if any("Random" in kind for kind in kinds) else f"{kinds[0]} on the attention weights"


def _reaches(tensor: tf.Tensor, products: Mapping[Any, Product]) -> bool:
    waiting, seen = [tensor], set[str]()
    while waiting and len(seen) < _MOST_STEPS:
        tensor = waiting.pop(0)
        if tensor.ref() in products:
            return True
        if tensor.name not in seen:
            seen.add(tensor.name)
            waiting += tensor.op.inputs
    return False


def _read_scores(tensor: tf.Tensor, products: Mapping[Any, Product]) -> Weights | str:
    tensor = _stripped(tensor)
    if tensor.ref() in products:
        return Weights(product=products[tensor.ref()])
    operation = tensor.op
    inputs = list(operation.inputs)
    if operation.type == "SelectV2":
        for scores, fill, inverted in ((inputs[1], number(inputs[2]), False), (inputs[2], number(inputs[1]), True)):
            if fill <= MASKED:
                found = _read_scores(scores, products)
                mask = ~inputs[0] if inverted else inputs[0]
                return found if isinstance(found, str) else _masked(found, mask, fill)
    if operation.type == "Sub" and _reaches(inputs[0], products):
        found = _read_scores(inputs[0], products)
        terms = (-term for term in _terms(inputs[1], tensor.dtype))
        return found if isinstance(found, str) else replace(found, addends=(*found.addends, *terms))
    if operation.type in ("AddV2", "Mul", "RealDiv"):
        scores, other = inputs if _reaches(inputs[0], products) else inputs[::-1]
        found = _read_scores(scores, products)
        if isinstance(found, str):
            return found
        if operation.type == "AddV2":
            return replace(found, addends=(*found.addends, *_terms(other, tensor.dtype)))
        factor = number(other)
        if factor > 0 and not (operation.type == "RealDiv" and scores is inputs[1]):
            factor = 1 / factor if operation.type == "RealDiv" else factor
            if factor * found.fill > MASKED:
                return "masked scores that are scaled"
            addends = tuple(factor * addend for addend in found.addends)
            return replace(found, scale=factor * found.scale, fill=factor * found.fill, addends=addends)
    return "a soft cap" if operation.type == "Tanh" else f"{operation.type} on the scores"


def _masked(found: Weights, mask: tf.Tensor, fill: float) -> Weights:
    return replace(found, masks=(*found.masks, mask), fill=max(fill, found.fill))


def _terms(addend: tf.Tensor, dtype: tf.DType) -> list[tf.Tensor]:
    """The terms of a sum, of the type in which they are added to the scores."""
    inner = _stripped(addend)
    if inner.op.type == "AddV2":
        return [term for each in inner.op.inputs for term in _terms(each, dtype)]
    return [inner if mask_of_addend(inner) is not None else tf.cast(inner, dtype)]


def _stripped(tensor: tf.Tensor) -> tf.Tensor:
    """A tensor before it was cast from one type of floats to another."""
    while tensor.op.type in ("Identity", "Cast") and tensor.op.inputs[0].dtype.is_floating:
        tensor = tensor.op.inputs[0]
    return tensor
