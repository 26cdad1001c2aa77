"""Pipelines with a crop of each photograph, written by hand: a first script's, and the fastest that tf.data allows."""

from pathlib import Path
from typing import Any

import tensorflow as tf

from tfopt.bench.workloads import photos

_WHOLE = [[[0.0, 0.0, 1.0, 1.0]]]
_AREA, _ASPECT_RATIO, _FRACTION = (0.08, 1.0), (3 / 4, 4 / 3), 0.875


def naive(path: Path, batch_size: int, *, central: bool = False, times: int = 1) -> tf.data.Dataset:
    """Decodes each image whole and crops it, one file after the other.

    Args:
        path: A folder of photographs.
        batch_size: Examples in a batch; what fills none is left out.
        central: Whether to crop the middle, in place of a random window.
        times: How many times over the photographs make an epoch.
    """
    window = _central if central else _random

    def example(name: Any, label: Any) -> tuple[Any, Any]:
        image = tf.io.decode_jpeg(tf.io.read_file(name), channels=3)
        return _resized(tf.slice(image, *window(tf.shape(image)))), label

    return photos.one_by_one(photos.names(path, times).map(example).batch(batch_size, drop_remainder=True))


def hand_tuned(path: Path, batch_size: int, *, central: bool = False, times: int = 1) -> tf.data.Dataset:
    """Decodes only the window, in parallel, ahead of time and in any order; arguments as `naive`'s."""
    window = _central if central else _random

    def example(name: Any, label: Any) -> tuple[Any, Any]:
        contents = tf.io.read_file(name)
        begin, size = window(tf.io.extract_jpeg_shape(contents))
        cut = tf.concat([begin[:2], size[:2]], 0)
        return _resized(tf.io.decode_and_crop_jpeg(contents, cut, channels=3)), label

    dataset = photos.names(path, times).map(example, num_parallel_calls=tf.data.AUTOTUNE)
    dataset = dataset.batch(batch_size, drop_remainder=True).prefetch(tf.data.AUTOTUNE)
    options = tf.data.Options()
    options.deterministic = False
    return dataset.with_options(options)


def _random(shape: Any) -> tuple[Any, Any]:
    begin, size, _ = tf.image.sample_distorted_bounding_box(
        shape, _WHOLE, area_range=_AREA, aspect_ratio_range=_ASPECT_RATIO, min_object_covered=0.0
    )
    return begin, size


def _central(shape: Any) -> tuple[Any, Any]:
    side = tf.cast(tf.round(_FRACTION * tf.cast(tf.reduce_min(shape[:2]), tf.float64)), tf.int32)
    return tf.concat([(shape[:2] - side) // 2, [0]], 0), tf.stack([side, side, -1])


def _resized(image: Any) -> Any:
    return tf.cast(tf.round(tf.image.resize(image, (photos.SIZE, photos.SIZE))), tf.uint8)
