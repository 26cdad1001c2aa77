"""Images with masks as a source: two files an example."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.pipelines.by_file.file_source import file_source
from tfopt.pipelines.by_file.images import IMAGES
from tfopt.pipelines.by_file.labels import Labelled, columns_of, expect_paths
from tfopt.pipelines.shared.elements import without_autograph
from tfopt.pipelines.shared.paths import for_each_path, local_path
from tfopt.pipelines.shared.problems import Problem, head_of
from tfopt.pipelines.sources.image_files import ImageFile, examine, expect_image_bytes
from tfopt.pipelines.sources.source import Source, common_length

_GREY = (b"\x08\x00", b"\x08\x04")  # 8 bits, grey; the same with transparency
_FORM = slice(24, 26)  # bytes of a PNG
_PNG = b"\x89PNG\r\n\x1a\n"
_CONVERT = (
    "For class numbers below 256, PIL converts it: "
    "Image.fromarray(np.asarray(Image.open(path)).astype(np.uint8)).save('mask.png')"
)


def images_with_masks(files: Any, *, column: str | None = None, mask: str | None = None) -> Source:
    """Returns images with masks of the same size as a source of `(image, mask)`, for segmentation.

    `crop` with `crop_with="1"`, and `RandomFlip("1")`, move image and mask together.

    Args:
        files: A list of pairs, the path of an image and that of its mask; or `(images, masks)`, paths of both; or a
            table of them, as `images` takes it. Masks are 8-bit grey PNGs whose pixels are class numbers.
        column: The table's column of images. Default: "images".
        mask: The table's column of masks. Default: "masks".

    Returns:
        A source of `(image, mask)`: `(height, width, 3)` uint8 as from `images`, and `(height, width, 1)` uint8 with
        the numbers as they stand in the file. The files are checked when a pipeline is planned; `on_bad_file="skip"`
        leaves out an image whose mask is bad, and the other way round. Whether both have the same size is checked when
        they are read.

    Raises:
        TypeError: If `files` is none of these.
        ValueError: If a table lacks a column.
        PipelineError: If there are no files, or not as many masks as images.

    Example:
        >>> from tfopt.pipelines import RandomCrop, build_pipeline
        >>> source = images_with_masks([("a.jpg", "a_mask.png"), ("b.jpg", "b_mask.png")])
        >>> dataset = build_pipeline(source, crop=RandomCrop(256), crop_with="1", batch_size=2)  # doctest: +SKIP
    """
    caller = "images_with_masks()"
    given = columns_of(caller, files, {"column": column, "mask": mask}, ("images", "masks"))
    if given is None:
        raise TypeError(
            f"{caller} expects pairs in a list, (images, masks) or a table. Received: {type(files).__name__}. Pass "
            "[(image, mask), …]."
        )
    paths, masks = (expect_paths(caller, some) for some in given)
    common_length({"images": len(paths), "masks": len(masks)})
    values = np.array([local_path(path) for path in masks], object)
    return file_source(_WITH_MASKS, f"{len(paths):,} images with masks", Labelled(paths, values))


def _look(
    paths: Sequence[str], masks: Any, *, decoding: bool
) -> list[tuple[Problem | None, tuple[ImageFile, ImageFile]]]:
    images, found = (examine(some, decoding=decoding) for some in (paths, masks.tolist()))
    whole = {path for path, (problem, _) in zip(masks, found, strict=True) if problem is None}
    forms = for_each_path(lambda path: _form_problem(path) if path in whole else None, masks)
    return [
        (bad or bad_mask or form, (image, mask))
        for (bad, image), (bad_mask, mask), form in zip(images, found, forms, strict=True)
    ]


def _form_problem(path: str) -> Problem | None:
    """Returns what is wrong with a mask whose numbers TensorFlow would decode to others, such as a palette's."""
    head = head_of(path, _FORM.stop)
    if isinstance(head, Problem) or (head.startswith(_PNG) and head[_FORM] in _GREY):
        return head if isinstance(head, Problem) else None
    return Problem(path, "unsupported", f"a mask that is not an 8-bit grey PNG. {_CONVERT}")


def _reading(found: Sequence[tuple[ImageFile, ImageFile]]) -> dict[str, Any]:
    reading = IMAGES.reading([image for image, _ in found])
    ends = bool(found) and all(mask.ends for _, mask in found)
    return reading | {
        "decode": partial(_with_mask, reading["decode"], ends=ends, same_size=True),
        "encoded": partial(_with_mask, reading["encoded"], ends=ends, same_size=False),  # `crop` checks that
    }


@without_autograph
def _with_mask(read: Callable[..., Any], path: Any, mask_path: Any, *, ends: bool, same_size: bool) -> Any:
    image, _ = read(path, mask_path)
    # Masks were looked at when the pipeline was planned, but may change later.
    contents = expect_image_bytes(tf.io.read_file(mask_path), mask_path, ends=ends)
    begins = tf.strings.join([tf.strings.substr(contents, 0, _FORM.stop), " " * _FORM.stop])  # of short files, too
    is_grey = tf.reduce_any(tf.equal(tf.strings.substr(begins, _FORM.start, 2), _GREY))
    check = tf.raw_ops.Assert(condition=is_grey, data=["Not an 8-bit grey PNG:", mask_path])
    with tf.control_dependencies([check]), tf.name_scope("verify_images_names_the_file"):
        mask = tf.io.decode_png(contents, channels=1)
    if same_size:
        sizes = tf.shape(image)[:2], tf.shape(mask)[:2]
        data = ["Expected a mask of its image's height and width:", path, sizes[0], mask_path, sizes[1]]
        check = tf.raw_ops.Assert(condition=tf.reduce_all(tf.equal(*sizes)), data=data)
        with tf.control_dependencies([check]):
            mask = tf.identity(mask)
    return image, mask


_WITH_MASKS = replace(
    IMAGES, look=_look, reading=_reading, fault="do not decode, or whose masks do not", values_are_files=True
)
