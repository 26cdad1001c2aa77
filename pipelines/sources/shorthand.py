"""Turns what users write for a source into a `Source`."""

import os
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.pipelines.sources.arrays import arrays
from tfopt.pipelines.sources.dataset import dataset
from tfopt.pipelines.sources.images import images
from tfopt.pipelines.sources.records import records
from tfopt.pipelines.sources.source import Source


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
        return images(given) if os.path.isdir(given) else records(given)
    if isinstance(given, list | tuple) and given and all(isinstance(item, str | os.PathLike) for item in given):
        return records(given)
    if isinstance(given, np.ndarray | tf.Tensor | tuple | dict):
        return arrays(given)
    raise TypeError(
        "Expected a source: a tfopt.pipelines.Source, arrays or tuples and dicts of arrays, a tf.data.Dataset of "
        "single examples, the path of a folder of images with a subfolder a class, or a path, glob or list of paths "
        f"of TFRecord files. Received: {type(given).__name__}"
    )
