"""What a loader yields, as NumPy arrays that TensorFlow takes, and the element spec that all of it must have."""

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.pipelines.sources.source import named_leaves

_SCALARS = (bool, int, float, complex, str, bytes)
_TEXTS = (str, bytes)
_ALIGNMENT = 64  # bytes: EIGEN_MAX_ALIGN_BYTES, where TensorFlow is built for AVX-512


def arrays_of(element: Any, what: str, *, batched: bool) -> Any:
    """Returns a batch or an example as arrays in tuples and dicts, without a copy where possible.

    Args:
        element: Arrays, tensors of any framework, numbers and strings, in tuples, lists and mappings.
        what: Its name in errors.
        batched: Whether it is a batch.

    Raises:
        PipelineError: If a part is not an array, is None, or has a type that TensorFlow lacks; or parts of a batch have
            no common first axis.
    """
    if batched and isinstance(element, list | tuple) and not _is_texts(element):
        while len(element) > 1 and element[-1] is None:  # weights that are left open
            element = element[:-1]
    arrays = _structure(element, what, texts=batched, top=True)
    if batched:
        _expect_common_length(arrays, what)
    return arrays


def common_spec(elements: Sequence[Any], *, batched: bool) -> Any:
    """Returns the element spec of all these elements; axes that differ, and the first one of batches, stay open.

    Raises:
        PipelineError: If they differ otherwise.
    """
    spec, *others = (tf.nest.map_structure(partial(_spec, batched=batched), element) for element in elements)
    for index, other in enumerate(others, start=1):
        _expect_same_leaves(spec, other, f"element {index}")
        spec = tf.nest.map_structure(lambda one, another: one.most_specific_common_supertype([another]), spec, other)
    return spec


def expect_spec(element: Any, spec: Any, what: str) -> None:
    """Refuses arrays that do not have this element spec, some of which TensorFlow would silently cast.

    Raises:
        PipelineError: If they differ.
    """
    found = tf.nest.map_structure(_spec, element)
    _expect_same_leaves(spec, found, what)
    for (name, expected), leaf in zip(named_leaves(spec, "element"), tf.nest.flatten(found), strict=True):
        if not expected.is_compatible_with(leaf):
            raise PipelineError(
                f"Expected shape {expected.shape} at {name}, as in the first ones. Found {tuple(leaf.shape)} in "
                f"{what}. Bring them to one shape in the loader, or leave the axis open in a source of your own: "
                "Source(name=..., dataset=lambda: tf.data.Dataset.from_generator(..., output_signature=...), "
                "batched=True)."
            )


def copied(element: Any) -> Any:
    """Returns the same arrays in memory that TensorFlow takes over.

    It takes aligned memory without a copy, and steps may write into it. The loader may write into its own memory too,
    for the next batch or to shuffle it, while this batch waits. Other memory would be copied by TensorFlow.
    """
    return tf.nest.map_structure(_aligned, element)


def _aligned(leaf: Any) -> Any:
    if not isinstance(leaf, np.ndarray) or leaf.dtype.kind in "OSU":  # TensorFlow copies strings
        return leaf
    room = np.empty(leaf.nbytes + _ALIGNMENT, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT
    copy = room[start : start + leaf.nbytes].view(leaf.dtype).reshape(leaf.shape)
    np.copyto(copy, leaf)
    return copy


def _structure(value: Any, name: str, *, texts: bool, top: bool = False) -> Any:
    """Returns nested arrays.

    `texts` says that a tuple of strings below the top is an array, as PyTorch collates them.
    """
    if isinstance(value, Mapping):
        return {key: _structure(part, f"{name}[{key!r}]", texts=texts) for key, part in value.items()}
    if isinstance(value, list) and value and all(isinstance(part, _SCALARS) for part in value):
        return _array(value, name)
    if isinstance(value, tuple) and texts and not top and _is_texts(value):
        return _array(list(value), name)
    if isinstance(value, list | tuple):
        parts = [_structure(part, f"{name}[{index}]", texts=texts) for index, part in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return _array(value, name)


def _is_texts(value: Sequence[Any]) -> bool:
    return bool(value) and all(isinstance(part, _TEXTS) for part in value)


def _array(value: Any, name: str) -> Any:
    if isinstance(value, tf.RaggedTensor | tf.SparseTensor):
        return value
    if _is_of_torch(value):
        value = _from_torch(value, name)
    elif not isinstance(value, (np.ndarray, list, *_SCALARS)) and not hasattr(value, "__array__"):
        found = "None" if value is None else f"a {type(value).__name__}"
        remedy = "Leave it out" if value is None else "Convert it in the loader, such as with np.asarray or .toarray()"
        raise PipelineError(f"Expected arrays or tensors. Found {found} at {name}. {remedy}.")
    array = np.asarray(value, dtype=object if isinstance(value, list) and _is_texts(value) else None)
    texts = array.dtype.kind == "O" and all(isinstance(part, _TEXTS) for part in array.flat)
    if array.dtype.kind == "O" and not texts:
        raise PipelineError(
            f"Expected numbers, booleans or strings. Found an array of objects at {name}. Bring its parts to one shape "
            "and type in the loader."
        )
    try:
        tf.as_dtype(array.dtype)
    except TypeError as error:
        raise PipelineError(
            f"Expected a type that TensorFlow has. Found {array.dtype} at {name}. Convert it in the loader."
        ) from error
    return array


def _is_of_torch(value: Any) -> bool:
    return any(base.__name__ == "Tensor" and base.__module__.split(".")[0] == "torch" for base in type(value).__mro__)


def _from_torch(tensor: Any, name: str) -> Any:
    """Returns the memory of a tensor as a NumPy array; that of a GPU is copied."""
    on_host = tensor.detach().cpu()
    try:
        if str(on_host.dtype) == "torch.bfloat16":  # which NumPy lacks
            return on_host.contiguous().view(sys.modules["torch"].int16).numpy().view(tf.bfloat16.as_numpy_dtype)
        return on_host.numpy()
    except (TypeError, RuntimeError) as error:
        raise PipelineError(
            f"Expected a dense torch tensor of a type that NumPy has. Found {tensor.dtype}, {tensor.layout} at {name}: "
            f"{error}. Convert it in the loader, such as with .float() or .to_dense()."
        ) from error


def _expect_common_length(arrays: Any, what: str) -> None:
    remedy = "If these are single examples, pass loader(..., batched=False)."
    lengths = {}
    for name, leaf in named_leaves(arrays, what):
        if len(leaf.shape) == 0:
            raise PipelineError(f"Expected batches. Found a single value at {name}. {remedy}")
        lengths[name] = int(leaf.shape[0])
    if len(set(lengths.values())) != 1 or 0 in lengths.values():
        listed = ", ".join(f"{name} has {length:,}" for name, length in lengths.items()) or "no array"
        raise PipelineError(
            f"Expected batches whose parts have the same number of rows, at least one. Found: {listed}. {remedy}"
        )


def _spec(leaf: Any, *, batched: bool = False) -> Any:
    """Returns the spec of an array or tensor; the first axis of batches stays open."""
    spec = tf.type_spec_from_value(leaf)
    if not batched:
        return spec
    shape = [None, *spec.shape[1:]]
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    return type(spec)(shape, spec.dtype)


def _expect_same_leaves(expected: Any, found: Any, what: str) -> None:
    """Refuses specs of another structure, kind, dtype or rank."""
    ours, theirs = (dict(named_leaves(each, "element")) for each in (expected, found))
    remedy = "Make them alike in the loader."
    if ours.keys() != theirs.keys():
        raise PipelineError(
            f"Expected {', '.join(ours)}, as in the first ones. Found {', '.join(theirs)} in {what}. {remedy}"
        )
    for name in ours:
        one, other = _kind(ours[name]), _kind(theirs[name])
        if one != other:
            raise PipelineError(f"Expected {one} at {name}, as in the first ones. Found {other} in {what}. {remedy}")


def _kind(spec: Any) -> str:
    kind = type(spec).__name__.removesuffix("TensorSpec")
    return f"{kind} {spec.dtype.name} of {spec.shape.rank} axes".strip()
