"""Folders with a subfolder of files per class, and folders of images alone."""

import os
from collections.abc import Sequence

import numpy as np

from tfopt.errors import PipelineError
from tfopt.pipelines.by_file.labels import Labelled, expect_classes
from tfopt.pipelines.sources.image_files import is_image

_SPLITS = frozenset({"train", "training", "val", "valid", "validation", "test"})


def in_class_folders(folder: str, classes: Sequence[str] | None) -> Labelled:
    """Returns a folder's files with their labels, sorted in each class; images without classes with their names."""
    if not os.path.isdir(folder):
        raise PipelineError(
            f"Expected a folder with one subfolder per class. There is no folder {folder!r}. Check the path."
        )
    try:
        return _read(folder, classes)
    except OSError as error:
        raise PipelineError(
            f"Expected to read {error.filename!r}. Cannot read it: {error.strerror}. Fix or allow that, or move it "
            "elsewhere."
        ) from error


def _read(folder: str, classes: Sequence[str] | None) -> Labelled:
    entries = _entries(folder)
    folders = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False) or os.path.isdir(entry)]
    others = [entry for entry in entries if entry.name not in folders]
    if not folders and classes is None:
        flat = [entry for entry in others if _leads_nowhere(entry) or _is_image_file(entry)]
        if flat:
            return Labelled([entry.path for entry in flat], np.array([entry.name for entry in flat], object))
    if not folders:
        raise PipelineError(
            f"Expected one subfolder per class in {folder!r}. It holds none. Move the files into one, or pass paths: "
            "lines(paths) for text, files(paths, labels) for others."
        )
    names = folders if classes is None else expect_classes(classes)
    for name in folders:
        if name not in names:
            raise PipelineError(
                f"Expected only the classes {names} in {folder!r}. Found the folder {name!r}. Add it to `classes`, or "
                "remove the folder."
            )
    _refuse_strays(others, folder)
    found = {name: _files_below(os.path.join(folder, name)) for name in names if name in folders}
    for name, paths in found.items():
        if not paths:
            raise PipelineError(
                f"Expected files of every class. The class folder {os.path.join(folder, name)!r} holds no files. "
                "Remove or fill it."
            )
    if classes is None:
        _refuse_splits(folder, found)
    labels = [label for label, name in enumerate(names) for _ in found.get(name, [])]
    return Labelled([path for paths in found.values() for path in paths], np.array(labels, np.int32), tuple(names))


def _entries(folder: str) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda entry: entry.name)


def _is_image_file(entry: os.DirEntry[str]) -> bool:
    return os.path.isfile(entry) and is_image(entry.path)


def _leads_nowhere(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a link to what is not there."""
    return entry.is_symlink() and not os.path.exists(entry.path)


def _files_below(folder: str, above: tuple[str, ...] = ()) -> list[str]:
    real = os.path.realpath(folder)
    if real in above:
        raise PipelineError(
            f"Expected folders without cycles. The link {folder!r} leads back to {real!r}, which contains it. "
            "Remove the link."
        )
    found = []
    for entry in _entries(folder):
        if _leads_nowhere(entry) or entry.is_file():  # the first is a bad file
            found.append(entry.path)
        elif entry.is_dir():
            found += _files_below(entry.path, (*above, real))
        else:  # unopened, since opening a pipe can block
            raise PipelineError(
                f"Expected files in the class folders. {entry.path!r} is a pipe, a socket or a device. Move it "
                "elsewhere."
            )
    return sorted(found)


def _refuse_splits(folder: str, found: dict[str, list[str]]) -> None:
    """Refuses a folder of splits such as train and val, each with the classes below it."""
    direct = any(os.path.dirname(path) == os.path.join(folder, name) for name in found for path in found[name])
    if not direct and _SPLITS.issuperset(map(str.lower, found)):
        raise PipelineError(
            f"Expected one subfolder per class in {folder!r}. Found the splits {list(found)}, which hold folders only. "
            f"Pass one of them, such as {os.path.join(folder, min(found))!r}; if they are classes, name them in "
            "`classes`."
        )


def _refuse_strays(entries: Sequence[os.DirEntry[str]], folder: str) -> None:
    """Refuses images beside the class folders, and links to classes that are gone: they would silently be left out."""
    for entry in entries:
        if _leads_nowhere(entry):
            raise PipelineError(
                f"Expected class folders in {folder!r}. Found the link {entry.name!r} to {os.readlink(entry.path)!r}, "
                "which is not there. Bring it back, or remove the link."
            )
        if _is_image_file(entry):
            raise PipelineError(
                f"Expected images in class folders. The image {entry.path!r} is in no class folder. Move it into one, "
                f"or out of {folder!r}."
            )
