"""What the planner knows of a source: how to read it, how much there is, and what to call an element."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tfopt import checks
from tfopt.errors import PipelineError


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Single examples, and how they are read.

    Make one for data of your own kind; the sources of tfopt.pipelines make theirs the same way.

    Args:
        name: What the plan calls it.
        dataset: Returns a new `tf.data.Dataset` of raw elements in their own order. Raw elements may be keys (paths,
            indices, serialised bytes) that `decode` turns into examples.
        count: How many elements there are. Default: the dataset's cardinality, where it is known.
        decode: Turns a raw element into an example: tensors in tuples and dicts. Called as `Dataset.map` calls its
            function, in parallel; must be deterministic. Default: raw elements are examples.
        origin: Returns a scalar string tensor that names a raw element, such as its path; called as `decode` is.
            Default: elements are named by number.
        sample: Returns a dataset of at most this many raw elements, spread over the data, for the planner to look at.
            Default: the first ones.
        shuffled: Returns a dataset of the same raw elements in a coarse random order, read side by side (as files
            are); used where the pipeline shuffles. Its argument is a seed or None. With a seed the order must be the
            same on every iteration. Default: `dataset`.
        encoded: Turns a raw element into a tuple of its image's encoded bytes (scalar string tensor) and the rest of
            the example, where `decode` decodes images; a crop is then decoded without the rest of the image.
        only_jpeg: Whether all encoded images are JPEGs; where they are not, each crop looks at the format.
        fingerprint: Returns what changes whenever the examples may have changed, such as paths with their sizes and
            times: numbers, texts, functions and arrays in dicts and lists. A cache on disk needs it, or a `cache_key`.
        class_names: What the numbers of the labels stand for, in their order. Default: unknown.
        resident: The examples lie in memory or in mapped files, so that a cache without a `transform` saves nothing.
            With `decode`, the raw elements are indices and `decode` also takes a whole batch of them.
        part: Returns the elements i, i+n, … of it as a source of their own; its arguments are i and n. Several
            processes that train on a tf.data service need it; files may be divided in place of their elements.

    Example:
        >>> import tensorflow as tf
        >>> from tfopt.pipelines import Source, build_pipeline
        >>> squares = Source(name="squares", dataset=lambda: tf.data.Dataset.range(8), decode=lambda i: (i, i * i))
        >>> len(build_pipeline(squares, batch_size=4))
        2
    """

    name: str
    dataset: Callable[[], Any]
    count: int | None = None
    decode: Callable[..., Any] | None = None
    origin: Callable[..., Any] | None = None
    sample: Callable[[int], Any] | None = None
    shuffled: Callable[[int | None], Any] | None = None
    encoded: Callable[..., Any] | None = None
    only_jpeg: bool = False
    fingerprint: Callable[[], Any] | None = None
    class_names: tuple[str, ...] | None = None
    resident: bool = False
    part: Callable[[int, int], "Source"] | None = None

    def __post_init__(self) -> None:
        for field in ("dataset", "decode", "origin", "sample", "shuffled", "encoded", "fingerprint", "part"):
            value = getattr(self, field)
            if not callable(value) and (value is not None or field == "dataset"):
                raise TypeError(
                    f"Expected a function for `{field}` of a Source. Received: {value!r}. Pass a function, such as "
                    "`lambda: dataset` for `dataset`."
                )
        if self.count is not None:
            count = checks.integer("count", self.count, "Pass the number of elements.", least=0)
            object.__setattr__(self, "count", count)


def expect_utf8(path: str) -> str:
    """Returns a path that TensorFlow can open.

    Raises:
        PipelineError: Its name is no UTF-8.
    """
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise PipelineError(f"Expected file names in UTF-8. Found {path!r}. Rename the file.") from error
    return path


def absolute(path: str) -> str:
    """Returns a local path so that it means the same after `os.chdir`; a remote one ("gs://…") as it is."""
    return path if "://" in path else os.path.abspath(path)
