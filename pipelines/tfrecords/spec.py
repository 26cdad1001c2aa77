"""How an example is stored in a record, so that it is read back without a description of its features.

A record is a serialised `tf.train.Example` with one bytes feature a tensor: a scalar text as it is, which other
programs read, and everything else as `tf.io.serialize_tensor` gives it, which keeps dtype and shape exactly.
"""

from typing import Any

import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.pipelines.shared.elements import leaves, without_autograph

# What serialize_tensor has a kernel for.
_DTYPES = frozenset(
    [
        *("bfloat16", "float16", "float32", "float64", "complex64", "complex128", "bool", "string"),
        *("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    ]
)
_ADVICE = "Bring the examples to tuples and dicts of tensors with the dataset's `map`."


def describe(spec: Any) -> Any:
    """Returns an element spec as JSON values: tuples and dicts, and each tensor's feature, dtype and shape.

    Raises:
        PipelineError: The structure or a tensor's kind cannot be stored.
    """
    return _describe(spec, ())


def restore(described: Any) -> Any:
    """Returns the element spec that `describe` was given."""
    if "tuple" in described:
        return tuple(map(restore, described["tuple"]))
    if "dict" in described:
        return {name: restore(part) for name, part in described["dict"].items()}
    return tf.TensorSpec(described["shape"], described["dtype"])


def features(described: Any) -> list[str]:
    """Returns the names of the features in the order of the element's tensors."""
    if "tuple" in described:
        return [name for part in described["tuple"] for name in features(part)]
    if "dict" in described:
        return [name for part in described["dict"].values() for name in features(part)]
    return [described["feature"]]


@without_autograph
def to_strings(example: Any) -> Any:
    """Returns the bytes of each tensor of an example as a vector of texts, in a graph."""
    return tf.stack([leaf if _is_text(leaf) else tf.io.serialize_tensor(leaf) for leaf in leaves(example)])


def pack(names: list[str], values: list[bytes]) -> bytes:
    """Returns the record that holds these features."""
    feature = {
        name: tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))
        for name, value in zip(names, values, strict=True)
    }
    # Deterministic: the features of a map have no order otherwise, and equal data shall give equal files.
    example = tf.train.Example(features=tf.train.Features(feature=feature))
    return bytes(example.SerializeToString(deterministic=True))


@without_autograph
def unpack(described: Any, record: Any) -> Any:
    """Returns the example of a record, in a graph."""
    spec, names = restore(described), features(described)
    stored = tf.io.parse_single_example(record, {name: tf.io.FixedLenFeature((), tf.string) for name in names})
    tensors = [
        stored[name] if _is_text(leaf) else tf.ensure_shape(tf.io.parse_tensor(stored[name], leaf.dtype), leaf.shape)
        for name, leaf in zip(names, leaves(spec), strict=True)
    ]
    return tf.nest.pack_sequence_as(spec, tensors)


def _is_text(leaf: Any) -> bool:
    return leaf.dtype == tf.string and leaf.shape.rank == 0


def _is_utf8(text: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _describe(spec: Any, path: tuple[str, ...]) -> Any:
    if type(spec) is tuple:
        return {"tuple": [_describe(part, (*path, str(index))) for index, part in enumerate(spec)]}
    if isinstance(spec, dict):
        for key in spec:
            # An empty one would share its feature with another tensor.
            if not isinstance(key, str) or not key or "/" in key or not _is_utf8(key):
                raise PipelineError(
                    f"Expected names in UTF-8, not empty and without '/', in an example. Found {key!r}. {_ADVICE}"
                )
        # Sorted, as tf.nest flattens a dict.
        return {"dict": {key: _describe(spec[key], (*path, key)) for key in sorted(spec)}}
    if not isinstance(spec, tf.TensorSpec) or spec.dtype.name not in _DTYPES:
        raise PipelineError(
            f"Expected dense tensors in tuples and dicts, to write them as records. Found {spec} at "
            f"{'/'.join(path) or 'the top'}. {_ADVICE}"
        )
    shape = None if spec.shape.rank is None else spec.shape.as_list()
    return {"feature": "/".join(path) or "value", "dtype": spec.dtype.name, "shape": shape}
