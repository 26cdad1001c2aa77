"""Images with masks as a source: two files an example."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.pipelines.by_file.file_source import FileKind, Reading, file_source
from tfopt.pipelines.by_file.images import image_reading
from tfopt.pipelines.by_file.labels import expect_paths, holds_columns, of_pairs, of_table
from tfopt.pipelines.shared.elements import without_autograph
from tfopt.pipelines.shared.paths import absolute, expect_reachable, expect_utf8, for_each_path
from tfopt.pipelines.shared.problems import Problem
from tfopt.pipelines.sources.image_files import ImageFile, examine, expect_image_bytes, refusal
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
    if holds_columns(files):
        given = of_table(caller, files, (column or "images", mask or "masks"), ("column", "mask"))
    elif column is not None or mask is not None:
        raise TypeError(f"{caller} expects `column` and `mask` only with a table. Leave them out, or pass a table.")
    elif isinstance(files, tuple) and len(files) == 2:
        given = files
    elif isinstance(files, list):
        given = of_pairs(caller, files)
    else:
        raise TypeError(
            f"{caller} expects pairs in a list, (images, masks) or a table. Received: {type(files).__name__}. Pass "
            "[(image, mask), …]."
        )
    paths, masks = (expect_paths(caller, some) for some in given)
    common_length({"images": len(paths), "masks": len(masks)})
    values = np.array([absolute(expect_utf8(expect_reachable(path))) for path in masks], object)
    return file_source(_WITH_MASKS, f"{len(paths):,} images with masks", paths, values)


@dataclass(frozen=True, slots=True)
class _Pair:
    """What was found of an image and its mask."""

    image: ImageFile
    mask: ImageFile
    problem: Problem | None


def _look(paths: Sequence[str], masks: Sequence[str], *, decoding: bool) -> list[_Pair]:
    images, found = (examine(some, decoding=decoding) for some in (paths, list(masks)))
    whole = {path for path, mask in zip(masks, found, strict=True) if mask.problem is None}
    forms = for_each_path(lambda path: _form_problem(path) if path in whole else None, list(masks))
    return [
        _Pair(image, mask, image.problem or mask.problem or form)
        for image, mask, form in zip(images, found, forms, strict=True)
    ]


def _form_problem(path: str) -> Problem | None:
    """Returns what is wrong with a mask whose numbers TensorFlow would decode to others, such as a palette's."""
    try:
        with open(path, "rb") as file:
            head = file.read(_FORM.stop)
    except OSError as error:
        return Problem(path, "unreadable", f"Cannot read it: {error.strerror}")
    if head.startswith(_PNG) and head[_FORM] in _GREY:
        return None
    return Problem(path, "unsupported", f"a mask that is not an 8-bit grey PNG. {_CONVERT}")


def _reading(found: Sequence[_Pair]) -> Reading:
    reading = image_reading([each.image for each in found])
    ends = bool(found) and all(each.mask.ends for each in found)
    return replace(
        reading,
        decode=partial(_with_mask, reading.decode, ends=ends, same_size=True),
        encoded=partial(_with_mask, reading.encoded, ends=ends, same_size=False),  # `crop` checks that
    )


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


_WITH_MASKS = FileKind(
    look=_look,
    reading=_reading,
    refusal=refusal,
    fault="do not decode, or whose masks do not",
    are_images=True,
    values_are_files=True,
)
