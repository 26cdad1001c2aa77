"""A tf.data.Dataset as a source."""

from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import data_service_pb2

from tfopt.pipelines.shared.nondeterminism import lineage
from tfopt.pipelines.sources.source import Source

# Datasets whose elements are in memory: caching them untransformed would hold them twice.
_RESIDENT = frozenset({"_TensorSliceDataset", "_TensorDataset", "_RangeDataset", "CacheDataset"})
_BATCHED = frozenset({"_BatchDataset", "_ParallelBatchDataset", "_PaddedBatchDataset", "_RebatchDataset"})


def dataset(examples: Any) -> Source:
    """Returns a dataset of single examples as a source.

    Use it for what the other sources do not read. Leave shuffling, batching and prefetching to the pipeline.

    Args:
        examples: A `tf.data.Dataset` whose elements are examples, not batches. If its cardinality is unknown but you
            know it, apply `tf.data.experimental.assert_cardinality` first.

    Raises:
        TypeError: If `examples` is not a dataset.
        ValueError: If it reads every element several times, from the workers of a tf.data service, or its last stage
            makes batches. Where batches are your examples, as windows are, wrap it:
            `Source(name="windows", dataset=lambda: batches)`.

    Example:
        >>> import tensorflow as tf
        >>> dataset(tf.data.Dataset.range(10)).count
        10
    """
    if not isinstance(examples, tf.data.Dataset):
        raise TypeError(
            f"dataset() expects a tf.data.Dataset. Received: {type(examples).__name__}. Make one with "
            "tf.data.Dataset.from_generator, or pass arrays to arrays()."
        )
    if _is_batched(examples):
        raise ValueError(
            f"Expected a dataset of single examples. Found a dataset of batches: {examples.element_spec}. Pass "
            "dataset.unbatch(), or build it without batching (batch_size=None in Keras' *_dataset_from_directory). "
            "If batches are your examples, as windows are, wrap it: Source(name='windows', dataset=lambda: dataset)."
        )
    _refuse_duplicates(examples)
    cardinality = int(examples.cardinality())
    return Source(
        name="dataset",
        dataset=lambda: examples,
        count=cardinality if cardinality >= 0 else None,
        resident=type(examples).__name__ in _RESIDENT,
    )


def _is_batched(examples: Any) -> bool:
    """Whether the last stage that makes elements, rather than passing them on, is a batch."""
    while any(base.__name__ == "UnaryUnchangedStructureDataset" for base in type(examples).__mro__):
        (examples,) = examples._inputs()
    return type(examples).__name__ in _BATCHED


def _refuse_duplicates(examples: Any) -> None:
    """Refuses a tf.data service without sharding: each of its workers gives every element."""
    for stage in lineage(examples):
        if type(stage).__name__.startswith("_DataServiceDataset"):
            mode = data_service_pb2.ProcessingModeDef.FromString(stage._processing_mode.numpy())
            if mode.sharding_policy == data_service_pb2.ProcessingModeDef.OFF:
                raise ValueError(
                    "Expected each element once. Found a tf.data service without sharding, where every worker gives "
                    'all of them. Pass processing_mode="distributed_epoch" to its distribute().'
                )
