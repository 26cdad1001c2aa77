"""What is needed of a tensor in two dtypes to tell how far they are apart, taken inside the graph."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.precision.gate.layer_table import Deviation

# Fewer values of a feature say nothing about its spread.
_LEAST_ROWS = 8
# Spread over magnitude of a feature that is constant but for float32's rounding.
_CONSTANT = 1e-5


@tf.function(
    input_signature=[tf.TensorSpec([None], tf.float32)] * 2,
    autograph=False,
    experimental_attributes={"_noinline": True},  # inlined for every tensor, it took longer to optimise than to run
)
def _moments(reference: tf.Tensor, candidate: tf.Tensor) -> tf.Tensor:
    known = tf.math.is_finite(reference)
    both = known & tf.math.is_finite(candidate)
    zero = tf.zeros_like(reference)
    reference = tf.where(known, reference, zero)
    # Squares of large or tiny values leave float32's range, so the sums are in units of the largest value.
    largest = tf.maximum(tf.reduce_max(tf.abs(reference)), 0.0)  # the maximum of an empty tensor is -inf
    unit = tf.maximum(tf.reduce_max(tf.where(both, tf.abs(candidate), zero)), largest)
    found = tf.math.divide_no_nan(tf.where(both, candidate, zero), unit)
    difference = tf.where(both, found - tf.math.divide_no_nan(reference, unit), zero)
    squares = tf.math.divide_no_nan(reference, unit) ** 2
    vanished = both & (candidate == 0) & (reference != 0)
    counts = (known, known & ~both, reference != 0, vanished)
    sums = (squares, difference**2, tf.where(vanished, squares, zero), found**2)
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
    """What `worst_deviation` needs of a tensor in two dtypes, shape (11,), so that no tensor leaves the graph."""
    flat = [tf.reshape(tf.cast(tf.convert_to_tensor(value), tf.float32), [-1]) for value in (reference, candidate)]
    return _moments(*flat)


def grid(reference: tf.Tensor, candidate: tf.Tensor, epsilon: float | None = None) -> tf.Tensor:
    """Compares the features (last axis) of a tensor of the batch: which one rounding hides most.

    `epsilon` is that of the batch normalisation that takes the tensor, if one does.

    Returns, of that feature, the rounding error over its spread, both as standard deviations over the batch, its
    number, its largest magnitude and its spread; and the share of elements that change if all are whole numbers.
    """
    width = reference.shape[-1] if reference.shape.rank and reference.shape.rank > 1 else 1
    values, found = (tf.reshape(tf.cast(x, tf.float32), [-1, width or 1]) for x in (reference, candidate))
    known = tf.math.is_finite(values)
    values = tf.where(known, values, 0.0)
    off = tf.where(known, found - values, 0.0)
    spread = tf.math.reduce_std(values, axis=0)
    # A feature that hardly varies beside the others, such as the background of an image, tells little.
    seen = spread if epsilon is None else spread / tf.sqrt(spread**2 + epsilon)
    tells = (seen >= 0.1 * tf.sqrt(tf.reduce_mean(seen**2))) & (tf.shape(values)[0] >= _LEAST_ROWS)
    tells &= spread > _CONSTANT * tf.reduce_max(tf.abs(values), axis=0)
    error = tf.sqrt(tf.reduce_mean(tf.where(tf.math.is_finite(off), off, np.inf) ** 2, axis=0))
    ratio = tf.where(tells, error / spread, 0.0)
    worst = tf.argmax(ratio)
    changed = tf.reduce_mean(tf.cast(off != 0, tf.float32))
    parts = [ratio[worst], tf.cast(worst, tf.float32), tf.reduce_max(tf.abs(values[:, worst])), spread[worst]]
    return tf.stack([*parts, tf.where(tf.reduce_all(values == tf.round(values)), changed, 0.0)])


def worst_deviation(batches: Iterable[np.ndarray[Any, Any]]) -> Deviation:
    """The deviation of some tensors taken together, from their moments in each batch, shape (tensors, 11)."""
    each = [_of_batch(batch.astype("float64")) for batch in batches]
    # Python's max() ignores a NaN or not, depending on its place.
    return Deviation(**{name: float(np.max([part[name] for part in each])) for name in each[0]})


def not_finite(moments: np.ndarray[Any, Any]) -> bool:
    """Whether float32 itself has NaN or infinity, from moments of shape (tensors, 11)."""
    return bool(moments[:, 0].any())


def _of_batch(moments: np.ndarray[Any, Any]) -> dict[str, float]:
    _, known, overflowed, nonzero, vanished, *sums, unit, largest = moments.T
    total, difference, lost, found = (float(np.sum(part * unit**2)) for part in sums)
    return {
        "error": _ratio(math.sqrt(difference), math.sqrt(total)),
        "overflow": _ratio(overflowed.sum(), known.sum()),
        "underflow": _ratio(vanished.sum(), nonzero.sum()),
        "lost": _ratio(math.sqrt(lost), math.sqrt(total)),
        "largest": float(largest.max(initial=0.0)),
        "norm": math.sqrt(total),
        "difference": math.sqrt(difference),
        "shrunk": max(0.0, 1 - math.sqrt(found / total)) if total else 0.0,
    }


def _ratio(part: float, whole: float) -> float:
    if not part:
        return 0.0
    return float(part / whole) if whole else math.inf
