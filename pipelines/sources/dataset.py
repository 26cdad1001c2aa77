"""A tf.data.Dataset as a source, and `as_source`, which finds the source for whatever a user passes."""

import difflib
import os
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.pipelines.sources.arrays import arrays
from tfopt.pipelines.sources.images import images
from tfopt.pipelines.sources.records import records
from tfopt.pipelines.sources.source import Source

# Datasets whose elements lie in memory: caching them untransformed would hold them twice.
_RESIDENT = frozenset({"_TensorSliceDataset", "_TensorDataset", "_RangeDataset", "CacheDataset"})
_BATCHED = frozenset({"_BatchDataset", "_ParallelBatchDataset", "_PaddedBatchDataset", "_RebatchDataset"})


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
        ValueError: Its last stage makes batches. Where batches are your examples, as windows are, wrap it:
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
            "Where batches are your examples, as windows are, wrap it: Source(name='windows', dataset=lambda: dataset)."
        )
    cardinality = int(examples.cardinality())
    return Source(
        name="dataset",
        dataset=lambda: examples,
        count=cardinality if cardinality >= 0 else None,
        resident=type(examples).__name__ in _RESIDENT,
    )


def as_source(given: Any) -> Source:
    """Returns the source that an argument stands for.

    Args:
        given: A `Source`; arrays, or tuples and dicts of them; a `tf.data.Dataset` of single examples; the path of a
            folder of images; or a path, glob or list of paths of TFRecord files.

    Raises:
        TypeError: It is none of these.
        PipelineError: The data is missing, empty or damaged.

    Example:
        >>> as_source(np.zeros((3, 2))).count
        3
    """
    if isinstance(given, Source):
        return given
    if isinstance(given, tf.data.Dataset):
        return dataset(given)
    if isinstance(given, str | os.PathLike):
        _expect_something_at(os.fspath(given))
        return images(given) if os.path.isdir(given) else records(given)
    if isinstance(given, list | tuple) and given and all(isinstance(item, str | os.PathLike) for item in given):
        return records(given)
    if isinstance(given, np.ndarray | tf.Tensor | tuple | dict):
        return arrays(given)
    raise TypeError(
        "Expected a source: a tfopt.pipelines.Source, arrays or tuples and dicts of arrays, a tf.data.Dataset of "
        "single examples, the path of a folder of images with a subfolder a class, or a path, glob or list of paths "
        f"of TFRecord files. Received: {type(given).__name__}. Turn it into one of these, a list of numbers with "
        "np.asarray."
    )


def _is_batched(examples: Any) -> bool:
    """Whether the last stage that makes elements, rather than passing them on, is a batch."""
    while any(base.__name__ == "UnaryUnchangedStructureDataset" for base in type(examples).__mro__):
        (examples,) = examples._inputs()
    return type(examples).__name__ in _BATCHED


def _expect_something_at(path: str) -> None:
    if "://" in path or any(sign in path for sign in "*?[{") or os.path.lexists(path):
        return
    folder, name = os.path.split(path)
    beside = os.listdir(folder or ".") if os.path.isdir(folder or ".") else []
    near = difflib.get_close_matches(name, beside, n=1, cutoff=0.5)
    hint = f"Did you mean {os.path.join(folder, near[0])!r}?" if near else "Check the path."
    raise PipelineError(f"Expected a folder of images or TFRecord files. Nothing is at {path!r}. {hint}")
