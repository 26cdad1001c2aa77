"""Whether a loss is a mean over the examples of a batch: tried on made-up targets and predictions."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfopt.internals.graphs import FuncGraph, get_resource_handle_data

_BATCHES = ((6, False), (40, True))  # how many examples are made up, and whether numbers have both signs
_UNKNOWN, _LARGEST, _SMALL = 3, 2**18, 8  # a dimension not known; elements of a tensor; a dimension of a larger one
_NEAR = 1e-3  # relative difference of losses that count as the same


def averages(loss: Any, y_true: Any, y_pred: Any) -> bool:
    """Whether the loss of a batch is the mean of the losses of its parts.

    Args:
        loss: A Keras loss.
        y_true: Its targets, of which only shapes and dtypes matter.
        y_pred: Its predictions, of which only shapes and dtypes matter.

    Returns:
        True also if that cannot be told: the loss fails on made-up values, is not finite, or is random.
    """
    return all(_averages(loss, y_true, y_pred, *batch) for batch in _BATCHES)


def _averages(loss: Any, y_true: Any, y_pred: Any, examples: int, signed: bool) -> bool:
    first = examples // 3  # in the first of the two parts that the batch is cut into
    random = np.random.default_rng(0)

    def made_up_of(part: Any) -> np.ndarray:
        return _made_up(part, examples, signed, random)

    with tf.init_scope():
        try:
            made_up = [keras.tree.map_structure(made_up_of, parts) for parts in (y_true, y_pred)]
            with _variables_kept(loss, *made_up):
                whole, again, *parts = [
                    _values(
                        loss,
                        *(
                            keras.tree.map_structure(lambda value, of=of: value[of] if value.ndim else value, part)
                            for part in made_up
                        ),
                    )
                    for of in (slice(None), slice(None), slice(first), slice(first, None))
                ]
        except Exception:  # noqa: BLE001  such as a loss of other targets than can be made up
            return True
    if not np.array_equal(whole, again) or not all(np.all(np.isfinite(value)) for value in (whole, *parts)):
        return True
    if whole.shape and len(whole) == examples and len(parts[0]) == first:
        together = np.concatenate(parts)
    else:
        together = parts[0] + (parts[1] - parts[0]) * (1 - first / examples)
    return np.allclose(whole, together, rtol=_NEAR, atol=_NEAR * float(np.abs(whole).max(initial=0)))


@contextmanager
def _variables_kept(loss: Any, y_true: Any, y_pred: Any) -> Iterator[None]:
    """Gives the variables that a loss uses, as a trace tells, their values back."""
    with FuncGraph("probe").as_default() as graph, suppress(Exception):  # what works eagerly only has used them by then
        _called(loss, y_true, y_pred)
    resources = [outside for outside, _ in graph.captures if outside.dtype == tf.resource]
    kinds = [list(get_resource_handle_data(resource).shape_and_type) for resource in resources]  # none for a table
    kept = [
        (resource, tf.raw_ops.ReadVariableOp(resource=resource, dtype=kind[0].dtype))
        for resource, kind in zip(resources, kinds, strict=True)
        if kind
    ]
    try:
        yield
    finally:
        for resource, value in kept:
            tf.raw_ops.AssignVariableOp(resource=resource, value=value)


def _values(loss: Any, y_true: Any, y_pred: Any) -> np.ndarray:
    return np.asarray(_called(loss, y_true, y_pred), np.float64)


def _called(loss: Any, y_true: Any, y_pred: Any) -> Any:
    convert = lambda value: tf.convert_to_tensor(value, loss.dtype)  # noqa: E731
    return loss.call(*(keras.tree.map_structure(convert, part) for part in (y_true, y_pred)))


def _made_up(tensor: Any, examples: int, signed: bool, random: np.random.Generator) -> np.ndarray:
    """Class 0 or 1, or numbers: between 0 and 1, which losses take as scores as well, or of both signs."""
    tensor = tensor if hasattr(tensor, "shape") else np.asarray(tensor)
    shape = [_UNKNOWN if size is None else size for size in tensor.shape]
    if math.prod(shape) > _LARGEST:
        shape = [min(size, _SMALL) for size in shape]
    shape = [examples, *shape[1:]] if shape else []  # one target for all examples
    if not tf.as_dtype(tensor.dtype).is_floating:
        return np.asarray(random.integers(0, 2, shape))
    if signed:
        return np.asarray(random.normal(size=shape))
    return np.asarray(random.uniform(0.1, 1.0, shape))  # no distributions, whose equal sums would hide what Dice does
