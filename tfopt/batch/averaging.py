"""Whether a loss is a mean over the examples of a batch: tried on made-up targets and predictions."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.framework.func_graph import FuncGraph
from tensorflow.python.ops.handle_data_util import get_resource_handle_data

_EXAMPLES, _FIRST = 6, 2  # of a batch, and of the first of the two parts it is cut into
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
    random = np.random.default_rng(0)
    with tf.init_scope():
        try:
            made_up = [
                keras.tree.map_structure(lambda part: _made_up(part, random), parts) for parts in (y_true, y_pred)
            ]
            with _variables_kept(loss, *made_up):
                whole, again, *parts = [
                    _values(
                        loss,
                        *(
                            keras.tree.map_structure(lambda value, of=of: value[of] if value.ndim else value, part)
                            for part in made_up
                        ),
                    )
                    for of in (slice(None), slice(None), slice(_FIRST), slice(_FIRST, None))
                ]
        except Exception:  # noqa: BLE001  such as a loss of other targets than can be made up
            return True
    if not np.array_equal(whole, again) or not all(np.all(np.isfinite(value)) for value in (whole, *parts)):
        return True
    if whole.shape and len(whole) == _EXAMPLES and len(parts[0]) == _FIRST:
        together = np.concatenate(parts)
    else:
        together = parts[0] + (parts[1] - parts[0]) * (1 - _FIRST / _EXAMPLES)
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


def _made_up(tensor: Any, random: np.random.Generator) -> np.ndarray:
    """Class 0 or 1, or numbers between 0 and 1, which losses take as scores as well."""
    tensor = tensor if hasattr(tensor, "shape") else np.asarray(tensor)
    shape = [_UNKNOWN if size is None else size for size in tensor.shape]
    if math.prod(shape) > _LARGEST:
        shape = [min(size, _SMALL) for size in shape]
    shape = [_EXAMPLES, *shape[1:]] if shape else []  # one target for all examples
    if not tf.as_dtype(tensor.dtype).is_floating:
        return np.asarray(random.integers(0, 2, shape))
    return np.asarray(random.uniform(0.1, 1.0, shape))  # no distributions, whose equal sums would hide what Dice does
