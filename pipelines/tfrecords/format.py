"""What `write_records` writes: an example per record, and an index beside the shards, so that `records` needs no spec.

A record is a serialised `tf.train.Example` with one bytes feature per tensor: scalar strings as they are, which other
programs can read, and anything else as `tf.io.serialize_tensor` encodes it, which keeps dtype and shape.
"""

import hashlib
import json
import os
import re
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.files import write_atomic
from tfopt.pipelines.shared.elements import without_autograph
from tfopt.pipelines.shared.paths import is_remote, names_in, opened

INDEX_NAME = "index.json"
_VERSION = 1
_FORMAT = "tfopt.records"
# One altered byte cannot hit both, so our index is never taken for another program's.
_MARKS = (f'"{_FORMAT}"'.encode(), b'"checksum"')
_SHARD_NAME = re.compile(r"records-\d{5,}\.tfrecord(\.gz|\.zz)?")
_END_BYTES = 2**16
_BLOCK_BYTES = 2**20
# Those that serialize_tensor has a kernel for.
_DTYPES = frozenset(
    [
        *("bfloat16", "float16", "float32", "float64", "complex64", "complex128", "bool", "string"),
        *("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    ]
)
_ADVICE = "Bring the examples to tuples and dicts of tensors with the dataset's `map`."


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of records."""

    name: str
    count: int
    """Records in the file."""
    size_bytes: int
    sha256: str
    """Of the whole file, in hexadecimal digits."""
    ends_sha256: str
    """Of its first and last 64 KiB, checked before each training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """What `write_records` wrote."""

    shards: tuple[Shard, ...]
    """In the order of the examples."""
    spec: Any
    """Structure of an example with dtype and shape of each tensor, as JSON values."""
    compression: str = ""
    """"GZIP", "ZLIB", or "" for none."""
    image: bool = False
    """Whether the first tensor of an example is an encoded image."""
    only_jpeg: bool = False
    """Whether all of these images are JPEGs, so that a crop need not look."""
    class_names: tuple[str, ...] | None = None
    """Names of the classes, in the order of their labels; None if unknown."""
    shuffle_seed: int | None = None
    """The seed of the order in which they were written; None if that is the source's order."""

    @property
    def count(self) -> int:
        """Number of examples."""
        return sum(shard.count for shard in self.shards)

    def to_dict(self) -> dict[str, Any]:
        """Returns the index as JSON values."""
        names = None if self.class_names is None else list(self.class_names)
        return asdict(self) | {"shards": [asdict(shard) for shard in self.shards], "class_names": names}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Returns the index that `to_dict` turned into `values`."""
        names = values["class_names"]
        shards = tuple(Shard(**shard) for shard in values["shards"])
        return cls(**values | {"shards": shards, "class_names": None if names is None else tuple(names)})


def write_index(folder: str, index: Index) -> None:
    """Writes the index of a folder."""
    write_atomic(os.path.join(folder, INDEX_NAME), _text(index.to_dict()))


def has_index(folder: str) -> bool:
    """Whether a folder holds an index that `write_records` wrote, damaged or not."""
    path = os.path.join(folder, INDEX_NAME)
    if not (tf.io.gfile.exists(path) if is_remote(path) else os.path.isfile(path)):
        return False
    try:
        with opened(path) as file:
            contents = file.read()
        if any(mark in contents for mark in _MARKS):
            return True
        json.loads(contents)
    except (OSError, ValueError, tf.errors.OpError):
        # Emptied, overwritten or unreadable: only the names beside it can tell whose it is.
        return any(map(_SHARD_NAME.fullmatch, names_in(folder)))
    return False


def read_index(folder: str) -> Index:
    """Reads the index of a folder; refuses one that is damaged or of a newer version."""
    path = os.path.join(folder, INDEX_NAME)
    try:
        with opened(path) as file:
            contents = file.read()
        values = json.loads(contents)
        version = values.pop("version")
        del values["format"], values["checksum"]
    except (OSError, ValueError, KeyError, AttributeError, TypeError, tf.errors.OpError) as error:
        raise _damaged(path, f"it cannot be read ({type(error).__name__}: {error})") from error
    if version != _VERSION and isinstance(version, int) and contents == _text(values, version).encode():
        raise PipelineError(
            f"Expected an index of version {_VERSION} in {path!r}. Found version {version}. Update tfopt."
        )
    # Compared as bytes, so that every single one counts.
    if contents != _text(values).encode():
        raise _damaged(path, "its contents do not match its checksum")
    return Index.from_dict(values)


def file_sha256(path: str) -> str:
    """Returns the SHA-256 of a file, in hexadecimal digits."""
    digest = hashlib.sha256()
    with opened(path) as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def ends_sha256(path: str) -> str:
    """Returns the SHA-256 of a file's first and last 64 KiB, in hexadecimal digits."""
    with opened(path) as file:
        digest = hashlib.sha256(file.read(_END_BYTES))
        file.seek(max(0, tf.io.gfile.stat(path).length - _END_BYTES))
        digest.update(file.read(_END_BYTES))
    return digest.hexdigest()


def describe(spec: Any, path: tuple[str, ...] = ()) -> Any:
    """Returns an element spec as JSON values; refuses what cannot be stored."""
    if type(spec) is tuple:
        return {"tuple": [describe(part, (*path, str(index))) for index, part in enumerate(spec)]}
    if isinstance(spec, dict):
        for key in spec:
            # An empty key would share its feature with another tensor.
            if not isinstance(key, str) or not key or "/" in key or key.encode(errors="ignore").decode() != key:
                raise PipelineError(
                    f"Expected names in UTF-8, not empty and without '/', in an example. Found {key!r}. {_ADVICE}"
                )
        # Sorted, as tf.nest flattens a dict.
        return {"dict": {key: describe(spec[key], (*path, key)) for key in sorted(spec)}}
    if not isinstance(spec, tf.TensorSpec) or spec.dtype.name not in _DTYPES:
        raise PipelineError(
            f"Expected dense tensors in tuples and dicts, to write them as records. Found {spec} at "
            f"{'/'.join(path) or 'the top'}. {_ADVICE}"
        )
    shape = None if spec.shape.rank is None else spec.shape.as_list()
    return {"feature": "/".join(path) or "value", "dtype": spec.dtype.name, "shape": shape}


def restore(described: Any) -> Any:
    """Returns the element spec that `describe` turned into `described`."""
    if "tuple" in described:
        return tuple(map(restore, described["tuple"]))
    if "dict" in described:
        return {name: restore(part) for name, part in described["dict"].items()}
    return tf.TensorSpec(described["shape"], described["dtype"])


def features(described: Any) -> list[str]:
    """Returns the feature names, in the order of the element's tensors."""
    if "tuple" in described:
        return [name for part in described["tuple"] for name in features(part)]
    if "dict" in described:
        return [name for part in described["dict"].values() for name in features(part)]
    return [described["feature"]]


@without_autograph
def to_strings(example: Any) -> Any:
    """Encodes each tensor of an example; returns a string vector, in a graph."""
    return tf.stack(
        [leaf if _is_scalar_string(leaf) else tf.io.serialize_tensor(leaf) for leaf in tf.nest.flatten(example)]
    )


def pack(names: list[str], values: list[bytes]) -> bytes:
    """Returns the record that holds these features."""
    feature = {
        name: tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))
        for name, value in zip(names, values, strict=True)
    }
    example = tf.train.Example(features=tf.train.Features(feature=feature))
    # A protobuf map has no order otherwise, and equal data should give equal files.
    return bytes(example.SerializeToString(deterministic=True))


@without_autograph
def unpack(described: Any, record: Any) -> Any:
    """Returns the example in a record, in a graph."""
    spec, names = restore(described), features(described)
    stored = tf.io.parse_single_example(record, {name: tf.io.FixedLenFeature((), tf.string) for name in names})
    tensors = [
        stored[name]
        if _is_scalar_string(leaf)
        else tf.ensure_shape(tf.io.parse_tensor(stored[name], leaf.dtype), leaf.shape)
        for name, leaf in zip(names, tf.nest.flatten(spec), strict=True)
    ]
    return tf.nest.pack_sequence_as(spec, tensors)


def unpacks_in_batches(described: Any) -> bool:
    """Whether `unpack_batch` knows such examples: scalar strings, and numbers of known shapes."""
    return all(
        _is_scalar_string(leaf) or (leaf.dtype != tf.string and leaf.shape.is_fully_defined())
        for leaf in tf.nest.flatten(restore(described))
    )


@without_autograph
def unpack_batch(described: Any, records: Any) -> Any:
    """Returns the examples in a vector of records as a batch, in a graph; `unpacks_in_batches` has seen the spec."""
    spec, names = restore(described), features(described)
    stored = tf.io.parse_example(records, {name: tf.io.FixedLenFeature((), tf.string) for name in names})
    tensors, as_written = [], tf.constant(True)
    for name, leaf in zip(names, tf.nest.flatten(spec), strict=True):
        tensor = stored[name]
        if not _is_scalar_string(leaf):
            tensor, same = _contents(tensor, leaf)
            as_written &= same
        tensors.append(tensor)
    batch = tf.nest.pack_sequence_as(spec, tensors)

    def one_by_one() -> Any:  # for its errors, and for what another program wrote
        return tf.map_fn(lambda record: unpack(described, record), records, fn_output_signature=spec)

    return tf.cond(as_written, lambda: batch, one_by_one)


def _contents(strings: Any, spec: Any) -> tuple[Any, Any]:
    """Returns the tensors that are serialised in a vector, and whether they are: each is a fixed head and its bytes."""
    with tf.init_scope():
        blank = np.frombuffer(tf.io.serialize_tensor(tf.zeros(spec.shape, spec.dtype)).numpy(), np.uint8)
    head = blank[: len(blank) - spec.dtype.size * spec.shape.num_elements()]
    rows = tf.io.decode_raw(strings, tf.uint8, fixed_length=len(blank))  # pads and cuts where lengths differ
    same_length = tf.reduce_all(tf.strings.length(strings) == len(blank))
    same_head = tf.reduce_all(rows[:, : len(head)] == head)
    item = [spec.dtype.size] * (spec.dtype.size > 1)
    contents = tf.reshape(rows[:, len(head) :], [tf.shape(strings)[0], *spec.shape, *item])
    tensors = tf.cast(contents, tf.bool) if spec.dtype == tf.bool else tf.bitcast(contents, spec.dtype)
    return tensors, same_length & same_head


def _text(values: dict[str, Any], version: int = _VERSION) -> str:
    stated = {"format": _FORMAT, "version": version} | values
    checksum = hashlib.sha256(json.dumps(stated, sort_keys=True).encode()).hexdigest()
    return json.dumps(stated | {"checksum": checksum}, indent=1, ensure_ascii=False) + "\n"


def _damaged(path: str, what: str) -> PipelineError:
    return PipelineError(
        f"Expected the index that write_records wrote. {path!r} is damaged or was edited: {what}. Copy the folder or "
        "write the records again."
    )


def _is_scalar_string(leaf: Any) -> bool:
    return leaf.dtype == tf.string and leaf.shape.rank == 0
