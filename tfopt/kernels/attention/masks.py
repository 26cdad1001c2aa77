"""Takes masks apart: what is known when a step is traced, such as a causal mask, and what each batch brings."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.internals.runtime import run_operation

_MOST_ELEMENTS = 2**26


@dataclass(frozen=True, slots=True)
class SplitMasks:
    """The masks of an attention, taken apart."""

    causal: bool
    """Whether a position attends to itself and earlier ones alone."""
    window: int
    """And of these only to so many, itself included; 0: to all."""
    others: tuple[tf.Tensor, ...]
    """Boolean masks, each broadcasts to (batch, heads, query length, key length)."""


def split_masks(masks: Sequence[tf.Tensor], length: int, keys: int, *, causal: bool) -> SplitMasks:
    """Takes masks apart; those that allow everything are left out.

    Args:
        masks: Boolean, each broadcasts to (batch, heads, query length, key length).
        length: Of the query.
        keys: Length of the key.
        causal: Whether the causal mask applies as well.
    """
    known, others = np.tri(length, keys, dtype=bool) if causal else np.ones((length, keys), bool), []
    for mask in (factor for each in masks for factor in factors(each)):
        value = _value(mask) if mask.shape.num_elements() in (1, keys, length * keys) else None
        if value is not None and np.size(value) == np.prod(value.shape[-2:], dtype=int):
            known &= value.reshape(value.shape[-2:])
        else:
            others.append(mask)
    if known.all():
        return SplitMasks(causal=False, window=0, others=tuple(others))
    if length == keys:
        window = int(known[-1].sum())
        if (known == np.tri(length, dtype=bool)).all():
            return SplitMasks(causal=True, window=0, others=tuple(others))
        if window and (known == np.tri(length, dtype=bool) ^ np.tri(length, k=-window, dtype=bool)).all():
            return SplitMasks(causal=True, window=window, others=tuple(others))
    return SplitMasks(causal=False, window=0, others=(tf.constant(known[None, None]), *others))


def lengths_of(mask: tf.Tensor, keys: int) -> tf.Tensor | None:
    """The number of keys of each example, int32 (batch), if a mask of keys was made of it, as by `tf.sequence_mask`."""
    while hasattr(mask, "op") and (mask.op.type in ("ExpandDims", "Identity") or _new_axes(mask.op) is not None):
        mask = mask.op.inputs[0]
    if not hasattr(mask, "op") or mask.op.type not in ("Less", "Greater") or mask.shape.rank != 2:
        return None
    positions, lengths = mask.op.inputs if mask.op.type == "Less" else mask.op.inputs[::-1]
    if not lengths.dtype.is_integer or lengths.shape != (mask.shape[0], 1) or mask.shape[1] != keys:
        return None
    value = _value(positions)
    if value is None or np.size(value) != keys or (value.reshape(keys) != np.arange(keys)).any():
        return None
    return tf.cast(tf.clip_by_value(lengths[:, 0], 0, keys), tf.int32)


def factors(mask: tf.Tensor) -> list[tf.Tensor]:
    """Returns the boolean tensors whose conjunction is a mask; each broadcasts to it."""
    if not hasattr(mask, "op"):
        return [mask]
    operation, inputs = mask.op, list(mask.op.inputs)
    if operation.type == "LogicalAnd":
        return [factor for each in inputs for factor in factors(each)]
    if operation.type == "Greater" and 0 <= number(inputs[1]) < 1:
        return [_above(factor, inputs[1]) for factor in _minima(inputs[0])]
    if operation.type == "Cast" and inputs[0].dtype.is_integer:
        parts = _minima(inputs[0])
        return parts if all(part.dtype == tf.bool for part in parts) else [mask]
    return _through(mask, factors) or [mask]


def _minima(tensor: tf.Tensor) -> list[tf.Tensor]:
    """Returns tensors of which all are above a number where the given one is; for booleans, one from 0 to below 1."""
    if tensor.op.type == "Minimum":
        return [factor for each in tensor.op.inputs for factor in _minima(each)]
    if tensor.op.type == "Cast" and tensor.op.inputs[0].dtype == tf.bool:
        return factors(tensor.op.inputs[0])
    if tensor.op.type == "Cast" and tensor.op.inputs[0].dtype.is_integer:
        return _minima(tensor.op.inputs[0])
    return _through(tensor, _minima) or [tensor]


def _above(tensor: tf.Tensor, threshold: tf.Tensor) -> tf.Tensor:
    """Whether a tensor is above a number from 0 to below 1."""
    if tensor.dtype == tf.bool:
        return tensor
    return tensor > (0 if tensor.dtype.is_integer else tf.cast(threshold, tensor.dtype))


def _through(tensor: tf.Tensor, parts: Callable[[tf.Tensor], list[tf.Tensor]]) -> list[tf.Tensor] | None:
    """The parts of what an operation gives another shape, in that shape; None for other operations."""
    operation = tensor.op
    if operation.type not in ("ExpandDims", "StridedSlice", "BroadcastTo", "Identity"):
        return None
    given = operation.inputs[0]
    moved = [_moved(of_rank(each, given.shape.rank or 0), operation) for each in parts(given)]
    return None if any(each is None for each in moved) else moved


def _moved(part: tf.Tensor, operation: tf.Operation) -> tf.Tensor | None:
    """A part of an operation's input as one of its result; None if that is not known."""
    if operation.type == "Identity":
        return part
    if operation.type == "BroadcastTo":
        return of_rank(part, operation.outputs[0].shape.rank or 0)
    if operation.type == "ExpandDims":
        axis = tf.get_static_value(operation.inputs[1])
        return None if axis is None else tf.expand_dims(part, int(axis))
    new = _new_axes(operation)
    return None if new is None else part[tuple(None if is_new else slice(None) for is_new in new)]


def _new_axes(operation: tf.Operation) -> list[bool] | None:
    """For a slice that only adds axes: which of its positions do; None for other operations."""
    if operation.type != "StridedSlice":
        return None
    new = operation.get_attr("new_axis_mask")
    whole = operation.get_attr("begin_mask") & operation.get_attr("end_mask")
    others = [operation.get_attr(name) for name in ("shrink_axis_mask", "ellipsis_mask")]
    strides = tf.get_static_value(operation.inputs[3])
    if any(others) or strides is None or any(strides != 1):
        return None
    if any(not (new | whole) >> position & 1 for position in range(len(strides))):
        return None
    return [bool(new >> position & 1) for position in range(len(strides))]


def mask_of_addend(addend: tf.Tensor) -> tf.Tensor | None:
    """The boolean mask M of an addend (1 − M) · c, where c is far below 0; None for other addends."""
    if not hasattr(addend, "op") or addend.op.type != "Mul":
        return None
    for difference, factor in (addend.op.inputs, addend.op.inputs[::-1]):
        if not number(factor) <= _FAR or difference.op.type != "Sub" or number(difference.op.inputs[0]) != 1:
            continue
        inner = difference.op.inputs[1]
        while inner.op.type == "Cast" and inner.dtype.is_floating:
            inner = inner.op.inputs[0]
        if inner.dtype == tf.bool:
            return inner
    return None


MASKED = -1e4
"""A score that is set to that, or less, is masked."""

_FAR = -1e8  # a score to which that is added is lost in rounding, even in float32


def of_rank(tensor: tf.Tensor, rank: int) -> tf.Tensor:
    """A tensor with axes of 1 in front, so that it broadcasts as before."""
    missing = 0 if tensor.shape.rank is None else rank - tensor.shape.rank
    return tensor[(None,) * missing] if missing > 0 else tensor


def number(tensor: tf.Tensor) -> float:
    """The one number that a tensor holds; NaN if it is not known."""
    value = tf.get_static_value(tensor)
    if value is None or np.size(value) == 0:
        return np.nan
    value = np.asarray(value, np.float64)
    return float(value.flat[0]) if (value == value.flat[0]).all() else np.nan


def _value(tensor: tf.Tensor) -> np.ndarray | None:
    """What a tensor of a graph will hold, if nothing that varies goes into it."""
    known: dict[str, Any] = {}

    def output(given: tf.Tensor) -> Any:
        operation = given.op
        if operation.name not in known:
            known[operation.name] = None  # until it is known
            known[operation.name] = run(operation)
        outputs = known[operation.name]
        return None if outputs is None else outputs[given.value_index]

    def run(operation: tf.Operation) -> Any:
        size = operation.outputs[0].shape.num_elements() if operation.outputs else None
        if size is None or size > _MOST_ELEMENTS:
            return None
        if operation.type == "Const":
            return [tf.constant(tf.make_ndarray(operation.get_attr("value")))]
        if operation.op_def.is_stateful or operation.type == "Placeholder" or operation.control_inputs:
            return None
        inputs = [output(given) for given in operation.inputs]
        if any(given is None for given in inputs):
            return None
        attributes: list[Any] = []
        for attribute in operation.op_def.attr:
            value = operation.get_attr(attribute.name)
            attributes += [attribute.name, value.as_datatype_enum if isinstance(value, tf.DType) else value]
        outputs = len(operation.outputs)
        try:
            return run_operation(operation.type, outputs, inputs, attributes)
        except (tf.errors.OpError, TypeError, ValueError):  # an attribute that only graphs take
            return None

    if not hasattr(tensor, "op"):  # eager
        return tensor.numpy()
    with tf.init_scope(), tf.device("CPU:0"):
        found = output(tensor)
    return None if found is None else found.numpy()
