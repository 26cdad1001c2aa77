"""Image files as a source: a folder with a subfolder per class, or paths and labels."""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.pipelines.shared.elements import without_autograph
from tfopt.pipelines.shared.paths import absolute, as_path, expect_reachable, expect_utf8, file_stamps
from tfopt.pipelines.shared.problems import Problem, listed
from tfopt.pipelines.shared.seeding import in_batches
from tfopt.pipelines.sources.image_files import (
    ImagesReport,
    decode_image,
    examine,
    expect_image_bytes,
    is_image,
    refusal,
    unhonoured,
)
from tfopt.pipelines.sources.source import Source, common_length, held_on_host
from tfopt.warn import warn_caller

_GATHERED = 1024  # paths at once: a call for each would cost more than the path
_SPLITS = frozenset({"train", "training", "val", "valid", "validation", "test"})


def images(files: Any, *, classes: Sequence[str] | None = None) -> Source:
    """Returns the images of a folder as a source of `(image, label)`.

    Classes are the subfolders of a folder, and all files below them are images; names that begin with a dot are
    skipped. Use `transform` or `crop` to bring images of different sizes to one.

    Args:
        files: The folder with a subfolder per class, or with images and no folder; or `(paths, labels)`; or a table of
            them, a dict or a pandas DataFrame with the columns "paths" and "labels". Labels are arrays of numbers, or
            names of classes.
        classes: The class names in the order of their labels; a class may have no folder. For validation, pass the
            training source's `class_names`, so that both number the classes alike. Default: the subfolders, or the
            names among the labels, sorted.

    Returns:
        A source of `(image, label)`: `(height, width, 3)` uint8, and an int32 scalar or what stands in `labels`; of
        `(image, name)` for a folder without folders, with the file's name as a string. Reads JPEG, PNG, GIF (its first
        frame), BMP and WebP; grey becomes three equal channels, and transparency is dropped. The files themselves are
        checked when a pipeline is planned, by their first and last bytes; `on_bad_file` says what becomes of bad ones.

    Raises:
        TypeError: If `files` is none of these, or `classes` not a sequence of names.
        ValueError: If `classes` names one twice, or a table lacks a column.
        PipelineError: If the folder does not exist, has no class, a class without images or one that is not among
            `classes`, or holds splits, such as train and val, instead of classes; or if a folder cannot be read, or
            labels are not as many as paths or not among `classes`.

    Example:
        >>> from tfopt.pipelines import build_pipeline
        >>> train = images("photos/train")  # doctest: +SKIP
        >>> held_out = images("photos/val", classes=train.class_names)  # doctest: +SKIP
        >>> dataset = build_pipeline(train, batch_size=64)  # doctest: +SKIP
    """
    if isinstance(files, tuple):
        return _of_columns(files, classes)
    if isinstance(files, Mapping) or hasattr(files, "columns"):
        columns = [str(name) for name in files]
        if not {"paths", "labels"}.issubset(columns):
            raise ValueError(
                "images() expects a table with the columns 'paths' and 'labels'. Received: "
                f"{', '.join(map(repr, columns))}. Rename them."
            )
        return _of_columns((files["paths"], files["labels"]), classes)
    root = expect_reachable(as_path("the path of a folder", files))
    flat = None if classes is not None else _flat(root)
    if flat:
        return _of_files(f"images in {root}", flat, np.array([os.path.basename(path) for path in flat], object), None)
    paths, labels, names = _list_images(root, classes)
    return _of_files(f"images in {root}", paths, np.array(labels, dtype=np.int32), tuple(names))


def verify_images(source: Source | str | os.PathLike[str]) -> ImagesReport:
    """Decodes every file of a folder of images, and reports those that do not decode.

    A JPEG has no checksum: bytes altered inside it mostly decode, to wrong pixels. Of every format, a file that is cut
    is found.

    Args:
        source: What `images` returned, or the folder it takes.

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
    found = examine(source.files, decoding=True, again=True)
    return ImagesReport(len(found), tuple(each.problem for each in found if each.problem is not None))


def _of_columns(columns: tuple[Any, ...], classes: Sequence[str] | None) -> Source:
    if len(columns) != 2:
        raise TypeError(f"images() expects (paths, labels). Received a tuple of {len(columns)}. Pass these two.")
    given, labels = columns
    paths = [] if isinstance(given, str | os.PathLike) else list(given)
    if isinstance(given, str | os.PathLike) or not all(isinstance(path, str | os.PathLike) for path in paths):
        raise TypeError("images() expects (paths, labels). Received other paths. Pass a sequence of strings or Paths.")
    values = np.asarray(labels)
    if values.ndim == 0:
        raise TypeError(f"images() expects (paths, labels). Received as labels: {labels!r}. Pass one for each path.")
    common_length({"paths": len(paths), "labels": len(values)})
    names = None if classes is None else tuple(_expect_classes(classes))
    if values.dtype.kind in "OUT":
        for label in values.ravel():
            if not isinstance(label, str):
                raise TypeError(
                    f"images() expects numbers or names as labels. Found among names: {type(label).__name__}. Pass one "
                    "type, and leave out what has no label."
                )
        names = names or tuple(sorted(set(values.ravel())))
        numbers = {name: number for number, name in enumerate(names)}
        _expect_among(set(values.ravel()) - numbers.keys(), names)
        values = np.array([numbers[label] for label in values.ravel()], np.int32).reshape(values.shape)
    elif names is not None and values.dtype.kind in "iu":
        _expect_among({int(label) for label in values.ravel() if not 0 <= label < len(names)}, names)
    return _of_files(f"{len(paths):,} images by their paths", list(map(os.fspath, paths)), values, names)


def _expect_among(others: set[Any], names: tuple[str, ...]) -> None:
    if others:
        raise PipelineError(
            f"Expected only labels of the classes {list(names)}. Found {sorted(others)[0]!r}. Add it to `classes`, or "
            "leave out its images."
        )


def _of_files(name: str, paths: Sequence[str], values: Any, class_names: tuple[str, ...] | None) -> Source:
    """Returns the images of these files as a source of `(image, value)`."""
    files = np.array([absolute(expect_utf8(path)) for path in paths], dtype=object)

    def keys(numbers: Any) -> Any:
        with tf.device("CPU:0"):
            return tf.constant(files[numbers]), tf.constant(values[numbers])

    def spread(numbers: Any, limit: int) -> Any:
        return numbers[np.unique(np.linspace(0, len(numbers) - 1, num=min(limit, len(numbers))).astype(int))]

    def numbered(numbers: Any, note: str = "", *, only_jpeg: bool = False, ends: bool = False) -> Source:
        all_keys = cache(partial(keys, numbers))  # once, though several datasets are made of them

        def checked(on_bad_file: str) -> Source:
            found = examine(files[numbers].tolist(), decoding=on_bad_file == "skip")
            problems = [each.problem for each in found if each.problem is not None]
            if problems and on_bad_file == "raise":
                raise refusal(problems)
            whole = [each for each in found if each.problem is None]
            without = [_without(problems, len(found), name)] if problems else []
            return numbered(
                numbers[[each.problem is None for each in found]],
                "; ".join(filter(None, [*without, unhonoured(whole)])),
                only_jpeg=all(each.format == "JPEG" for each in whole),
                ends=all(each.ends for each in whole),
            )

        return Source(
            name=name,
            dataset=lambda: tf.data.Dataset.from_tensor_slices(all_keys()),
            count=len(numbers),
            decode=partial(_read_and_decode, ends=ends, only_jpeg=only_jpeg),
            origin=_path_of,
            sample=lambda limit: tf.data.Dataset.from_tensor_slices(keys(spread(numbers, limit))),
            at=partial(_keys_at, all_keys),
            encoded=partial(_read, ends=ends, only_jpeg=only_jpeg),
            only_jpeg=only_jpeg,
            fingerprint=lambda: [class_names, values[numbers], file_stamps(files[numbers])],
            class_names=class_names,
            part=lambda index, parts: numbered(numbers[index::parts], note, only_jpeg=only_jpeg, ends=ends),
            note=note,
            files=tuple(files[numbers]),
            checked=checked,
        )

    return numbered(np.arange(len(files)))


def _keys_at(all_keys: Callable[[], Any], positions: Any) -> Any:
    """Returns the paths and values at these positions, as `Source.at` does."""

    @without_autograph
    def gathered(some: Any) -> Any:
        paths, values = held_on_host(all_keys)
        return tf.data.Dataset.from_tensor_slices((tf.gather(paths, some), tf.gather(values, some)))

    return in_batches(positions, _GATHERED, full=False).flat_map(gathered)


def _without(problems: list[Problem], files: int, name: str) -> str:
    """Warns of files that are left out; returns what the plan says of them."""
    if len(problems) == files:
        raise PipelineError(f"Expected at least one image that decodes in {name}. Found none:\n{listed(problems)}")
    found = f"{len(problems):,} of {files:,} files that do not decode"
    warn_caller(f"on_bad_file='skip' leaves out {found}:\n{listed(problems)}")
    return f"without {found}"


def _path_of(path: Any, value: Any) -> Any:
    del value
    return path


@without_autograph
def _read(path: Any, value: Any, *, ends: bool, only_jpeg: bool) -> Any:
    return expect_image_bytes(tf.io.read_file(path), path, ends=ends, only_jpeg=only_jpeg), value


@without_autograph
def _read_and_decode(path: Any, value: Any, *, ends: bool, only_jpeg: bool) -> Any:
    contents, value = _read(path, value, ends=ends, only_jpeg=only_jpeg)
    return decode_image(contents), value


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
    return paths, labels, names


def _flat(folder: str) -> list[str]:
    """Returns the images of a folder that holds no folders, sorted."""
    entries = _entries(folder) if os.path.isdir(folder) else []
    if any(map(os.path.isdir, entries)):
        return []
    return sorted(entry.path for entry in entries if os.path.isfile(entry) and is_image(entry.path))


def _expect_classes(classes: Sequence[str]) -> list[str]:
    if isinstance(classes, str) or not all(isinstance(name, str) for name in classes):
        raise TypeError(f"Expected a sequence of names for `classes`. Received: {classes!r}. Pass a list of strings.")
    names = list(classes)
    if len(set(names)) < len(names):
        raise ValueError(f"Expected each class once in `classes`. Received: {names}. Remove the second one.")
    return names


def _checked_classes(classes: Sequence[str], folder: str, folders: list[str]) -> list[str]:
    names = _expect_classes(classes)
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
        if os.path.isfile(path) and is_image(path):
            raise PipelineError(
                f"Expected images in class folders. The image {path!r} is in no class folder. Move it into one, or "
                f"out of {folder!r}."
            )


def _unreadable(path: str, error: OSError) -> PipelineError:
    return PipelineError(
        f"Expected to read {path!r}. Cannot read it: {error.strerror}. Fix or allow that, or move it elsewhere."
    )
