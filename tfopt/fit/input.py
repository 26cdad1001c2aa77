"""Prepares the input of an overlapped fit, so that batches are on the device before they are needed."""

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfopt.errors import UnsupportedError
from tfopt.model.batches import ends_on_device
from tfopt.pipelines.device.device_stage import NotAttached, stage_of
from tfopt.pipelines.device.placing import choose_device, copy_ahead


class DeviceStageBatches:
    """Batches of a pipeline with a device stage (`stage_of(dataset)`), made on the device from what tf.data yields."""

    def __init__(self, stage: Any):
        self._stage = stage
        self.element_spec = stage.element_spec

    def __iter__(self) -> "DeviceStageIterator":
        return DeviceStageIterator(self._stage)


class DeviceStageIterator(Iterator[Any]):
    """Iterates `DeviceStageBatches`."""

    def __init__(self, stage: Any):
        self._elements = iter(stage.elements)
        self._batch = stage.batch
        self.element_spec = stage.element_spec

    def __next__(self) -> Any:
        return self._batch(next(self._elements))


def ahead(dataset: Any) -> Any:
    """Returns what to iterate instead of a dataset, so that its batches are on the device before they are needed.

    A pipeline's device stage is attached. Any other dataset gets a copy to the GPU as its last stage, unless it ends
    with one, there is no GPU, or a strategy copies the batches to its own devices.
    """
    if not isinstance(dataset, tf.data.Dataset):  # prepared already, or distributed
        return dataset
    stage = stage_of(dataset)
    return _copied_ahead(dataset) if stage is None else DeviceStageBatches(stage)


def for_predict(data: Any) -> Any:
    """Returns what to pass to `predict`: datasets with a copy to the GPU, anything else unchanged.

    Raises:
        tfopt.errors.UnsupportedError: If only a device stage makes the batches, which predict cannot attach.
    """
    if isinstance(data, NotAttached):
        raise UnsupportedError(
            "Expected a dataset without a device stage for predict. Found one with cache='device'. Build it with "
            "cache='memory' or None, and training=False to get the predictions in order."
        )
    return _copied_ahead(data) if isinstance(data, tf.data.Dataset) else data


def _copied_ahead(dataset: Any) -> Any:
    if ends_on_device(dataset):
        return dataset
    device, _ = choose_device("auto", dataset.element_spec)
    return dataset if device is None else copy_ahead(dataset, device, None)
