"""Which units a model needs least, and which of them are cut."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, get_args

import keras
import numpy as np
import tensorflow as tf

from tfopt import checks
from tfopt.compress.pruning.graph import Graph
from tfopt.compress.pruning.units import Axis, Numbers
from tfopt.errors import TfoptError, unknown_name
from tfopt.model.batches import as_dataset
from tfopt.model.state import layers_in_float32

Importance = Literal["taylor", "norm"]
_BATCHES = 32
_UNROUNDED = 32
_MULTIPLE = 8  # for Tensor Cores


def checked_sparsity(sparsity: float) -> float:
    """Returns the share to remove; raises a TypeError or ValueError if it is none."""
    remedy = "Pass a share such as 0.5, to remove half."
    share = checks.number("sparsity", sparsity, remedy, above=0)
    if share >= 1:
        raise ValueError(f"Expected sparsity to be below 1. Received: {sparsity!r}. {remedy}")
    return share


def checked_importance(importance: Importance) -> Importance:
    """Returns the kind of importance; raises a ValueError if it is unknown."""
    if importance not in get_args(Importance):
        raise unknown_name("importance", importance, get_args(Importance))
    return importance


def kept_of(count: int, sparsity: float) -> int:
    """Returns how many of a group's units stay: at least one, and above 32 a multiple of 8, for Tensor Cores."""
    kept = max(1, math.ceil(round(count * (1 - sparsity), 6)))
    return kept if kept <= _UNROUNDED else min(count, _MULTIPLE * round(kept / _MULTIPLE))


def choose(graph: Graph, scores: Numbers, sparsity: float, already: Numbers = ()) -> Numbers:
    """Returns the units to cut: the least important of each group, after those cut already.

    Every group loses the same share. A ranking over all layers would cut whole stages where scores of different layers
    do not compare, and what it saves would depend on which layers those are.
    """
    cut: list[int] = []
    for group in graph.groups:
        order = np.lexsort((scores[group], ~np.isin(group, already)))
        cut += group[order][: len(group) - kept_of(len(group), sparsity)].tolist()
    return np.array(cut, int)


def scorer(graph: Graph, model: keras.Model, data: Any, importance: Importance) -> Callable[[], Numbers]:
    """Returns a function that measures how important each unit is at present."""
    if importance == "norm":
        return partial(by_norm, graph)
    reads = [axis for axis in graph.axes if axis.role == "reads"]
    return partial(_by_gradient, graph, model, data, reads, _terms(model, reads))


def by_norm(graph: Graph) -> Numbers:
    """The norm of the kernels' slices that make a unit, over the layer's mean, since layers are scaled differently."""
    total, count = np.zeros(_size(graph)), np.zeros(_size(graph))
    for axis in graph.axes:
        if axis.role == "makes" and len(axis.weight.shape) > 1:
            value = np.asarray(tf.cast(axis.weight.value, "float32"))
            norms = np.sqrt((value**2).sum(_others(axis)))
            np.add.at(total, axis.units, norms / max(norms.mean(), 1e-12))
            np.add.at(count, axis.units, 1)
    return total / np.maximum(count, 1)


def _by_gradient(graph: Graph, model: keras.Model, data: Any, reads: Sequence[Axis], terms: Any) -> Numbers:
    """The squared change of the loss, to first order, if a unit is masked; summed over batches.

    It is the sum of weight times gradient over all weights that read the unit, which is the gradient of a gate behind
    it: Molchanov et al., "Importance Estimation for Neural Network Pruning", 2019.
    """
    total = np.zeros(_size(graph))
    with layers_in_float32(model):  # small gradients vanish in float16
        for batch in as_dataset(data).take(_BATCHES):
            change = np.zeros_like(total)
            for axis, values in zip(reads, terms(batch), strict=True):
                np.add.at(change, axis.units, values.numpy())
            total += change**2
    if not np.isfinite(total).all():
        raise TfoptError(
            "Expected finite gradients, by which the importance of channels is measured. Found NaN or infinity. Check "
            "the data and the loss on them with model.evaluate(data), or pass importance='norm'."
        )
    return total


def _terms(model: keras.Model, reads: Sequence[Axis]) -> Callable[[Any], Any]:
    weights = [axis.weight.value for axis in reads]

    @tf.function(autograph=False, reduce_retracing=True)
    def terms(batch: Any) -> Any:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(weights)
            loss = model._compute_loss(x, y, model(x, training=False), sample_weight, training=True)
        gradients = tape.gradient(loss, weights, unconnected_gradients="zero")
        return [
            tf.reduce_sum(tf.cast(weight * gradient, "float32"), _others(axis))
            for axis, weight, gradient in zip(reads, weights, gradients, strict=True)
        ]

    return terms


def _others(axis: Axis) -> tuple[int, ...]:
    return tuple(other for other in range(len(axis.weight.shape)) if other != axis.axis)


def _size(graph: Graph) -> int:
    return 1 + max((int(axis.units.max()) for axis in graph.axes), default=0)
