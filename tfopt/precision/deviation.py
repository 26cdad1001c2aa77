"""How far tensors computed in another dtype are from float32: counted in the graph, summed up outside it."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import tensorflow as tf


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """The distance of some tensors from float32, in the worst batch.

    Attributes:
        error: Norm of the difference over the norm in float32, both over what is finite; infinite where float32 has
            zeros only and the other dtype has not.
        overflow: Share of elements, 0 to 1, that are not finite and are in float32.
        underflow: Share of the elements other than zero in float32 that are zero.
        lost: What these elements make of the norm in float32, 0 to 1: whether the zeros matter.
        largest: The largest magnitude in float32.
        norm: The norm in float32.
        difference: The norm of the difference.
    """

    error: float
    overflow: float
    underflow: float
    lost: float
    largest: float
    norm: float
    difference: float

    def to_dict(self) -> dict[str, Any]:
        """JSON: what is not finite is null."""
        return {name: value if math.isfinite(value) else None for name, value in asdict(self).items()}


@tf.function(
    input_signature=[tf.TensorSpec([None], tf.float32)] * 2,
    autograph=False,
    experimental_attributes={"_noinline": True},  # copies of it for every tensor took longer to optimise than to run
)
def _moments(reference: tf.Tensor, candidate: tf.Tensor) -> tf.Tensor:
    known = tf.math.is_finite(reference)
    both = known & tf.math.is_finite(candidate)
    zero = tf.zeros_like(reference)
    reference = tf.where(known, reference, zero)
    # Squares of large or tiny values leave float32's range, so everything is taken in units of the largest.
    largest = tf.maximum(tf.reduce_max(tf.abs(reference)), 0.0)  # the maximum of nothing is minus infinity
    unit = tf.maximum(tf.reduce_max(tf.where(both, tf.abs(candidate), zero)), largest)
    difference = tf.where(both, tf.math.divide_no_nan(candidate, unit) - tf.math.divide_no_nan(reference, unit), zero)
    squares = tf.math.divide_no_nan(reference, unit) ** 2
    vanished = both & (candidate == 0) & (reference != 0)
    counts = (known, known & ~both, reference != 0, vanished)
    sums = (squares, difference**2, tf.where(vanished, squares, zero))
    return tf.stack(
        [
            tf.cast(tf.size(known) - tf.math.count_nonzero(known, dtype=tf.int32), tf.float32),
            *(tf.math.count_nonzero(count, dtype=tf.float32) for count in counts),
            *(tf.reduce_sum(part) for part in sums),
            unit,
            largest,
        ]
    )


def moments(reference: Any, candidate: Any) -> tf.Tensor:
    """What `summed_up` needs of a tensor in float32 and in another dtype, shape (10,); no tensor leaves the graph."""
    flat = [tf.reshape(tf.cast(tf.convert_to_tensor(value), tf.float32), [-1]) for value in (reference, candidate)]
    return _moments(*flat)


def summed_up(batches: Iterable[np.ndarray[Any, Any]]) -> Deviation:
    """The deviation of some tensors from their moments.

    Args:
        batches: For each batch the moments of every tensor, shape (tensors, 10).
    """
    each = [_of_a_batch(batch.astype("float64")) for batch in batches]
    # max() of Python would pass over a NaN or not, depending on its place.
    return Deviation(**{name: float(np.max([part[name] for part in each])) for name in each[0]})


def not_finite(moments: np.ndarray[Any, Any]) -> bool:
    """Whether float32 itself has values that are not finite; moments of shape (tensors, 10)."""
    return bool(moments[:, 0].any())


def _of_a_batch(moments: np.ndarray[Any, Any]) -> dict[str, float]:
    _, known, overflowed, nonzero, vanished, *sums, unit, largest = moments.T
    total, difference, lost = (float(np.sum(part * unit**2)) for part in sums)
    return {
        "error": _ratio(math.sqrt(difference), math.sqrt(total)),
        "overflow": _ratio(overflowed.sum(), known.sum()),
        "underflow": _ratio(vanished.sum(), nonzero.sum()),
        "lost": _ratio(math.sqrt(lost), math.sqrt(total)),
        "largest": float(largest.max(initial=0.0)),
        "norm": math.sqrt(total),
        "difference": math.sqrt(difference),
    }


def _ratio(part: float, whole: float) -> float:
    if not part:
        return 0.0
    return float(part / whole) if whole else math.inf
