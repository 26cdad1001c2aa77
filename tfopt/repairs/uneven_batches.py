"""D2: in a batch that splits unevenly over the replicas, examples have unequal weights.

D26: behind a mask, a synchronized BatchNormalization uses each replica's examples alone.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from tfopt.errors import UnsupportedError
from tfopt.repairs.probes import on_replicas
from tfopt.repairs.repair import Function, Repair, in_several_replicas, is_alone, trains_together

_TRAINER = "keras.src.backend.tensorflow.trainer:TensorFlowTrainer"
_LOSS = "keras.src.losses.loss"
_NORMALIZATION = "keras.src.layers.normalization.batch_normalization:BatchNormalization"

# While a replica's step is traced, its thread's share of the global batch.
_tracing = threading.local()


def _over_all(value: Any) -> Any:
    """Sums over the replicas."""
    return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, value)


@contextmanager
def _share_of(data: Any) -> Iterator[None]:
    """Records this replica's share of the global batch, unless all shares are equal."""
    batched = [leaf for leaf in keras.tree.flatten(data) if tf.is_tensor(leaf) and leaf.shape.rank != 0]
    # In a graph, a static shape holds for all replicas; eager batches always have one.
    even = batched and batched[0].shape[0] is not None and not tf.executing_eagerly()
    if not batched or even or not trains_together():
        yield
        return
    examples = tf.cast(tf.shape(batched[0])[0], tf.float32)
    before = getattr(_tracing, "share", None)
    everywhere = _over_all(examples)
    _tracing.share = tf.cast(examples, tf.float64) / tf.cast(
        everywhere, tf.float64
    )  # so that float64 losses stay exact
    try:
        yield
    finally:
        _tracing.share = before


def _weighing(original: Function) -> Function:
    def _make_function(self: Any, step_function: Function) -> Function:
        def step(data: Any) -> Any:
            with _share_of(data):
                return step_function(data)

        return original(self, step)

    return _make_function


def _scaling(original: Function) -> Function:
    def scale_loss_for_distribution(value: Any) -> Any:
        if is_alone():
            return value
        share = getattr(_tracing, "share", None)
        return original(value) if share is None else value * tf.cast(share, value.dtype)

    return scale_loss_for_distribution


def _unscaling(original: Function) -> Function:
    def unscale_loss_for_distribution(value: Any) -> Any:
        if is_alone():
            return value
        share = getattr(_tracing, "share", None)
        return original(value) if share is None else tf.math.divide_no_nan(value, tf.cast(share, value.dtype))

    return unscale_loss_for_distribution


def _reducing(original: Function) -> Function:
    def reduce_values(values: Any, sample_weight: Any = None, reduction: str = "sum_over_batch_size") -> Any:
        if not values.shape.rank and reduction not in (None, "none", "sum") and trains_together():
            raise UnsupportedError(
                "Expected a loss per example, to be averaged over the examples of all replicas. Found: one number for "
                "a replica's whole batch. Return a loss per example (no mean over the first axis, and predictions of "
                "at least two dimensions), or train on one device."
            )
        weighted = reduction == "mean_with_sample_weight" and sample_weight is not None
        if not weighted or not values.shape.rank or not trains_together():
            return original(values, sample_weight, reduction)
        # The weighted mean over all replicas, not the mean of their means.
        weight = _over_all(tf.cast(tf.reduce_sum(sample_weight), values.dtype))
        return tf.math.divide_no_nan(tf.reduce_sum(values), weight)

    return reduce_values


def _masking(original: Function) -> Function:
    def apply_mask(sample_weight: Any, mask: Any, dtype: Any, reduction: str) -> Any:
        if mask is None or reduction not in ("mean", "sum_over_batch_size") or not trains_together():
            return original(sample_weight, mask, dtype, reduction)
        # Keras weighs with the replica's ratio of all to valid positions, which must be the global batch's.
        kept = tf.cast(mask, dtype)
        here = tf.stack([tf.cast(tf.size(kept), dtype), tf.reduce_sum(kept)])
        everywhere = _over_all(here)
        ratio = tf.math.divide_no_nan(
            tf.math.divide_no_nan(everywhere[0], everywhere[1]), tf.math.divide_no_nan(here[0], here[1])
        )
        return original(sample_weight, mask, dtype, reduction) * ratio

    return apply_mask


def _keeping_statistics(original: Function) -> Function:
    def _moments(self: Any, inputs: Any, mask: Any) -> Any:
        if self.synchronized and mask is not None and trains_together():
            return _masked_moments(inputs, mask, self._reduction_axes)
        mean, variance = original(self, inputs, mask)
        if self.synchronized or not in_several_replicas() or inputs.shape[0]:
            return mean, variance
        # A replica without examples has NaN statistics, which would stay in the moving averages.
        empty = tf.equal(tf.shape(inputs)[0], 0)
        return (
            tf.where(empty, tf.cast(self.moving_mean, mean.dtype), mean),
            tf.where(empty, tf.cast(self.moving_variance, variance.dtype), variance),
        )

    return _moments


def _masked_moments(inputs: Any, mask: Any, axes: Any) -> tuple[Any, Any]:
    """Keras' mean and variance of what a mask keeps, over all replicas."""
    kept = tf.broadcast_to(tf.expand_dims(tf.cast(mask, bool), -1), tf.shape(inputs))

    def total(values: Any) -> Any:
        return _over_all(tf.reduce_sum(tf.where(kept, values, 0), axes, keepdims=True))

    count = total(tf.ones_like(inputs)) + keras.backend.epsilon()
    mean = total(inputs) / count
    return tf.squeeze(mean), tf.squeeze(total(tf.square(inputs - mean)) / count)


UNEVEN_BATCHES = Repair(
    name="uneven_batches",
    defect=(
        "Under a tf.distribute strategy with several replicas, a batch that splits unevenly (the last one of an epoch) "
        "weighs replicas equally instead of examples; so do masks and sample weights that differ between replicas. A "
        "replica without examples fills BatchNormalization with NaN, and behind a mask a synchronized one uses the "
        "examples of each replica alone."
    ),
    reference="Keras, scale_loss_for_distribution in keras/src/losses/loss.py; no upstream report was found.",
    broken={
        f"{_TRAINER}._make_function": frozenset({"703051878417df76"}),
        f"{_LOSS}:scale_loss_for_distribution": frozenset({"d51ce2890a926a77"}),
        f"{_LOSS}:unscale_loss_for_distribution": frozenset({"7d7ba58a65159a39"}),
        f"{_LOSS}:reduce_values": frozenset({"426eafe27d1d3164"}),
        f"{_LOSS}:apply_mask": frozenset({"fea4b325cbec9bec", "8d23954a98963c02"}),
        f"{_NORMALIZATION}._moments": frozenset({"4ef2dd17257b8c7f", "ff851231065f0b99"}),
    },
    replace={
        f"{_TRAINER}._make_function": _weighing,
        f"{_LOSS}:scale_loss_for_distribution": _scaling,
        f"{_LOSS}:unscale_loss_for_distribution": _unscaling,
        f"{_LOSS}:reduce_values": _reducing,
        f"{_LOSS}:apply_mask": _masking,
        f"{_NORMALIZATION}._moments": _keeping_statistics,
    },
    probe=on_replicas("UNEVEN_BATCHES", "uneven", [0.0, 2.0], 1e-4),
    without="Drop the smaller last batch (drop_remainder=True), and use neither masks nor sample weights.",
)
