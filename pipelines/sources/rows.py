"""Rows of arrays in memory as a source."""

import functools
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.pipelines.cache.value_hash import hash_value
from tfopt.pipelines.sources.shapes import gathered
from tfopt.pipelines.sources.source import Source, common_length, held_on_host, named_leaves

_REMEDIES = {
    "M": "Convert it: array.astype(np.int64)",
    "m": "Convert it: array.astype(np.int64)",
    "O": "Give it a type: array.astype(np.float32), or np.stack(list) if its items are arrays of one shape",
    "V": "Pass its fields as separate arrays: {name: array[name] for name in array.dtype.names}",
    "U": "Pass strings that UTF-8 can encode",
}
_WIDE = "Convert it to float64 or complex128 with array.astype"


def arrays(data: Any) -> Source:
    """Returns the rows of arrays as a source of examples.

    Use it for data that fits into memory; it is copied once, into host memory.

    Args:
        data: A NumPy array, eager tensor, pandas Series or `tf.RaggedTensor` with one ragged axis, or tuples and dicts
            of them, nested as the examples should be. All have the same first dimension, the number of examples.

    Returns:
        A source whose examples have the structure of `data`, without the first dimension. Those of a ragged tensor vary
        in length: see `pad` and `bucket` of `plan_pipeline`.

    Raises:
        TypeError: If a leaf is not an array, is masked, or has a type that no tensor has; or keys of a dict do not
            sort.
        ValueError: If a leaf has no first dimension.
        PipelineError: If lengths differ, there are no examples, or a Series lacks a value.

    Example:
        >>> import numpy as np
        >>> arrays((np.zeros((10, 4)), np.zeros(10))).count
        10
    """
    named = [(name, _values(name, leaf)) for name, leaf in named_leaves(data, "data")]
    for name, leaf in named:
        _expect_rows(name, leaf)
    count = common_length({name: _rows_of(leaf) for name, leaf in named})
    # Eager constants would go to the GPU, if there is one; input belongs on the host.
    with tf.device("CPU:0"):
        copies = [tf.identity(_as_tensor(name, leaf)) for name, leaf in named]
    tensors = tf.nest.pack_sequence_as(data, copies)

    @functools.cache
    def contents() -> str:
        return hash_value(tensors, name="data")  # once: nobody else holds these copies

    ragged = any(isinstance(leaf, tf.RaggedTensor) for _, leaf in named)

    def rows(index: Any) -> Any:
        return tf.nest.map_structure(lambda tensor: _row(tensor, index), held_on_host(lambda: tensors))

    return gathered("arrays", count, rows, None if ragged else rows, fingerprint=lambda: [contents()])


def is_series(data: Any) -> bool:
    """Whether this is a column of pandas, or like one."""
    return hasattr(data, "iloc") and getattr(data, "ndim", None) == 1


def _values(name: str, leaf: Any) -> Any:
    """Returns the values of a Series, of which none may be missing; other leaves as they are."""
    if not is_series(leaf):
        return leaf
    missing = np.flatnonzero(leaf.isna())
    if len(missing):
        raise PipelineError(
            f"Expected a value in each row of {name}, a {type(leaf).__name__}. Found none in row {missing[0]:,} (rows "
            f"without one: {len(missing):,}). Fill them with a value that you choose, or leave out the rows."
        )
    return leaf.to_numpy()


def _rows_of(leaf: Any) -> int:
    return int(leaf.nrows() if isinstance(leaf, tf.RaggedTensor) else leaf.shape[0])


def _row(tensor: Any, at: Any) -> Any:
    if not isinstance(tensor, tf.RaggedTensor):
        return tf.gather(tensor, at)
    return tensor.flat_values[tensor.row_splits[at] : tensor.row_splits[at + 1]]


def _as_tensor(name: str, leaf: Any) -> Any:
    if isinstance(leaf, tf.RaggedTensor):
        return leaf
    try:
        return tf.convert_to_tensor(leaf)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"arrays() expects types that tensors have. Received at {name}: an array of the type {leaf.dtype}. "
            f"{_REMEDIES.get(leaf.dtype.kind, _WIDE)}."
        ) from error


def _expect_rows(name: str, leaf: Any) -> None:
    if isinstance(leaf, np.ma.MaskedArray):
        raise TypeError(
            f"arrays() expects arrays without a mask. Received at {name}: a masked array, whose mask would be lost. "
            "Pass .filled(value), and the mask as an array of its own if the model needs it."
        )
    if not isinstance(leaf, np.ndarray | tf.Tensor | tf.RaggedTensor):
        raise TypeError(
            f"arrays() expects NumPy arrays or tensors in tuples and dicts. Received at {name}: "
            f"{type(leaf).__name__}. Convert it with np.asarray; sparse tensors with "
            "tf.data.Dataset.from_tensor_slices(data)."
        )
    if isinstance(leaf, tf.RaggedTensor) and leaf.ragged_rank > 1:
        raise ValueError(
            f"arrays() expects ragged tensors with one ragged axis, the second. Received at {name}: {leaf.shape}. Make "
            "the others dense, or pass tf.data.Dataset.from_tensor_slices(data)."
        )
    if len(leaf.shape) == 0:
        raise ValueError(
            f"arrays() expects a first dimension with one row per example. Received a scalar at {name}. Pass an array "
            "of rows."
        )
