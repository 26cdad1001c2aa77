"""What an overlapped fit takes its batches from."""

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfopt.errors import UnsupportedError
from tfopt.model.batches import ends_on_device
from tfopt.pipelines.device import choose_device, copy_ahead
from tfopt.pipelines.device_data import NotAttached, stage_of


class Staged:
    """The batches of a pipeline with a device stage: cheap elements from tf.data, made into batches on the device.

    Args:
        stage: The stage, from `tfopt.pipelines.device_data.stage_of`.
    """

    def __init__(self, stage: Any):
        self._stage = stage
        self.element_spec = stage.element_spec

    def __iter__(self) -> "StagedIterator":
        return StagedIterator(self._stage)


class StagedIterator(Iterator[Any]):
    """One epoch, or more, of a `Staged`."""

    def __init__(self, stage: Any):
        self._elements = iter(stage.elements)
        self._batch = stage.batch
        self.element_spec = stage.element_spec

    def __next__(self) -> Any:
        return self._batch(next(self._elements))


def ahead(dataset: Any) -> Any:
    """Returns what to iterate in place of a dataset, so that its batches lie on the device before they are asked for.

    A pipeline's device stage is attached. Any other dataset gets a copy to the GPU as its last stage, unless it ends in
    one, there is no GPU, or a strategy copies the batches to its own devices.
    """
    if not isinstance(dataset, tf.data.Dataset):  # staged already, or distributed
        return dataset
    stage = stage_of(dataset)
    return _copied_ahead(dataset) if stage is None else Staged(stage)


def for_predict(data: Any) -> Any:
    """Returns what to give `predict` in place of its data: a dataset with the copy to the GPU, anything else as it is.

    Raises:
        tfopt.errors.UnsupportedError: It has a device stage, and no batches without it; predict asks nobody before it
            iterates.
    """
    if isinstance(data, NotAttached):
        raise UnsupportedError(
            "Expected a dataset without a device stage for predict. Found one with cache='device'. Build it with "
            "cache='memory' or None, and training=False to have the predictions in order."
        )
    return _copied_ahead(data) if isinstance(data, tf.data.Dataset) else data


def _copied_ahead(dataset: Any) -> Any:
    if ends_on_device(dataset):
        return dataset
    device, _ = choose_device("auto", dataset.element_spec)
    return dataset if device is None else copy_ahead(dataset, device, None)
