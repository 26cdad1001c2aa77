"""D22, `explain`: operations that XLA gets wrong where a size depends on values. tfopt cannot patch XLA, only refuse.

`tf.boolean_mask`, `tf.where` and `tf.unique` return as many elements as the values ask for. XLA computes with the
largest number there may be and keeps the true one beside it. The operations below ignore the true number. They were
found by running some 250 expressions of `tf.boolean_mask` and `tf.unique`, with and without XLA, on TensorFlow 2.21.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import tensorflow as tf

_FIXED = "Keep the size fixed, with tf.where(mask, x, 0) instead of tf.boolean_mask, or leave XLA off."


@dataclass(frozen=True, slots=True)
class WrongOperation:
    """An operation that XLA gets wrong."""

    defect: str
    """What goes wrong; completes "XLA gets … wrong:"."""
    remedy: str
    """What to do."""
    applies: Callable[[tf.Operation], bool]
    """Whether an operation of this type, one of whose inputs has an unknown size, is wrong."""


def wrong_under_xla(operation: tf.Operation) -> WrongOperation | None:
    """Returns what is wrong with an operation under XLA, or None if it is not known to be wrong.

    Nothing runs: the operation is judged by its type and its inputs' shapes. A size that is unknown in a graph traced
    with a concrete batch depends on values.

    Args:
        operation: An operation of a graph that was traced with inputs of known shapes.

    Example:
        >>> step = tf.function(lambda x: tf.ones_like(tf.boolean_mask(x, x > 0)))
        >>> operations = step.get_concrete_function(tf.ones(3)).graph.get_operations()
        >>> [operation.type for operation in operations if wrong_under_xla(operation)]
        ['OnesLike']
    """
    wrong = XLA_OPERATIONS.get(operation.type)
    return wrong if wrong and wrong.applies(operation) else None


def _unknown_size(operation: tf.Operation) -> bool:
    """Whether the first input has an unknown size."""
    return not operation.inputs[0].shape.is_fully_defined()


def _unknown_size_padded(operation: tf.Operation) -> bool:
    return _unknown_size(operation) and operation.get_attr("padding") == b"SAME"


def _from_the_end(operation: tf.Operation) -> bool:
    """Whether a slice begins at a negative index of an axis whose size is unknown."""
    shape, begins = operation.inputs[0].shape, tf.get_static_value(operation.inputs[1])
    if shape.rank is None:
        return True
    if begins is None or operation.get_attr("ellipsis_mask") or operation.get_attr("new_axis_mask"):
        return _unknown_size(operation) and begins is not None and bool((begins < 0).any())
    begin_mask = operation.get_attr("begin_mask")
    return any(
        begin < 0 and shape[axis] is None and not begin_mask >> axis & 1 for axis, begin in enumerate(begins.tolist())
    )


def _unknown_offset(operation: tf.Operation) -> bool:
    """Whether the gradient of a concatenation slices along an axis of unknown size."""
    axis = operation.inputs[0]
    if axis.op.type == "FloorMod":  # of the axis by the rank
        axis = axis.op.inputs[0]
    axis = tf.get_static_value(axis)
    parts = [tensor for shape in operation.inputs[1:] for tensor in shape.op.inputs]
    return any(part.shape.rank is None or axis is None or part.shape[int(axis)] is None for part in parts)


_CRASH = WrongOperation("the process crashes if sizes depend on values", _FIXED, _unknown_size)
_IGNORED = WrongOperation("it ignores that a size depends on values", _FIXED, _unknown_size)

XLA_OPERATIONS: Mapping[str, WrongOperation] = {
    "OnesLike": WrongOperation(
        "it returns more elements than there are where a size depends on values",
        "Write tf.ones(tf.shape(x), x.dtype), or leave XLA off.",
        _unknown_size,
    ),
    "StridedSlice": WrongOperation(
        "it counts a negative index from the wrong end where a size depends on values, or the process crashes",
        "Count from the front: tf.gather(x, tf.shape(x)[0] - 1) instead of x[-1]. Or leave XLA off.",
        _from_the_end,
    ),
    **dict.fromkeys(("Roll", "ReverseSequence", "RandomShuffle", "MirrorPad"), _IGNORED),
    **dict.fromkeys(("ResizeBilinear", "ResizeNearestNeighbor"), _IGNORED),
    "ConcatOffset": WrongOperation(
        "the gradient of a concatenation cuts at wrong places where a size along its axis depends on values",
        _FIXED,
        _unknown_offset,
    ),
    "BatchToSpaceND": _IGNORED,
    **dict.fromkeys(("MatrixDiag", "MatrixDiagV2", "MatrixDiagV3", "Diag"), _IGNORED),
    **dict.fromkeys(("MatrixDiagPart", "MatrixDiagPartV2", "MatrixDiagPartV3", "DiagPart"), _IGNORED),
    **dict.fromkeys(("AvgPool", "AvgPool3D"), WrongOperation(_IGNORED.defect, _FIXED, _unknown_size_padded)),
    **dict.fromkeys(("Cumsum", "Cumprod", "CumulativeLogsumexp"), _CRASH),
}
"""Every operation known to be wrong, by its type."""
