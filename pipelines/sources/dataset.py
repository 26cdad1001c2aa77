"""A tf.data.Dataset as a source."""

from typing import Any

import tensorflow as tf

from tfopt.pipelines.sources.source import Source

# Datasets whose elements lie in memory: caching them untransformed would hold them twice.
_RESIDENT = frozenset({"_TensorSliceDataset", "_TensorDataset", "_RangeDataset", "CacheDataset"})


def dataset(examples: Any) -> Source:
    """Returns a dataset of single examples as a source.

    Use it for what the other sources do not read. Shuffling, batching and prefetching are the pipeline's part: give
    the dataset without them.

    Args:
        examples: A `tf.data.Dataset` whose elements are examples, not batches. Where its cardinality is unknown but
            you know it, apply `tf.data.experimental.assert_cardinality` first.

    Returns:
        The source.

    Raises:
        TypeError: `examples` is no dataset.

    Example:
        >>> import tensorflow as tf
        >>> dataset(tf.data.Dataset.range(10)).count
        10
    """
    if not isinstance(examples, tf.data.Dataset):
        raise TypeError(f"dataset() expects a tf.data.Dataset. Received: {type(examples).__name__}")
    cardinality = int(examples.cardinality())
    return Source(
        name="dataset",
        dataset=lambda: examples,
        count=cardinality if cardinality >= 0 else None,
        resident=type(examples).__name__ in _RESIDENT,
    )
