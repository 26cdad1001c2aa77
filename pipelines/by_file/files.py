"""Files as a source of their bytes: texts, and formats that users decode themselves."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.pipelines.by_file.class_folders import in_class_folders
from tfopt.pipelines.by_file.file_source import FileKind, file_source
from tfopt.pipelines.by_file.labels import Labelled, expect_paths, labelled
from tfopt.pipelines.shared.elements import without_autograph
from tfopt.pipelines.shared.paths import as_path, expect_reachable, for_each_path
from tfopt.pipelines.shared.problems import Problem, head_of
from tfopt.pipelines.sources.source import Source, common_length


def files(paths: Any, labels: Any = None, *, classes: Sequence[str] | None = None) -> Source:
    """Returns files as a source of `(contents, label)`, or of `(contents, name)` without labels.

    Use it for a text in each file, and for formats that no other source decodes, such as sound: decode the contents in
    `transform`.

    Args:
        paths: A folder with a subfolder of files per class, as for `images`; what lies beside the subfolders is left
            out. Or a sequence of paths of local files.
        labels: One for each path, as `images` takes them: numbers, names of classes, or lists of these names. Default:
            none.
        classes: The class names in the order of their labels. Default: the subfolders, or the names among the labels,
            sorted.

    Returns:
        A source of `(contents, label)`: the bytes of a file as a scalar string, and its label: an int32 scalar for a
        folder or name, a float32 vector for a list of names, otherwise as given. Paths without labels: of `(contents,
        name)`. The files are checked when a pipeline is planned; `on_bad_file` says what becomes of those that are
        missing, empty or unreadable.

    Raises:
        TypeError: If an argument is of the wrong type, or labels are of several types.
        ValueError: If `classes` names one twice.
        PipelineError: If there are no paths, not as many labels, or a label that is not among `classes`; for a folder,
            as `images` raises it.

    Example:
        >>> from tfopt.pipelines import build_pipeline
        >>> def decoded(contents, label):
        ...     return tf.audio.decode_wav(contents, desired_channels=1, desired_samples=16000).audio, label
        >>> sounds = files(["yes.wav", "no.wav"], ["yes", "no"])
        >>> dataset = build_pipeline(sounds, transform=decoded, batch_size=2)  # doctest: +SKIP
        >>> reviews = files("reviews/train")  # doctest: +SKIP
    """
    if labels is None and isinstance(paths, str | os.PathLike):
        root = expect_reachable(as_path("the path of a folder, or paths", paths))
        return file_source(_FILES, f"files in {root}", in_class_folders(root, classes))
    if labels is not None:
        given = labelled("files()", paths, labels, classes)
    elif classes is not None:
        raise TypeError("files() expects `classes` only with labels. Received none. Pass `labels`, or leave both out.")
    else:
        known = expect_paths("files()", paths)
        common_length({"paths": len(known)})
        given = Labelled(known, np.array(list(map(os.path.basename, known)), object))
    return file_source(_FILES, f"{len(given.paths):,} files by their paths", given)


def _look(paths: Sequence[str], values: Any, *, decoding: bool) -> list[tuple[Problem | None, None]]:
    del values, decoding  # only the user can decode them
    heads = for_each_path(lambda path: head_of(path, 1), paths)
    return [(head if isinstance(head, Problem) else None, None) for head in heads]


@without_autograph
def _read(path: Any, value: Any) -> Any:
    contents = tf.io.read_file(path)
    # Files were looked at when the pipeline was planned, but may change later.
    check = tf.raw_ops.Assert(condition=tf.strings.length(contents) > 0, data=["An empty file:", path])
    with tf.control_dependencies([check]):
        return tf.identity(contents), value


_FILES = FileKind(
    look=_look,
    reading=lambda found: {"decode": _read},
    refusal="Expected files with contents. Found {count} that are missing, empty or unreadable:\n{listed}\nCorrect "
    "their paths, or pass on_bad_file='skip', which leaves such files out.",
    fault="are missing, empty or unreadable",
)
