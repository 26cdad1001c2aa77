"""Image files as a source: a folder with a subfolder per class, or paths and labels."""

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.pipelines.by_file.class_folders import in_class_folders
from tfopt.pipelines.by_file.file_source import FileKind, file_source
from tfopt.pipelines.by_file.labels import columns_of, labelled
from tfopt.pipelines.shared.elements import without_autograph
from tfopt.pipelines.shared.paths import as_path, expect_reachable
from tfopt.pipelines.sources.image_files import (
    ImageFile,
    ImagesReport,
    decode_image,
    examine,
    expect_image_bytes,
    unhonoured,
)
from tfopt.pipelines.sources.source import Source


def images(
    files: Any, *, column: str | None = None, label: str | None = None, classes: Sequence[str] | None = None
) -> Source:
    """Returns images as a source of `(image, label)`.

    The classes of a folder are its subfolders, and all files below them are images; names that begin with a dot are
    skipped. Use `transform` or `crop` to bring images of different sizes to one.

    Args:
        files: A folder with a subfolder of images per class, or with images alone; or a list of pairs `(path, label)`;
            or `(paths, labels)`; or a table of both: a dict, a pandas DataFrame, a pyarrow Table or the path of a CSV
            file (".csv", which needs pyarrow). Labels are numbers or arrays of them, names of classes or, for images of
            several classes, lists of names.
        column: The table's column of paths. Default: "paths".
        label: The table's column of labels. Default: "labels".
        classes: The class names in the order of their labels; a class may have no folder. For validation, pass the
            training source's `class_names`, so that both number the classes alike. Default: the subfolders, or the
            names among the labels, sorted.

    Returns:
        A source of `(image, label)`; for a folder of images alone, of `(image, name)`, with the file's name as a
        string. Images are `(height, width, 3)` uint8, from JPEG, PNG, GIF (its first frame), BMP or WebP without
        transparency; grey becomes three equal channels, and transparency is dropped. Labels are int32 scalars for a
        folder or names, float32 vectors with 1 for each named class for lists of names, and otherwise as given. The
        files are checked when a pipeline is planned, by their first and last bytes; `on_bad_file` says what becomes of
        bad ones.

    Raises:
        TypeError: If `files` is none of these, `classes` is not a sequence of names, or `column` or `label` is given
            without a table.
        ValueError: If `classes` names none or one twice, or a table lacks a column.
        UnsupportedError: If pyarrow is not installed, for a CSV file.
        PipelineError: If the folder does not exist, cannot be read, has no class, a class without images, one that is
            not among `classes` or a link to one that is gone, or holds splits, such as train and val, instead of
            classes; or if labels are missing, not as many as paths, or not among `classes`.

    Example:
        >>> from tfopt.pipelines import build_pipeline
        >>> train = images("photos/train")  # doctest: +SKIP
        >>> held_out = images("photos/val", classes=train.class_names)  # doctest: +SKIP
        >>> dataset = build_pipeline(train, batch_size=64)  # doctest: +SKIP
        >>> images([("a.jpg", ["cat"]), ("b.jpg", ["cat", "dog"])]).class_names
        ('cat', 'dog')
    """
    columns = columns_of("images()", files, {"column": column, "label": label}, ("paths", "labels"))
    if columns is not None:
        given = labelled("images()", *columns, classes)
        return file_source(IMAGES, f"{len(given.paths):,} images by their paths", given)
    if not isinstance(files, str | os.PathLike):
        raise TypeError(
            "images() expects the path of a folder, pairs in a list, (paths, labels) or a table. Received: "
            f"{type(files).__name__}. Pass [(path, label), …]."
        )
    root = expect_reachable(as_path("the path of a folder", files))
    return file_source(IMAGES, f"images in {root}", in_class_folders(root, classes))


def verify_images(source: Source | str | os.PathLike[str]) -> ImagesReport:
    """Decodes every file of a folder of images, and reports those that do not decode.

    A JPEG has no checksum: altered bytes inside it mostly decode to wrong pixels, unnoticed. Cut files of every format
    are found.

    Args:
        source: What `images` or `images_with_masks` returned, or a folder that `images` takes.

    Returns:
        The report; `passed` is the verdict, `print` shows the problems.

    Raises:
        TypeError: If `source` is neither.
        PipelineError: If `images` refuses the folder.

    Example:
        >>> print(verify_images("photos/train"))  # doctest: +SKIP
        1,281,167 images: every one decodes
    """
    if not isinstance(source, Source):
        source = images(source)
    if source.files is None:
        raise TypeError(
            f"verify_images() expects a folder of images, or what images() returned. Received: {source.name}. For "
            "files of records call verify_records."
        )
    paths = np.array(source.files, object).ravel().tolist()
    problems = [problem for problem, _ in examine(paths, decoding=True, again=True)]
    return ImagesReport(len(problems), tuple(problem for problem in problems if problem is not None))


def _reading(found: Sequence[ImageFile]) -> dict[str, Any]:
    """Returns how images are read, given what was found of them."""
    ends = bool(found) and all(each.ends for each in found)
    only_jpeg = bool(found) and all(each.format == "JPEG" for each in found)
    return {
        "decode": partial(_read_and_decode, ends=ends, only_jpeg=only_jpeg),
        "encoded": partial(_read, ends=ends, only_jpeg=only_jpeg),
        "only_jpeg": only_jpeg,
        "note": unhonoured(found),
    }


@without_autograph
def _read(path: Any, value: Any, *, ends: bool, only_jpeg: bool) -> Any:
    return expect_image_bytes(tf.io.read_file(path), path, ends=ends, only_jpeg=only_jpeg), value


@without_autograph
def _read_and_decode(path: Any, value: Any, *, ends: bool, only_jpeg: bool) -> Any:
    contents, value = _read(path, value, ends=ends, only_jpeg=only_jpeg)
    return decode_image(contents), value


IMAGES = FileKind(
    look=lambda paths, labels, *, decoding: examine(paths, decoding=decoding),
    reading=_reading,
    refusal="Expected images that TensorFlow decodes. Found {count} that it does not:\n{listed}\nRemove or convert "
    "them, or pass on_bad_file='skip', which leaves such files out. verify_images also finds those that are damaged "
    "inside.",
    fault="do not decode",
    are_images=True,
)
