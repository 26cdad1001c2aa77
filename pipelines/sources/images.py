"""A folder of images, one subfolder a class, as a source; every file is checked to begin as an image does."""

import os
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.pipelines.elements import without_autograph
from tfopt.pipelines.sources.source import Source, expect_utf8

_MAGICS = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF87a", b"GIF89a", b"BM")

# Enough for a BMP header and the palette of an 8-bit BMP behind the largest header (124 bytes).
_HEAD_BYTES = 14 + 124 + 4 * 256
_THREADS = 16  # for network file systems, where opening a file waits


def images(folder: str | os.PathLike[str], *, classes: Sequence[str] | None = None) -> Source:
    """Returns the images of a folder as a source of `(image, label)`.

    Classes are the subfolders, and all files below them are images; names that begin with a dot are
    passed over. Use `transform` to bring images of unlike sizes to one.

    Args:
        folder: The folder that holds a folder a class.
        classes: The names of the classes in the order of their labels; one of them may have no folder. For validation
            pass those of the training source, `train.class_names`, so that both number them alike. Default: the
            subfolders in sorted order.

    Returns:
        A source of `(image, label)`: `(height, width, 3)` uint8, and an int32 scalar. JPEG, PNG, GIF (its first
        frame) and BMP are read; grey becomes three equal channels, and transparency is dropped.

    Raises:
        TypeError: `classes` is no sequence of names.
        ValueError: `classes` names one twice.
        PipelineError: The folder does not exist, has no class, has a class without images or one that is not among
            `classes`, or a file is no image that can be decoded.

    Example:
        >>> from tfopt.pipelines import build_pipeline
        >>> train = images("photos/train")  # doctest: +SKIP
        >>> held_out = images("photos/val", classes=train.class_names)  # doctest: +SKIP
        >>> dataset = build_pipeline(train, batch_size=64)  # doctest: +SKIP
    """
    paths, labels, names = _list_images(os.fspath(folder), classes)
    _check_images(paths)
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
        class_names=tuple(names),
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
    starts = [tf.equal(tf.strings.substr(head, 0, len(magic)), magic) for magic in _MAGICS]
    return tf.reduce_any(tf.stack(starts))


def _decode_other(contents: Any) -> Any:
    return tf.io.decode_image(contents, channels=3, expand_animations=False)


def _decode_bmp(contents: Any) -> Any:
    """Decodes with the file's own channels: the BMP decoder refuses to convert."""
    image = tf.io.decode_bmp(contents, channels=0)
    return tf.cond(tf.shape(image)[2] < 3, lambda: tf.repeat(image[..., :1], 3, axis=2), lambda: image[..., :3])


def _list_images(folder: str, classes: Sequence[str] | None) -> tuple[list[str], list[int], list[str]]:
    """Returns the paths, sorted within each class, their labels, and the class names."""
    if not os.path.isdir(folder):
        raise PipelineError(
            f"Expected a folder of images with one subfolder a class. There is no folder {folder!r}. Check the path."
        )
    folders = sorted(name for name in _visible(folder) if os.path.isdir(os.path.join(folder, name)))
    if not folders:
        raise PipelineError(f"Expected one subfolder a class in {folder!r}. It holds none: move the images into one.")
    names = folders if classes is None else _checked_classes(classes, folder, folders)
    _refuse_strays(folder, folders)
    paths, labels = [], []
    for label, name in enumerate(names):
        if name not in folders:
            continue
        found = _files_below(os.path.join(folder, name))
        if not found:
            raise PipelineError(
                f"Expected images of every class. The class folder {os.path.join(folder, name)!r} holds no files. "
                "Remove or fill it."
            )
        paths += found
        labels += [label] * len(found)
    return [expect_utf8(path) for path in paths], labels, names


def _checked_classes(classes: Sequence[str], folder: str, folders: list[str]) -> list[str]:
    if isinstance(classes, str) or not all(isinstance(name, str) for name in classes):
        raise TypeError(f"Expected a sequence of names for `classes`. Received: {classes!r}. Pass a list of texts.")
    names = list(classes)
    if len(set(names)) < len(names):
        raise ValueError(f"Expected each class once in `classes`. Received: {names}. Remove the second one.")
    for name in folders:
        if name not in names:
            raise PipelineError(
                f"Expected only the classes {names} in {folder!r}. Found the folder {name!r}. Add it to `classes`, or "
                "remove the folder."
            )
    return names


def _check_images(paths: list[str]) -> None:
    """Refuses files that are no JPEG, PNG, GIF or BMP, or a BMP of a kind that would decode to wrong colours."""
    with ThreadPoolExecutor(_THREADS) as threads:
        for problem in threads.map(_problem, paths, chunksize=64):
            if problem:
                raise PipelineError(problem)


def _visible(folder: str) -> list[str]:
    return [name for name in os.listdir(folder) if not name.startswith(".")]


def _files_below(folder: str) -> list[str]:
    found = []
    for parent, folders, names in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [os.path.join(parent, name) for name in names if not name.startswith(".")]
    return sorted(found)


def _refuse_strays(folder: str, classes: list[str]) -> None:
    """Refuses images beside the class folders: they would be left out in silence."""
    for name in sorted(set(_visible(folder)) - set(classes)):
        path = os.path.join(folder, name)
        if os.path.isfile(path) and _head(path).startswith(_MAGICS):
            raise PipelineError(
                f"Expected images in class folders. The image {path!r} lies in no class folder. Move it into one, or "
                f"out of {folder!r}."
            )


def _head(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(_HEAD_BYTES)


def _problem(path: str) -> str | None:
    try:
        head = _head(path)
    except OSError as error:
        return f"Expected to read {path!r}. Cannot read {path!r}: {error.strerror}. Allow it, or remove the file."
    if not head.startswith(_MAGICS):
        found = "an empty file" if not head else f"a file that begins with {head[:8]!r}"
        return f"Expected a JPEG, PNG, GIF or BMP image at {path!r}. Found {found}: remove or convert it."
    if head.startswith(b"BM") and not _bmp_decodes(head):
        return (
            f"Expected colours that TensorFlow decodes rightly. {path!r} is a BMP with a palette or compression. "
            "Convert it to PNG."
        )
    return None


def _bmp_decodes(head: bytes) -> bool:
    """Whether TensorFlow reads these colours rightly: it takes the indices of a palette for shades of grey."""
    if len(head) < 34:
        return False
    header_bytes, bits, compression = (*struct.unpack_from("<I", head, 14), *struct.unpack_from("<HI", head, 28))
    if bits in (24, 32):
        return compression in (0, 3)
    grey = b"".join(bytes((shade, shade, shade)) for shade in range(256))
    palette = head[14 + header_bytes :][: 4 * 256]
    channels = b"".join(palette[index : index + 3] for index in range(0, len(palette), 4))
    return bits == 8 and compression == 0 and channels == grey
