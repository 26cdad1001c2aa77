"""Batches of examples of similar length, padded to one of few lengths."""

from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.pipelines.shared.elements import element_of, without_autograph

WINDOW = 64  # batches that are formed together: half as many lose 5 % to padding that 64 do not
_MOST = 8  # lengths: XLA compiles once for each
_MULTIPLE = 8  # of which lengths are, as Tensor Cores like them
_MOST_CANDIDATES = 256


def lengths_of(shapes: Any, spec: Any) -> Any:
    """Returns the length of each example, that of its longest part: int64 (examples).

    Args:
        shapes: Of each example, the shapes of its parts.
        spec: The examples' spec, which says which parts have a length.
    """
    varying = _varying(spec)
    return np.array([max(shape[at][0] for at in varying) for shape in shapes], np.int64)


def choose_boundaries(lengths: Any) -> tuple[int, ...]:
    """Returns up to eight lengths to pad to, multiples of eight, that add the fewest padding to these examples.

    Args:
        lengths: Of some of the examples: integers (examples).
    """
    rounded = -(-np.maximum(lengths, 1) // _MULTIPLE) * _MULTIPLE
    candidates = np.unique(rounded)
    if len(candidates) > _MOST_CANDIDATES:
        at = np.linspace(0, len(candidates) - 1, _MOST_CANDIDATES).round().astype(int)
        candidates = candidates[at]
    below = np.searchsorted(np.sort(rounded), np.concatenate([[0], candidates]), "right")
    # The least that the first j candidates cost with so many boundaries, and which boundary came before.
    least = np.where(np.arange(len(below)) == 0, 0.0, np.inf)
    before = []
    for _ in range(min(_MOST, len(candidates))):
        costs = [least[:j] + candidates[j - 1] * (below[j] - below[:j]) for j in range(1, len(below))]
        before.append([0, *(int(cost.argmin()) for cost in costs)])
        least = np.array([0.0, *(cost.min() for cost in costs)])
    chosen, j = [], len(candidates)
    for previous in reversed(before):
        if j:
            chosen.append(int(candidates[j - 1]))
            j = previous[j]
    return tuple(reversed(chosen))


def bucketed(examples: Any, size: int, boundaries: tuple[int, ...], *, full: bool) -> Any:
    """Returns a dataset of batches of examples of similar length, each padded to a boundary with zeros.

    Of each 64 batches' examples, in their order, those with the same boundary come together; a batch takes its place
    when its last example has come. So the batches depend on nothing but that order. Examples at the end that fill no
    batch make a smaller one, or are left out, whatever their lengths. Longer ones than the last boundary are padded to
    it times a power of two.

    Args:
        examples: A dataset of them.
        size: Examples in a batch.
        boundaries: As `choose_boundaries` returns them.
        full: Whether a smaller last batch is left out.
    """
    spec = examples.element_spec
    varying = set(_varying(spec))

    @without_autograph
    def batches(*parts: Any) -> Any:
        window = tf.nest.flatten(element_of(parts, spec))
        lengths = tf.reduce_max([window[at].row_lengths() for at in varying], 0)
        targets = _targets(lengths, boundaries)
        rows = tf.size(lengths)
        whole = rows - rows % size
        together = tf.reshape(tf.argsort(targets[:whole], stable=True), (-1, size))
        together = tf.gather(together, tf.argsort(tf.reduce_max(together, 1)))
        order = tf.concat([tf.reshape(together, (-1,)), tf.range(whole, rows)], 0)
        number = whole // size if full else -(-rows // size)

        @without_autograph
        def batch(at: Any) -> Any:
            chosen = order[at * size : (at + 1) * size]
            length = tf.reduce_max(tf.gather(targets, chosen))
            leaves = [
                _padded(tf.gather(leaf, chosen), length) if index in varying else tf.gather(leaf, chosen)
                for index, leaf in enumerate(window)
            ]
            for leaf, each in zip(leaves, tf.nest.flatten(spec), strict=True):
                leaf.set_shape((size if full else None, *each.shape))
            return tf.nest.pack_sequence_as(spec, leaves)

        return tf.data.Dataset.range(tf.cast(number, tf.int64)).map(batch, num_parallel_calls=tf.data.AUTOTUNE)

    windows = examples.ragged_batch(WINDOW * size, name="bucket")
    return windows.interleave(batches, cycle_length=1, num_parallel_calls=1, name="bucket")


def _targets(lengths: Any, boundaries: tuple[int, ...]) -> Any:
    """The length that each example is padded to."""
    limits = tf.constant(boundaries, tf.int64)
    fitting = tf.gather(limits, tf.minimum(tf.searchsorted(limits, lengths), len(boundaries) - 1))
    return tf.while_loop(
        lambda targets: tf.reduce_any(targets < lengths),
        lambda targets: [tf.where(targets < lengths, 2 * targets, targets)],
        [fitting],
    )[0]


def _padded(rows: Any, length: Any) -> Any:
    dense = rows.to_tensor()
    missing = tf.cast(length, tf.int32) - tf.shape(dense)[1]
    return tf.pad(dense, [[0, 0], [0, missing], *[[0, 0]] * (dense.shape.rank - 2)])


def _varying(spec: Any) -> list[int]:
    """Which parts of an example have a first axis of unknown length."""
    return [at for at, leaf in enumerate(tf.nest.flatten(spec)) if leaf.shape.rank and leaf.shape[0] is None]
