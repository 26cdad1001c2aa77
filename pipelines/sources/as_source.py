"""`as_source`: finds the source for whatever a user passes to a pipeline."""

import difflib
import os
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.pipelines.sources.arrays import arrays
from tfopt.pipelines.sources.dataset import dataset
from tfopt.pipelines.sources.hdf5 import dataset_names, hdf5
from tfopt.pipelines.sources.images import images
from tfopt.pipelines.sources.npy import npy
from tfopt.pipelines.sources.records import records
from tfopt.pipelines.sources.source import Source
from tfopt.pipelines.sources.tfds import is_builder, tfds
from tfopt.pipelines.tfrecords.format import has_index


def as_source(given: Any) -> Source:
    """Returns the source that `given` stands for; the table in docs/sources.md lists what may be passed."""
    if isinstance(given, Source):
        return given
    if isinstance(given, tf.data.Dataset):
        return dataset(given)
    if is_builder(given):
        return tfds(given)
    if isinstance(given, str) and given.startswith("tfds:"):
        # The split may hold brackets itself.
        name, _, split = given.removeprefix("tfds:").partition("[")
        return tfds(name, split.removesuffix("]") or "train")
    if _are_paths(given, ".npy"):
        return npy(given)
    if isinstance(given, str | os.PathLike):
        return _at_path(os.fspath(given))
    if isinstance(given, list | tuple) and given and all(isinstance(item, str | os.PathLike) for item in given):
        return records(given)
    if isinstance(given, np.ndarray | tf.Tensor | tuple | dict):
        return arrays(given)
    raise TypeError(
        "Expected a source: a tfopt.pipelines.Source, arrays or tuples and dicts of arrays, a tf.data.Dataset of "
        "single examples, the path of a folder of images with a subfolder per class, a path, glob or list of paths of "
        "TFRecord files, paths of .npy files, or 'tfds:name'. "
        f"Received: {type(given).__name__}. Convert it to one of these, a list of numbers with np.asarray."
    )


def _at_path(path: str) -> Source:
    if path.endswith((".h5", ".hdf5")) and os.path.isfile(path):
        return _only_dataset(path)
    _expect_something_at(path)
    is_images = os.path.isdir(path) and not has_index(path)
    return images(path) if is_images else records(path)


def _only_dataset(path: str) -> Source:
    names = dataset_names(path)
    if len(names) == 1:
        return hdf5(path, names[0])
    raise PipelineError(
        f"Expected an HDF5 file that holds one dataset. Found in {path!r}: {', '.join(map(repr, names)) or 'none'}. "
        'Name those that make up an example, such as hdf5(path, ("images", "labels")).'
    )


def _are_paths(given: Any, suffix: str) -> bool:
    """Whether all leaves are paths with this suffix."""
    if isinstance(given, tuple | list | dict):
        parts = list(given.values()) if isinstance(given, dict) else given
        return bool(parts) and all(_are_paths(part, suffix) for part in parts)
    return isinstance(given, str | os.PathLike) and str(given).endswith(suffix)


def _expect_something_at(path: str) -> None:
    if "://" in path or any(sign in path for sign in "*?[{") or os.path.lexists(path):
        return
    folder, name = os.path.split(path)
    siblings = os.listdir(folder or ".") if os.path.isdir(folder or ".") else []
    near = difflib.get_close_matches(name, siblings, n=1, cutoff=0.5)
    hint = f"Did you mean {os.path.join(folder, near[0])!r}?" if near else "Check the path."
    raise PipelineError(f"Expected a folder of images or TFRecord files. Nothing is at {path!r}. {hint}")
