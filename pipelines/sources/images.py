"""A folder of images, one subfolder a class, as a source."""

import os
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.pipelines.elements import without_autograph
from tfopt.pipelines.sources.image_files import MAGICS, check_images, list_images
from tfopt.pipelines.sources.source import Source


def images(folder: str | os.PathLike[str]) -> Source:
    """Returns the images of a folder as a source of `(image, label)`.

    Classes are the subfolders in sorted order, and all files below them are images; names that begin with a dot are
    passed over. Use `transform` to bring images of unlike sizes to one.

    Args:
        folder: The folder that holds a folder a class.

    Returns:
        A source of `(image, label)`: `(height, width, 3)` uint8, and an int32 scalar. JPEG, PNG, GIF (its first
        frame) and BMP are read; grey becomes three equal channels, and transparency is dropped.

    Raises:
        PipelineError: The folder does not exist, has no class, has a class without images, or a file is no image that
            can be decoded.

    Example:
        >>> from tfopt.pipelines import build_pipeline
        >>> train = build_pipeline(images("photos/train"), batch_size=64)  # doctest: +SKIP
    """
    paths, labels, _ = list_images(os.fspath(folder))
    check_images(paths)
    all_paths, all_labels = np.array(paths, dtype=object), np.array(labels, dtype=np.int32)

    def keys(chosen: Any = slice(None)) -> Any:
        return tf.data.Dataset.from_tensor_slices((all_paths[chosen], all_labels[chosen]))

    def spread(limit: int) -> Any:
        return keys(np.unique(np.linspace(0, len(paths) - 1, num=min(limit, len(paths))).astype(int)))

    return Source(
        name=f"images in {os.fspath(folder)}",
        dataset=keys,
        count=len(paths),
        decode=_read_and_decode,
        origin=_path_of,
        sample=spread,
    )


def _path_of(path: Any, label: Any) -> Any:
    del label
    return path


@without_autograph
def _read_and_decode(path: Any, label: Any) -> Any:
    contents = tf.io.read_file(path)
    # Files are checked when listed; they may have changed since, and the decoder's own message names no file.
    head = tf.strings.substr(contents, 0, 8)
    check = tf.debugging.Assert(_is_image(head), [tf.strings.join(["Not a JPEG, PNG, GIF or BMP image: ", path])])
    with tf.control_dependencies([check]):
        is_bmp = tf.equal(tf.strings.substr(contents, 0, 2), b"BM")
    image = tf.cond(is_bmp, lambda: _decode_bmp(contents), lambda: _decode_other(contents))
    image.set_shape((None, None, 3))
    return image, label


def _is_image(head: Any) -> Any:
    starts = [tf.equal(tf.strings.substr(head, 0, len(magic)), magic) for magic in MAGICS]
    return tf.reduce_any(tf.stack(starts))


def _decode_other(contents: Any) -> Any:
    return tf.io.decode_image(contents, channels=3, expand_animations=False)


def _decode_bmp(contents: Any) -> Any:
    """Decodes with the file's own channels: the BMP decoder refuses to convert."""
    image = tf.io.decode_bmp(contents, channels=0)
    return tf.cond(tf.shape(image)[2] < 3, lambda: tf.repeat(image[..., :1], 3, axis=2), lambda: image[..., :3])
