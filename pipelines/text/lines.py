"""Lines of text files as a source."""

import os
from collections.abc import Sequence
from dataclasses import replace

import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.pipelines.shared.paths import opened
from tfopt.pipelines.sources.rows import arrays
from tfopt.pipelines.sources.source import Source, find_paths

_MARK = b"\xef\xbb\xbf"  # that some editors put before UTF-8


def lines(paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> Source:
    """Returns the lines of text files as a source of examples, each a scalar string tensor.

    The files are read at once, into memory. `tokens(lines(paths), tokenize=...)` makes token ids of them.

    Args:
        paths: A path, a glob or a list of them, also remote ones that TensorFlow can open. What a glob finds is sorted.

    Returns:
        The lines, empty ones included, in the order of the files, without their ends ("\\n" or "\\r\\n").

    Raises:
        TypeError: If a path is neither a string nor a `pathlib.Path`.
        PipelineError: If nothing matches, a file cannot be read or is not UTF-8, or there is no line.

    Example:
        >>> source = lines("reviews-*.txt")  # doctest: +SKIP
        >>> source.count  # doctest: +SKIP
        25000
    """
    files = find_paths("text files", paths)
    found = [line for path in files for line in _lines_in(path)]
    if not found:
        raise PipelineError(f"Expected at least one line. Found none in {', '.join(files)}. Check what fills it.")
    return replace(arrays(tf.constant(found)), name=f"lines in {len(files):,} file{'s' * (len(files) > 1)}")


def _lines_in(path: str) -> list[bytes]:
    try:
        with opened(path) as file:
            text = file.read().removeprefix(_MARK)
    except (OSError, tf.errors.OpError) as error:
        raise PipelineError(
            f"Expected a text file at {path!r}. It cannot be read: {error}. Check the path; for a folder pass a glob."
        ) from error
    try:
        text.decode()
    except UnicodeDecodeError as error:
        number = text.count(b"\n", 0, error.start) + 1
        raise PipelineError(
            f"Expected text in UTF-8. Line {number:,} of {path!r} has other bytes: {error.reason}. Convert the file."
        ) from error
    return [line.removesuffix(b"\r") for line in text.removesuffix(b"\n").split(b"\n")] if text else []
