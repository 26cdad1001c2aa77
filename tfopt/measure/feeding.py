"""How a measurement gets its batches, of datasets too that nothing may follow."""

from typing import Any

import keras
import tensorflow as tf

from tfopt.measure.batches import first_batch

# The attribute under which tfopt.pipelines, a floor above, gives a dataset its device stage.
DEVICE_STAGE = "_tfopt_device_stage"


def first(model: keras.Model, dataset: tf.data.Dataset) -> Any:
    """The first batch as `fit` would hand it to the step; that of a device stage where the dataset itself has none.

    Args:
        model: A compiled model.
        dataset: Batches.

    Raises:
        tfopt.errors.PipelineError: The dataset is empty.
    """
    stage = _device_stage(dataset)
    if stage is None or ends_on_device(dataset):
        return first_batch(model, dataset)
    return stage.batch(next(iter(stage.elements)))


def without_end(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The dataset, repeated for ever; as it is where it has no end, or where nothing may follow its last stage.

    A stage behind a copy to a device takes the batches back to the host, and one behind a device stage is not attached
    to it. Such a dataset has to be begun anew.

    Args:
        dataset: Batches.

    Example:
        >>> list(without_end(tf.data.Dataset.range(2)).take(3).as_numpy_iterator())
        [0, 1, 0]
    """
    last = ends_on_device(dataset) or _device_stage(dataset) is not None
    return dataset if last or is_endless(dataset) else dataset.repeat()


def is_endless(dataset: tf.data.Dataset) -> bool:
    """Whether a dataset goes on for ever."""
    return int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY


def ends_on_device(dataset: Any) -> bool:
    """Whether nothing but prefetching follows a copy to a device."""
    while type(dataset).__name__ in ("_PrefetchDataset", "_OptionsDataset"):
        dataset = dataset._input_dataset
    return type(dataset).__name__ == "_CopyToDeviceDataset"


def _device_stage(dataset: Any) -> Any:
    return getattr(dataset, DEVICE_STAGE, None)
