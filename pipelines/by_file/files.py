"""Files as a source of their bytes, for formats that users decode themselves."""

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.pipelines.by_file.file_source import FileKind, Reading, file_source
from tfopt.pipelines.by_file.labels import Labelled, expect_paths, labelled
from tfopt.pipelines.shared.elements import without_autograph
from tfopt.pipelines.shared.paths import for_each_path
from tfopt.pipelines.shared.problems import Problem, listed
from tfopt.pipelines.sources.source import Source, common_length


def files(paths: Any, labels: Any = None, *, classes: Sequence[str] | None = None) -> Source:
    """Returns files as a source of `(contents, label)`, or of `(contents, name)` without labels.

    Use it for formats that no other source decodes, such as sound: decode the contents in `transform`.

    Args:
        paths: A sequence of paths of local files.
        labels: One for each, as `images` takes them: numbers, names of classes, or lists of these names. Default: none.
        classes: The class names in the order of their labels. Default: the names among the labels, sorted.

    Returns:
        A source of `(contents, label)`: the bytes of a file as a scalar string, and its label: an int32 scalar for a
        name, a float32 vector for a list of names, otherwise as given. Without labels, of `(contents, name)`. The
        files are checked when a pipeline is planned; `on_bad_file` says what becomes of those that are missing, empty
        or unreadable.

    Raises:
        TypeError: If an argument is of the wrong type, or labels are of several types.
        ValueError: If `classes` names one twice.
        PipelineError: If there are no paths, not as many labels, or a label that is not among `classes`.

    Example:
        >>> from tfopt.pipelines import build_pipeline
        >>> def decoded(contents, label):
        ...     return tf.audio.decode_wav(contents, desired_channels=1, desired_samples=16000).audio, label
        >>> sounds = files(["yes.wav", "no.wav"], ["yes", "no"])
        >>> dataset = build_pipeline(sounds, transform=decoded, batch_size=2)  # doctest: +SKIP
    """
    found = _named(paths, classes) if labels is None else labelled("files()", paths, labels, classes)
    return file_source(
        _FILES, f"{len(found.paths):,} files by their paths", found.paths, found.values, found.class_names, found.note
    )


def _named(paths: Any, classes: Sequence[str] | None) -> Labelled:
    """Returns paths with the names of their files."""
    if classes is not None:
        raise TypeError("files() expects `classes` only with labels. Received none. Pass `labels`, or leave both out.")
    known = expect_paths("files()", paths)
    common_length({"paths": len(known)})
    return Labelled(known, np.array(list(map(os.path.basename, known)), object), None)


@dataclass(frozen=True, slots=True)
class _File:
    problem: Problem | None


def _look(paths: Sequence[str], values: Any, *, decoding: bool) -> list[_File]:
    del values, decoding  # only the user can decode them
    return for_each_path(lambda path: _File(_problem(path)), paths)


def _problem(path: str) -> Problem | None:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # unopened: opening a pipe can block
            return Problem(path, "unreadable", "a folder, a pipe or a device")
        with open(path, "rb") as file:
            return None if file.read(1) else Problem(path, "empty", "an empty file")
    except OSError as error:
        return Problem(path, "unreadable", f"Cannot read it: {error.strerror}")


def _refusal(problems: Sequence[Problem]) -> PipelineError:
    return PipelineError(
        f"Expected files with contents. Found {len(problems):,} that are missing, empty or unreadable:\n"
        f"{listed(problems)}\nCorrect their paths, or pass on_bad_file='skip', which leaves such files out."
    )


@without_autograph
def _read(path: Any, value: Any) -> Any:
    contents = tf.io.read_file(path)
    # Files were looked at when the pipeline was planned, but may change later.
    check = tf.raw_ops.Assert(condition=tf.strings.length(contents) > 0, data=["An empty file:", path])
    with tf.control_dependencies([check]):
        return tf.identity(contents), value


_FILES = FileKind(
    look=_look, reading=lambda found: Reading(decode=_read), refusal=_refusal, fault="are missing, empty or unreadable"
)
