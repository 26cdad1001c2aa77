"""Folders with a subfolder of images per class, and folders of images alone."""

import os
from collections.abc import Sequence

from tfopt.errors import PipelineError
from tfopt.pipelines.by_file.labels import expect_classes
from tfopt.pipelines.sources.image_files import is_image

_SPLITS = frozenset({"train", "training", "val", "valid", "validation", "test"})


def list_images(folder: str, classes: Sequence[str] | None) -> tuple[list[str], list[int], list[str]]:
    """Returns the paths, sorted within each class, their labels, and the class names."""
    if not os.path.isdir(folder):
        raise PipelineError(
            f"Expected a folder of images with one subfolder per class. There is no folder {folder!r}. Check the path."
        )
    entries = _entries(folder)
    folders = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False) or os.path.isdir(entry))
    if not folders:
        raise PipelineError(
            f"Expected one subfolder per class in {folder!r}. It holds none. Move the images into one; for text pass "
            "lines(paths), for other files files(paths, labels)."
        )
    names = folders if classes is None else _checked_classes(classes, folder, folders)
    _refuse_strays([entry for entry in entries if entry.name not in folders], folder)
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


def flat_images(folder: str) -> list[str]:
    """Returns the images of a folder that holds no folders, sorted."""
    entries = _entries(folder) if os.path.isdir(folder) else []
    if any(map(os.path.isdir, entries)):
        return []
    return sorted(entry.path for entry in entries if _leads_nowhere(entry) or _is_image_file(entry))


def _is_image_file(entry: os.DirEntry[str]) -> bool:
    return os.path.isfile(entry) and is_image(entry.path)


def _leads_nowhere(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a link to what is not there."""
    return entry.is_symlink() and not os.path.exists(entry.path)


def _checked_classes(classes: Sequence[str], folder: str, folders: list[str]) -> list[str]:
    names = expect_classes(classes)
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
    if _leads_nowhere(entry):
        return False  # a bad file
    try:
        if entry.is_dir():
            return True
        if entry.is_file():
            return False
        os.stat(entry.path)  # raises what is wrong with it
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


def _refuse_strays(entries: Sequence[os.DirEntry[str]], folder: str) -> None:
    """Refuses images beside the class folders, and links to classes that are gone: they would silently be left out."""
    for entry in sorted(entries, key=lambda entry: entry.path):
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


def _unreadable(path: str, error: OSError) -> PipelineError:
    return PipelineError(
        f"Expected to read {path!r}. Cannot read it: {error.strerror}. Fix or allow that, or move it elsewhere."
    )
