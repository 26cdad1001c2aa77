"""A tf.data.Dataset as a source, and `as_source`, which finds the source for whatever a user passes."""

import difflib
import os
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import data_service_pb2

from tfopt.errors import PipelineError
from tfopt.pipelines.shared.nondeterminism import lineage
from tfopt.pipelines.sources.arrays import arrays
from tfopt.pipelines.sources.hdf5 import hdf5
from tfopt.pipelines.sources.hdf5_file import names_in
from tfopt.pipelines.sources.images import images
from tfopt.pipelines.sources.npy import npy
from tfopt.pipelines.sources.records import records
from tfopt.pipelines.sources.source import Source
from tfopt.pipelines.sources.tfds import is_builder, tfds
from tfopt.pipelines.tfrecords.files import is_indexed

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
        ValueError: It reads every element several times, from the workers of a tf.data service; or its last stage
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
            "Where batches are your examples, as windows are, wrap it: Source(name='windows', dataset=lambda: dataset)."
        )
    _refuse_duplicates(examples)
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
            folder of images, or of one that `write_records` wrote; a path, glob or list of paths of TFRecord files; the
            path of a .npy file, or tuples and dicts of them; the path of an HDF5 file that holds one dataset;
            "tfds:name", or "tfds:name[split]" for another split than "train"; or a builder of tensorflow-datasets.

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
    if is_builder(given):
        return tfds(given)
    if isinstance(given, str) and given.startswith("tfds:"):
        return _tfds(given)
    if _are_paths(given, ".npy"):
        return npy(given)
    if isinstance(given, str | os.PathLike):
        return _at(os.fspath(given))
    if isinstance(given, list | tuple) and given and all(isinstance(item, str | os.PathLike) for item in given):
        return records(given)
    if isinstance(given, np.ndarray | tf.Tensor | tuple | dict):
        return arrays(given)
    raise TypeError(
        "Expected a source: a tfopt.pipelines.Source, arrays or tuples and dicts of arrays, a tf.data.Dataset of "
        "single examples, the path of a folder of images with a subfolder a class, a path, glob or list of paths of "
        "TFRecord files, paths of .npy files, or 'tfds:name'. "
        f"Received: {type(given).__name__}. Turn it into one of these, a list of numbers with np.asarray."
    )


def _tfds(text: str) -> Source:
    """Returns the source for "tfds:name" or "tfds:name[split]", where the split may hold brackets itself."""
    name, _, split = text.removeprefix("tfds:").partition("[")
    return tfds(name, split.removesuffix("]") or "train")


def _at(path: str) -> Source:
    """Returns the source for one path."""
    if path.endswith((".h5", ".hdf5")) and os.path.isfile(path):
        return _only_dataset(path)
    _expect_something_at(path)
    is_images = os.path.isdir(path) and not is_indexed(path)
    return images(path) if is_images else records(path)


def _only_dataset(path: str) -> Source:
    names = names_in(path)
    if len(names) == 1:
        return hdf5(path, names[0])
    raise PipelineError(
        f"Expected an HDF5 file that holds one dataset. Found in {path!r}: {', '.join(map(repr, names)) or 'none'}. "
        'Name those that make an example, such as hdf5(path, ("images", "labels")).'
    )


def _are_paths(given: Any, ending: str) -> bool:
    """Whether all leaves are paths with this ending."""
    if isinstance(given, tuple | list | dict):
        parts = list(given.values()) if isinstance(given, dict) else given
        return bool(parts) and all(_are_paths(part, ending) for part in parts)
    return isinstance(given, str | os.PathLike) and str(given).endswith(ending)


def _is_batched(examples: Any) -> bool:
    """Whether the last stage that makes elements, rather than passing them on, is a batch."""
    while any(base.__name__ == "UnaryUnchangedStructureDataset" for base in type(examples).__mro__):
        (examples,) = examples._inputs()
    return type(examples).__name__ in _BATCHED


def _refuse_duplicates(examples: Any) -> None:
    """Refuses a tf.data service without sharding: each worker gives every element."""
    for stage in lineage(examples):
        if type(stage).__name__.startswith("_DataServiceDataset"):
            mode = data_service_pb2.ProcessingModeDef.FromString(stage._processing_mode.numpy())
            if mode.sharding_policy == data_service_pb2.ProcessingModeDef.OFF:
                raise ValueError(
                    "Expected each element once. Found a tf.data service without sharding, where every worker gives "
                    'all of them. Pass processing_mode="distributed_epoch" to its distribute().'
                )


def _expect_something_at(path: str) -> None:
    if "://" in path or any(sign in path for sign in "*?[{") or os.path.lexists(path):
        return
    folder, name = os.path.split(path)
    beside = os.listdir(folder or ".") if os.path.isdir(folder or ".") else []
    near = difflib.get_close_matches(name, beside, n=1, cutoff=0.5)
    hint = f"Did you mean {os.path.join(folder, near[0])!r}?" if near else "Check the path."
    raise PipelineError(f"Expected a folder of images or TFRecord files. Nothing is at {path!r}. {hint}")
