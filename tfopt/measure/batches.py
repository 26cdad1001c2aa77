"""Batches to measure on: from a dataset or given, as `fit` would hand them to the training step."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfopt.errors import PipelineError

Data = Any
"""A tf.data.Dataset of batches (x, y[, sample_weight]), or one such batch as a tuple."""


def one_batch(data: Data) -> Any:
    """The first batch of a dataset, or the one batch given: for variants that must see the same.

    Args:
        data: A tf.data.Dataset of batches or one batch.

    Returns:
        What the dataset yields, such as (x, y[, sample_weight]), as tensors.

    Raises:
        TypeError: `data` is neither a dataset nor a batch.
        ValueError: A None stands before another part of the batch.
        tfopt.errors.PipelineError: The dataset is empty.
    """
    batch = next(iter(as_dataset(data)), None)
    if batch is None:
        raise _empty()
    return batch


def as_dataset(data: Data) -> tf.data.Dataset:
    """The dataset given, or one that holds the one batch given."""
    if isinstance(data, tf.data.Dataset):
        return data
    if isinstance(data, tf.Tensor | dict):  # for a train_step that takes such
        return tf.data.Dataset.from_tensors(_as_fit_takes(data))
    if isinstance(data, tuple) and 1 <= len(data) <= 3:
        parts = [part for part in data if part is not None]
        if not parts or any(part is None for part in data[: len(parts)]):  # fit would take what follows for it
            given = ", ".join("None" if part is None else type(part).__name__ for part in data)
            raise ValueError(
                f"Expected None in a batch only after everything else. Received: ({given}). Give what stands for it, "
                "or put the sample weights to use in the model's train_step."
            )
        return tf.data.Dataset.from_tensors(_as_fit_takes(parts))
    raise TypeError(
        "Expected a tf.data.Dataset of batches or one batch, a tuple (x, y[, sample_weight]). "
        f"Received: {type(data).__name__}. Make a dataset with tfopt.pipelines.build_pipeline(...)."
    )


def _as_fit_takes(value: Any) -> Any:
    """Lists as tuples, which tf.data would take for one array; NumPy's floats as Keras' floatx."""
    if isinstance(value, dict):
        return {key: _as_fit_takes(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return tuple(_as_fit_takes(part) for part in value)
    if isinstance(value, np.ndarray) and value.dtype.kind == "f":
        return value.astype(keras.config.floatx())
    return value


def first_batch(model: keras.Model, dataset: tf.data.Dataset) -> Any:
    """The first batch as `fit` would hand it to the step: under a strategy, one part for each replica."""
    batch = next(iter(model.distribute_strategy.experimental_distribute_dataset(dataset)), None)
    if batch is None:
        raise _empty()
    return batch


def _empty() -> PipelineError:
    return PipelineError(
        "Expected a dataset of at least one batch. Found none. "
        "Check its source, and that drop_remainder leaves a batch: it needs batch_size examples."
    )


def on_device(model: keras.Model, batch: Any) -> Any:
    """Copies a batch to the GPU, where there is one; a strategy has done so already."""
    if model._distribute_strategy is not None or not tf.config.list_logical_devices("GPU"):
        return batch
    with tf.device("/GPU:0"):
        return tf.nest.map_structure(tf.identity, batch)


def batch_size(model: keras.Model, batch: Any) -> int:
    """Examples a step, over all replicas of this process."""
    return sum(
        int(part.shape[0]) for part in model.distribute_strategy.experimental_local_results(tf.nest.flatten(batch)[0])
    )


def not_finite_parts(batch: Any) -> list[str]:
    """Which parts of a batch hold NaN or infinity: "x", "y", "sample_weight"; "the batch" for one without parts."""
    names = ("x", "y", "sample_weight")
    named = zip(names, batch, strict=False) if isinstance(batch, tuple) else [("the batch", batch)]
    return [name for name, part in named if not all(map(_is_finite, tf.nest.flatten(part, expand_composites=True)))]


def _is_finite(tensor: Any) -> bool:
    if tensor is None or not tensor.dtype.is_floating:  # fit takes targets with None for outputs without a loss
        return True
    return bool(tf.reduce_all(tf.math.is_finite(tensor)))
