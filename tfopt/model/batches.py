"""Batches as `fit` would hand them to the training step, from a dataset or given directly."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.warn import warn_caller

Data = Any
"""A tf.data.Dataset of batches (x, y[, sample_weight]), or one such batch as a tuple."""

_LARGE_BATCH = 4096  # examples; more are probably a data set that was meant

# The attributes under which tfopt.pipelines, a floor above, attaches to a dataset a device stage, and the place from
# which its next iteration reads.
DEVICE_STAGE = "_tfopt_device_stage"
PLACE = "_tfopt_place"
OVERLAP = "_tfopt_overlap"
"""The attribute of a model, set by tfopt.fit, in which its overlap is kept: in `__dict__`, as Keras tracks others."""


def one_batch(data: Data) -> Any:
    """Returns one batch, so that several variants can be measured on the same data.

    Args:
        data: A tf.data.Dataset of batches, whose first one is taken, or one batch.

    Returns:
        What the dataset yields, such as (x, y[, sample_weight]), as tensors.

    Raises:
        TypeError: If `data` is neither a dataset nor a batch.
        ValueError: If a None precedes another part of the batch.
        tfopt.errors.PipelineError: If the dataset is empty.
    """
    return _first(as_dataset(data))


def as_dataset(data: Data) -> tf.data.Dataset:
    """Returns a dataset as it is, and one batch as a dataset of one element; raises as `one_batch` does."""
    if isinstance(data, tf.data.Dataset):
        return data
    if isinstance(data, tf.Tensor | dict):  # for a custom train_step
        return tf.data.Dataset.from_tensors(_as_fit_takes(data))
    if isinstance(data, tuple) and 1 <= len(data) <= 3:
        parts = [part for part in data if part is not None]
        if not parts or any(part is None for part in data[: len(parts)]):  # fit would shift the parts that follow
            given = ", ".join("None" if part is None else type(part).__name__ for part in data)
            raise ValueError(
                f"Expected None in a batch only after all other parts. Received: ({given}). Give the missing part, "
                "or apply the sample weights in the model's train_step."
            )
        _warn_of_many(parts)
        return tf.data.Dataset.from_tensors(_as_fit_takes(parts))
    raise TypeError(
        "Expected a tf.data.Dataset of batches or one batch, a tuple (x, y[, sample_weight]). "
        f"Received: {type(data).__name__}{f' of {len(data)}' if isinstance(data, tuple) else ''}. Make a dataset with "
        "tfopt.pipelines.build_pipeline(...), or with tf.data.Dataset.from_tensors(batch) if the model has its own "
        "train_step that takes another kind of batch."
    )


def _warn_of_many(parts: Sequence[Any]) -> None:
    shape: Any = getattr(tf.nest.flatten(parts)[0], "shape", None)
    if shape and shape[0] is not None and shape[0] > _LARGE_BATCH:
        warn_caller(
            f"Took {shape[0]:,} examples as one batch, since a tuple of arrays is one. If they are a data set, pass "
            "batches of it: build_pipeline(arrays, batch_size=...), or tf.data.Dataset.from_tensor_slices(arrays)"
            ".batch(...)."
        )


def _as_fit_takes(value: Any) -> Any:
    """Lists as tuples, since tf.data would stack a list into one array; NumPy floats as Keras' floatx."""
    if isinstance(value, dict):
        return {key: _as_fit_takes(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return tuple(_as_fit_takes(part) for part in value)
    if isinstance(value, np.ndarray) and value.dtype.kind == "f":
        return value.astype(keras.config.floatx())
    return value


def first_alike_batches(data: Data, count: int) -> list[Any]:
    """Returns those of the first `count` batches that have the very first one's shapes, so that a step is traced once.

    It raises as `one_batch` does, and a PipelineError if the first batch has no examples.
    """
    batches = list(as_dataset(data).take(count)) or [one_batch(data)]
    # A part is None for an output without a target.
    shapes = [[part.shape for part in tf.nest.flatten(batch) if part is not None] for batch in batches]
    if any(shape.rank and shape[0] == 0 for shape in shapes[0]):
        raise PipelineError(
            f"Expected batches of at least one example. Found: {specs_of(batches[0])}. Check the dataset's source and "
            "its filters."
        )
    return [batch for batch, its in zip(batches, shapes, strict=True) if its == shapes[0]]


def specs_of(batch: Any) -> Any:
    """The dtype and shape of each part of a batch in words, such as "float32 (32, 8)"."""
    return tf.nest.map_structure(lambda part: None if part is None else f"{part.dtype.name} {tuple(part.shape)}", batch)


def first_batch(model: keras.Model, dataset: tf.data.Dataset) -> Any:
    """Returns the first batch as `fit` would hand it to the step.

    Under a strategy it has one part per replica; behind a device stage, it is what the stage makes of the elements.

    Raises:
        tfopt.errors.PipelineError: If the dataset is empty.
    """
    stage = getattr(dataset, DEVICE_STAGE, None)
    with looked_at(dataset):
        if stage is None or ends_on_device(dataset):
            return _first(model.distribute_strategy.experimental_distribute_dataset(dataset))
        return stage.batch(next(iter(stage.elements)))


@contextmanager
def looked_at(dataset: Any) -> Iterator[None]:
    """Has what is begun to read of a pipeline in the `with` block take none of its epochs."""
    place = getattr(dataset, PLACE, None)
    before = None if place is None else place.position
    try:
        yield
    finally:
        if place is not None:
            place.move(before)


def _first(dataset: Any) -> Any:
    batch = next(iter(dataset), None)
    if batch is None:
        raise PipelineError(
            "Expected a dataset of at least one batch. Found none. Check its source; with drop_remainder=True it also "
            "needs at least batch_size examples."
        )
    return batch


def on_device(model: keras.Model, batch: Any) -> Any:
    """Copies a batch to the GPU if there is one, unless a strategy has already done so."""
    if model._distribute_strategy is not None or not tf.config.list_logical_devices("GPU"):
        return batch
    with tf.device("/GPU:0"):
        return tf.nest.map_structure(tf.identity, batch)


def batch_size(model: keras.Model, batch: Any) -> int:
    """Examples per step, over all replicas of this process."""
    return sum(
        int(part.shape[0]) for part in model.distribute_strategy.experimental_local_results(tf.nest.flatten(batch)[0])
    )


def not_finite_parts(batch: Any) -> list[str]:
    """Names the parts of a batch that hold NaN or infinity: "x", "y", "sample_weight"; "the batch" if it has none."""
    names = ("x", "y", "sample_weight")
    named = zip(names, batch, strict=False) if isinstance(batch, tuple) else [("the batch", batch)]
    return [name for name, part in named if not all(map(_is_finite, tf.nest.flatten(part, expand_composites=True)))]


def _is_finite(tensor: Any) -> bool:
    if tensor is None or not tensor.dtype.is_floating:  # fit takes None as the target of an output without a loss
        return True
    return bool(tf.reduce_all(tf.math.is_finite(tensor)))


def repeated(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Repeats a dataset endlessly, unless it is endless already or its last stage must stay last.

    Any stage after a copy to a device moves the batches back to the host, and a device stage is attached to its dataset
    alone. Such a dataset has to be restarted instead.
    """
    stays_last = ends_on_device(dataset) or getattr(dataset, DEVICE_STAGE, None) is not None
    return dataset if stays_last or is_endless(dataset) else dataset.repeat()


def is_endless(dataset: tf.data.Dataset) -> bool:
    """Whether a dataset is known never to end."""
    return int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY


def steps_per_launch(model: keras.Model) -> int:
    """Most training steps that `fit` launches at once (`tfopt.fit.overlap`)."""
    overlap = getattr(model, "__dict__", {}).get(OVERLAP)
    return 1 if overlap is None else int(overlap.most_steps)


def steps_at_once(model: keras.Model) -> int:
    """Most training steps that end at once: of an execution (`steps_per_execution`), or of a launch."""
    return max(getattr(model, "steps_per_execution", 1), steps_per_launch(model))


def ends_on_device(dataset: Any) -> bool:
    """Whether a dataset ends in a copy to a device, followed at most by prefetching."""
    while type(dataset).__name__ in ("_PrefetchDataset", "_OptionsDataset"):
        dataset = dataset._input_dataset
    return type(dataset).__name__ in ("_CopyToDeviceDataset", "CopiedAhead")  # TensorFlow's, or that of tfopt.pipelines
