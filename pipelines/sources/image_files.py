"""Finds the image files of a folder, class by class, and checks that each begins as an image does."""

import os
import struct
from concurrent.futures import ThreadPoolExecutor

from tfopt.errors import PipelineError

MAGICS = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF87a", b"GIF89a", b"BM")

# Enough for a BMP header and the palette of an 8-bit BMP behind the largest header (124 bytes).
_HEAD_BYTES = 14 + 124 + 4 * 256
_THREADS = 16  # for network file systems, where opening a file waits


def list_images(folder: str) -> tuple[list[str], list[int], list[str]]:
    """Returns the paths, their labels, and the class names, all in sorted order.

    Args:
        folder: The folder that holds a folder a class.

    Raises:
        PipelineError: There is no such folder, no class, or a class without files.
    """
    if not os.path.isdir(folder):
        raise PipelineError(f"Expected a folder of images with one subfolder a class. There is no folder {folder!r}.")
    classes = sorted(name for name in _visible(folder) if os.path.isdir(os.path.join(folder, name)))
    if not classes:
        raise PipelineError(f"Expected one subfolder a class in {folder!r}. It holds none: move the images into one.")
    _refuse_strays(folder, classes)
    paths, labels = [], []
    for label, name in enumerate(classes):
        found = _files_below(os.path.join(folder, name))
        if not found:
            raise PipelineError(f"The class folder {os.path.join(folder, name)!r} holds no files. Remove or fill it.")
        paths += found
        labels += [label] * len(found)
    return paths, labels, classes


def check_images(paths: list[str]) -> None:
    """Checks the first bytes of every file.

    Raises:
        PipelineError: A file is no JPEG, PNG, GIF or BMP, or a BMP of a kind that would decode to wrong colours.
    """
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
        if os.path.isfile(path) and _head(path).startswith(MAGICS):
            raise PipelineError(f"The image {path!r} lies in no class folder. Move it into one, or out of {folder!r}.")


def _head(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(_HEAD_BYTES)


def _problem(path: str) -> str | None:
    try:
        head = _head(path)
    except OSError as error:
        return f"Cannot read {path!r}: {error.strerror}."
    if not head.startswith(MAGICS):
        found = "an empty file" if not head else f"a file that begins with {head[:8]!r}"
        return f"Expected a JPEG, PNG, GIF or BMP image at {path!r}. Found {found}: remove or convert it."
    if head.startswith(b"BM") and not _bmp_decodes(head):
        return f"{path!r} is a BMP with a palette or compression, which TensorFlow decodes wrongly. Convert it to PNG."
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
