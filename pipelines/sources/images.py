"""A folder of images with a subfolder per class as a source; the first bytes of every file are checked."""

import os
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.pipelines.shared.elements import without_autograph
from tfopt.pipelines.shared.paths import absolute, as_path, expect_utf8, file_stamps
from tfopt.pipelines.sources.source import Source

_MAGICS = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF87a", b"GIF89a", b"BM")
_BEGINNINGS = np.frombuffer(b"\xff\xd8\x89PGIBM", "<u2")  # the first two bytes of each

# The largest BMP header (124 bytes) and the palette of an 8-bit BMP fit.
_HEAD_BYTES = 14 + 124 + 4 * 256
_BMP_MASKS = struct.pack("<3I", 0xFF0000, 0xFF00, 0xFF)  # red, green and blue, where TensorFlow assumes them
_SPLITS = frozenset({"train", "training", "val", "valid", "validation", "test"})
_THREADS = 16  # for network file systems, where opening a file takes long


def images(folder: str | os.PathLike[str], *, classes: Sequence[str] | None = None) -> Source:
    """Returns the images of a folder as a source of `(image, label)`.

    Classes are the subfolders, and all files below them are images; names that begin with a dot are skipped. Use
    `transform` or `crop` to bring images of different sizes to one.

    Args:
        folder: The folder with a subfolder per class.
        classes: The class names in the order of their labels; a class may have no folder. For validation, pass the
            training source's `class_names`, so that both number the classes alike. Default: the subfolders, sorted.

    Returns:
        A source of `(image, label)`: `(height, width, 3)` uint8, and an int32 scalar. Reads JPEG, PNG, GIF (its first
        frame) and BMP; grey becomes three equal channels, and transparency is dropped.

    Raises:
        TypeError: If `folder` is not a path, or `classes` not a sequence of names.
        ValueError: If `classes` names one twice.
        PipelineError: If the folder does not exist, has no class, a class without images or one that is not among
            `classes`, or holds splits, such as train and val, instead of classes; or if something in it cannot be read
            or is not an image that can be decoded.

    Example:
        >>> from tfopt.pipelines import build_pipeline
        >>> train = images("photos/train")  # doctest: +SKIP
        >>> held_out = images("photos/val", classes=train.class_names)  # doctest: +SKIP
        >>> dataset = build_pipeline(train, batch_size=64)  # doctest: +SKIP
    """
    root = as_path("the path of a folder", folder)
    paths, labels, names = _list_images(root, classes)
    with ThreadPoolExecutor(_THREADS) as threads:
        only_jpeg = all(list(threads.map(_check_image, paths)))  # a list, so that every file is checked
    all_paths, all_labels = np.array([absolute(path) for path in paths], dtype=object), np.array(labels, dtype=np.int32)

    def keys(numbers: Any) -> Any:
        return tf.data.Dataset.from_tensor_slices((all_paths[numbers], all_labels[numbers]))

    def spread(numbers: Any, limit: int) -> Any:
        return numbers[np.unique(np.linspace(0, len(numbers) - 1, num=min(limit, len(numbers))).astype(int))]

    def numbered(numbers: Any) -> Source:
        return Source(
            name=f"images in {root}",
            dataset=lambda: keys(numbers),
            count=len(numbers),
            decode=_read_and_decode,
            origin=_path_of,
            sample=lambda limit: keys(spread(numbers, limit)),
            encoded=_read,
            only_jpeg=only_jpeg,
            fingerprint=lambda: [names, all_labels, file_stamps(paths)],
            class_names=tuple(names),
            part=lambda index, parts: numbered(numbers[index::parts]),
        )

    return numbered(np.arange(len(paths)))


def _path_of(path: Any, label: Any) -> Any:
    del label
    return path


@without_autograph
def decode_image(contents: Any) -> Any:
    """Decodes a JPEG, PNG, GIF (first frame) or BMP to (height, width, 3) uint8, in a graph."""
    image = tf.io.decode_image(contents, channels=3, expand_animations=False)
    image.set_shape((None, None, 3))
    return image


@without_autograph
def _read(path: Any, label: Any) -> Any:
    return tf.io.read_file(path), label


@without_autograph
def _read_and_decode(path: Any, label: Any) -> Any:
    return decode_image(expect_image_bytes(tf.io.read_file(path), path)), label


@without_autograph
def expect_image_bytes(contents: Any, name: Any) -> Any:
    """Returns the contents of an image file, in a graph; fails, naming the file, if they do not begin like an image.

    Files are checked when listed but may change later, and the decoder's own error names no file.
    """
    begins = tf.io.decode_raw(tf.strings.substr(contents, 0, 2), tf.uint16, fixed_length=2)
    known = tf.reduce_any(tf.equal(begins, _BEGINNINGS))
    # tf.debugging.Assert would add a branch, and this runs for every image.
    check = tf.raw_ops.Assert(condition=known, data=["Not a JPEG, PNG, GIF or BMP image:", name])
    with tf.control_dependencies([check]):
        return tf.identity(contents)


def _list_images(folder: str, classes: Sequence[str] | None) -> tuple[list[str], list[int], list[str]]:
    """Returns the paths, sorted within each class, their labels, and the class names."""
    if not os.path.isdir(folder):
        raise PipelineError(
            f"Expected a folder of images with one subfolder per class. There is no folder {folder!r}. Check the path."
        )
    entries = _entries(folder)
    folders = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False) or os.path.isdir(entry))
    if not folders:
        raise PipelineError(f"Expected one subfolder per class in {folder!r}. It holds none: move the images into one.")
    names = folders if classes is None else _checked_classes(classes, folder, folders)
    _refuse_strays([entry.path for entry in entries if entry.name not in folders], folder)
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
    if classes is None:
        _refuse_splits(folder, names, paths)
    return [expect_utf8(path) for path in paths], labels, names


def _checked_classes(classes: Sequence[str], folder: str, folders: list[str]) -> list[str]:
    if isinstance(classes, str) or not all(isinstance(name, str) for name in classes):
        raise TypeError(f"Expected a sequence of names for `classes`. Received: {classes!r}. Pass a list of strings.")
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


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if not entry.name.startswith(".")]
    except OSError as error:
        raise _unreadable(folder, error) from error


def _files_below(folder: str, above: tuple[str, ...] = ()) -> list[str]:
    real = os.path.realpath(folder)
    if real in above:
        raise PipelineError(
            f"Expected folders without cycles. The link {folder!r} leads back to {real!r}, which contains it. "
            "Remove the link."
        )
    found = []
    for entry in _entries(folder):
        found += _files_below(entry.path, (*above, real)) if _is_folder(entry) else [entry.path]
    return sorted(found)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a folder rather than a file; refuses all else unopened, since opening a pipe can block."""
    try:
        if entry.is_dir():
            return True
        if entry.is_file():
            return False
        os.stat(entry.path)  # raises what is wrong with a link
    except OSError as error:
        raise _unreadable(entry.path, error) from error
    raise PipelineError(
        f"Expected files in the class folders. {entry.path!r} is a pipe, a socket or a device. Move it elsewhere."
    )


def _refuse_splits(folder: str, classes: list[str], paths: list[str]) -> None:
    """Refuses a folder of splits such as train and val, each with the classes below it."""
    if not _SPLITS.issuperset(map(str.lower, classes)):
        return
    holders = {os.path.dirname(path) for path in paths}
    if not any(os.path.join(folder, name) in holders for name in classes):
        raise PipelineError(
            f"Expected one subfolder per class in {folder!r}. Found the splits {classes}, which hold folders only. "
            f"Pass one of them, such as {os.path.join(folder, classes[0])!r}; if they are classes, name them in "
            "`classes`."
        )


def _refuse_strays(paths: list[str], folder: str) -> None:
    """Refuses images beside the class folders, which would silently be left out."""
    for path in sorted(paths):
        if os.path.isfile(path) and _head(path).startswith(_MAGICS):
            raise PipelineError(
                f"Expected images in class folders. The image {path!r} is in no class folder. Move it into one, or "
                f"out of {folder!r}."
            )


def _head(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(_HEAD_BYTES)
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: str, error: OSError) -> PipelineError:
    return PipelineError(
        f"Expected to read {path!r}. Cannot read it: {error.strerror}. Fix or allow that, or move it elsewhere."
    )


def _check_image(path: str) -> bool:
    """Refuses a file that is not an image or would decode to wrong colours; returns whether it is a JPEG."""
    head = _head(path)
    if not head.startswith(_MAGICS):
        found = "an empty file" if not head else f"a file that begins with {head[:8]!r}"
        raise PipelineError(f"Expected a JPEG, PNG, GIF or BMP image at {path!r}. Found {found}: remove or convert it.")
    if head.startswith(b"BM") and not _bmp_decodes(head):
        raise PipelineError(
            f"Expected colours that TensorFlow decodes correctly. {path!r} is a BMP with a palette, compression or "
            "unusual masks. Convert it to PNG."
        )
    return head.startswith(_MAGICS[0])


def _bmp_decodes(head: bytes) -> bool:
    """Whether TensorFlow decodes a BMP's colours correctly: it takes palette indices for shades of grey."""
    if len(head) < 34:
        return False
    header_bytes, bits, compression = (*struct.unpack_from("<I", head, 14), *struct.unpack_from("<HI", head, 28))
    if bits == 32 and compression == 3:
        return head[54:66] == _BMP_MASKS
    if bits in (24, 32):
        return compression == 0
    palette = head[14 + header_bytes :][: 4 * 256]
    grey = all(palette[channel::4] == bytes(range(256)) for channel in range(3))
    return bits == 8 and compression == 0 and grey
