"""Finds the source for whatever a user passes to a pipeline, and makes sources of datasets."""

import difflib
import os
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import data_service_pb2

from tfopt.errors import PipelineError
from tfopt.pipelines.by_file.images import images
from tfopt.pipelines.loaders.loader import is_loader, loader
from tfopt.pipelines.shared.elements import dense
from tfopt.pipelines.shared.nondeterminism import lineage
from tfopt.pipelines.shared.paths import is_remote
from tfopt.pipelines.sources.hdf5 import dataset_names, hdf5
from tfopt.pipelines.sources.npy import npy
from tfopt.pipelines.sources.records import records
from tfopt.pipelines.sources.rows import arrays, is_series
from tfopt.pipelines.sources.source import Source
from tfopt.pipelines.sources.tar import tar
from tfopt.pipelines.sources.tfds import is_builder, tfds
from tfopt.pipelines.tables.table import is_table, table
from tfopt.pipelines.text.tokens import tokens
from tfopt.pipelines.tfrecords.format import has_index

# Datasets whose elements are in memory: caching them untransformed would hold them twice.
_RESIDENT = frozenset({"_TensorSliceDataset", "_TensorDataset", "_RangeDataset", "CacheDataset"})
_BATCHED = frozenset({"_BatchDataset", "_ParallelBatchDataset", "_PaddedBatchDataset", "_RebatchDataset"})
# Datasets whose elements are not those they read, nor made of one each.
_APART = frozenset(
    {"_UnbatchDataset", "_FlatMapDataset", "_InterleaveDataset", "_ParallelInterleaveDataset", "_WindowDataset"}
)


def as_source(given: Any, on_bad_file: str = "raise") -> Source:
    """Returns the source that `given` stands for, checked; the table in docs/sources.md lists what may be passed."""
    source = _unchecked(given)
    if source.checked is not None:
        return source.checked(on_bad_file)
    if on_bad_file == "skip":
        raise ValueError(
            f"Expected images or files for on_bad_file='skip'. Received: {source.name}. Leave it out; for damaged "
            "records pass records(paths, on_bad_record='skip')."
        )
    return source


def _unchecked(given: Any) -> Source:
    if isinstance(given, Source):
        return given
    if isinstance(given, tf.data.Dataset):
        return dataset(given)
    if is_builder(given):
        return tfds(given)
    if is_loader(given):
        return loader(given)
    if isinstance(given, str) and given.startswith("tfds:"):
        # The split may hold brackets itself.
        name, _, split = given.removeprefix("tfds:").partition("[")
        return tfds(name, split.removesuffix("]") or "train")
    if _are_paths(given, (".npy", ".npz")):
        return npy(given)  # which names what an .npz file holds
    if not isinstance(given, dict) and _are_paths(given, (".tar",)):
        return tar(given)
    if is_series(given):
        return arrays(given)
    if is_table(given):
        return table(given)
    if isinstance(given, str | os.PathLike):
        return _at_path(os.fspath(given))
    if isinstance(given, list | tuple) and given and all(isinstance(item, str | os.PathLike) for item in given):
        return records(given)
    if (isinstance(given, tf.RaggedTensor) and given.dtype.is_integer) or _are_documents(given):
        return tokens(given)
    if isinstance(given, np.ndarray | tf.Tensor | tf.RaggedTensor | tuple | dict):
        return arrays(given)
    raise TypeError(
        "Expected a source: a tfopt.pipelines.Source, arrays or tuples and dicts of arrays, a tf.data.Dataset of "
        "single examples, the path of a folder of images with a subfolder per class, a path, glob or list of paths of "
        "TFRecord files, paths of .npy, .csv, .parquet, .tar or .h5 files, a data frame, 'tfds:name', documents of "
        "token ids, a PyDataset, a PyTorch or Grain loader, or a generator function. "
        f"Received: {type(given).__name__}. {_remedy(given)}"
    )


def _remedy(given: Any) -> str:
    """What to pass in place of something that is no source."""
    if isinstance(given, list) and any(isinstance(item, np.ndarray | tf.Tensor) for item in given):
        return "In place of a list of arrays, such as [x, y], pass a tuple (x, y)."
    if isinstance(given, Iterator):
        return "It can be read only once: pass the function that makes it, without calling it."
    if isinstance(given, Iterable) and not isinstance(given, list):
        return "If it yields batches, pass loader(it)."
    return "Convert it to one of these, a list of numbers with np.asarray."


def dataset(examples: Any) -> Source:
    """Returns a dataset of single examples as a source.

    Use it for data that no other source reads. Leave shuffling, batching and prefetching to the pipeline.

    Args:
        examples: A `tf.data.Dataset` whose elements are examples, not batches. If its cardinality is unknown to
            TensorFlow but known to you, apply `tf.data.experimental.assert_cardinality` first.

    Raises:
        TypeError: If `examples` is not a dataset.
        ValueError: If it reads every element several times, from the workers of a tf.data service, or its elements
            are batches. Where batches are your examples, as windows are, wrap it:
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
            "dataset.unbatch(), or the dataset before .batch (batch_size=None in Keras' *_dataset_from_directory). "
            "If batches are your examples, as windows are, wrap it: Source(name='windows', dataset=lambda: dataset)."
        )
    _refuse_duplicates(examples)
    elements = dense(examples)
    cardinality = int(elements.cardinality())
    return Source(
        name="dataset",
        dataset=lambda: elements,
        count=cardinality if cardinality >= 0 else None,
        resident=type(examples).__name__ in _RESIDENT,
    )


def _at_path(path: str) -> Source:
    if path.endswith((".h5", ".hdf5")) and os.path.isfile(path):
        names = dataset_names(path)
        if len(names) != 1:
            raise PipelineError(
                f"Expected an HDF5 file that holds one dataset. Found in {path!r}: "
                f"{', '.join(map(repr, names)) or 'none'}. Name those that make up an example, such as "
                'hdf5(path, ("images", "labels")).'
            )
        return hdf5(path, names[0])
    _expect_something_at(path)
    is_images = os.path.isdir(path) and not has_index(path)
    return images(path) if is_images else records(path)


def _are_paths(given: Any, suffixes: tuple[str, ...]) -> bool:
    if isinstance(given, tuple | list | dict):
        parts = list(given.values()) if isinstance(given, dict) else given
        return bool(parts) and all(_are_paths(part, suffixes) for part in parts)
    return isinstance(given, str | os.PathLike) and str(given).endswith(suffixes)


def _are_documents(given: Any) -> bool:
    """Whether this is a list of lists of token ids."""
    return isinstance(given, list) and bool(given) and all(isinstance(item, list) for item in given)


def _expect_something_at(path: str) -> None:
    if is_remote(path) or any(sign in path for sign in "*?[{") or os.path.lexists(path):
        return
    folder, name = os.path.split(path)
    siblings = os.listdir(folder or ".") if os.path.isdir(folder or ".") else []
    near = difflib.get_close_matches(name, siblings, n=1, cutoff=0.5)
    hint = f"Did you mean {os.path.join(folder, near[0])!r}?" if near else "Check the path."
    raise PipelineError(f"Expected a folder of images or TFRecord files. Nothing is at {path!r}. {hint}")


def _is_batched(examples: Any) -> bool:
    """Whether elements are batches, made by the dataset or by one it reads from, whose rows its maps have kept."""
    waiting = [examples]
    while waiting:
        stage = waiting.pop()
        kind = type(stage).__name__
        if kind in _BATCHED or (kind == "_GroupByWindowDataset" and _ranks(stage) != _ranks(*stage._inputs())):
            size = tf.get_static_value(getattr(stage, "_batch_size", None))
            # What a map makes of a window, such as its mean, begins with another dimension.
            if all(leaf.shape[:1].is_compatible_with([size]) for leaf in _with_shape(examples)):
                return True
        elif kind not in _APART:
            waiting += stage._inputs()
    return False


def _with_shape(dataset: Any) -> list[Any]:
    return [leaf for leaf in tf.nest.flatten(dataset.element_spec) if hasattr(leaf, "shape")]


def _ranks(dataset: Any) -> list[int | None]:
    return [leaf.shape.rank for leaf in _with_shape(dataset)]


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
