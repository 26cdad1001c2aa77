"""Short descriptions of examples by which workers find out whether they hold the same ones."""

import hashlib
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfopt.pipelines.sources.source import Source

_ROWS = 16
_APART = 8  # places between two examples that are looked at, where these come in a random order
_LEAVES = 6
_DIGESTED_ROWS = 64

_UNREADABLE = (TypeError, ValueError, IndexError, AttributeError, NotImplementedError, tf.errors.OpError)

Rows = list[list[float]]
"""A number for each of up to 16 rows, in a list for each array."""


def sample(batch: Any) -> Rows:
    """Describes rows of arrays by a number each: rows at even distances, the first and the last among them.

    Integers and text have a checksum. Floating point numbers have a weighted sum, since two machines may compute them
    with another rounding. Arrays that NumPy cannot read, such as sparse ones, have no numbers.
    """
    leaves = [leaf for leaf in keras.tree.flatten(batch) if leaf is not None][:_LEAVES]
    return [_numbers(_rows(leaf)) for leaf in leaves]


def sample_source(source: Source, count: int) -> Rows:
    """Describes examples of a source as `sample` does those of arrays.

    They lie at even distances if the source reads by position, in a common random order if it has one, and else first.
    """
    if source.at is not None:
        raw = source.at(tf.data.Dataset.from_tensor_slices(_positions(count)))
    elif source.shuffled is not None:
        raw = source.shuffled(0).take(_ROWS * _APART).shard(_APART, 0)
    else:
        raw = source.dataset().take(_ROWS)
    examples = raw if source.decode is None else raw.map(source.decode)
    leaves = zip(*(keras.tree.flatten(example) for example in examples), strict=True)
    return [_numbers(leaf) for leaf in leaves][:_LEAVES]


def _positions(count: int) -> Any:
    return np.linspace(0, count - 1, min(count, _ROWS)).astype(np.int64)


def _rows(leaf: Any) -> Iterator[Any]:
    read = leaf.iloc if hasattr(leaf, "iloc") else leaf
    yield from (read[int(position)] for position in _positions(int(leaf.shape[0])))


def _numbers(rows: Iterable[Any]) -> list[float]:
    try:
        return [_number(np.asarray(row)) for row in rows]
    except _UNREADABLE:
        return []


def _number(row: Any) -> float:
    if row.dtype.kind != "f" and row.dtype.name != "bfloat16":
        return float(zlib.crc32(_text(row).encode() if row.dtype.kind in "OSU" else row.tobytes()))
    flat = np.nan_to_num(row.astype("float64").ravel(), posinf=1.0, neginf=-1.0)
    return float(flat @ np.cos(np.arange(flat.size)))


def _text(row: Any) -> str:
    """The elements of an array of objects; of a path only its end, since machines may mount a folder elsewhere."""
    texts = (value.decode(errors="replace") if isinstance(value, bytes) else str(value) for value in row.ravel())
    return "\n".join(os.path.basename(text) for text in texts)


def differ(one: Rows, other: Rows) -> list[bool]:
    """Returns for each array whether its rows differ, without arrays whose rows are all alike and so say nothing."""
    pairs = [(ours, theirs) for ours, theirs in zip(one, other, strict=False) if ours and theirs]
    return [not _close(ours, theirs) for ours, theirs in pairs if not (_alike(ours) and _alike(theirs))]


def _alike(numbers: Sequence[float]) -> bool:
    return max(numbers) == min(numbers)


def _close(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    least = 1e-5 * max(map(abs, [*ours, *theirs]))
    return len(ours) == len(theirs) and all(map(lambda a, b: math.isclose(a, b, abs_tol=least), ours, theirs))


def digest(parts: Sequence[Any]) -> str:
    """Returns a hash of a batch, given the parts that this worker's replicas have; "" if it says nothing.

    A batch in which an example occurs twice says nothing: in such data, another worker may have the same batch rightly.
    """
    rows = []
    for part in parts:
        try:
            leaves = [np.asarray(leaf)[:_DIGESTED_ROWS] for leaf in keras.tree.flatten(part) if leaf is not None]
        except _UNREADABLE:  # ragged or sparse
            return ""
        batched = [leaf for leaf in leaves if leaf.ndim]
        rows += [b"".join(_bytes(row) for row in example) for example in zip(*batched, strict=False)]
    if len(rows) < 2 or len(set(rows)) < len(rows):
        return ""
    return hashlib.blake2b(b"\n".join(rows), digest_size=16).hexdigest()


def _bytes(row: Any) -> bytes:
    row = np.asarray(row)
    return repr(row.tolist()).encode() if row.dtype.kind == "O" else row.tobytes()
