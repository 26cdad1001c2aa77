"""`Source`: single examples and how to read them."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt import checks
from tfopt.errors import PipelineError, UnsupportedError
from tfopt.pipelines.shared.epochs import Epoch
from tfopt.pipelines.shared.nondeterminism import HELD
from tfopt.pipelines.shared.paths import (
    absolute,
    as_path,
    expect_order,
    expect_reachable,
    expect_utf8,
    file_stamps,
)
from tfopt.pipelines.shared.seeding import shuffle

_QUICKLY_COPIED = 16 * 2**20  # bytes
_TEXT_BYTES = 128  # of a text, such as a path
_OF_EXAMPLES = ("decode", "decode_batch", "encoded", "shuffled", "pools", "part", "packed", "checked")  # fields


@dataclass(frozen=True, slots=True)
class Pools:
    """How a source reads its elements in pools, each of which it shuffles as a whole."""

    size: int  # elements of a pool, about
    # Given a dataset of random numbers, each with how many elements to leave out (int64 scalars), returns a dataset of
    # batches of any length: for each number all other raw elements, in the random order that follows from it.
    read: Callable[[Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Single examples and how to read them; make one to read data of your own kind.

    Raises:
        TypeError: If a field is not a function, or `count` not an integer.
        ValueError: If `count` is negative, or a source of whole batches has fields for single examples.

    Example:
        >>> import tensorflow as tf
        >>> from tfopt.pipelines import Source, build_pipeline
        >>> squares = Source(name="squares", dataset=lambda: tf.data.Dataset.range(8), decode=lambda i: (i, i * i))
        >>> len(build_pipeline(squares, batch_size=4))
        2
    """

    name: str
    """Shown in the plan."""

    dataset: Callable[[], Any]
    """Returns a new `tf.data.Dataset` of raw elements in their own order; these may be keys (paths, indices, serialised
    bytes) that `decode` turns into examples."""

    count: int | None = None
    """Number of elements. Default: the dataset's cardinality, if known."""

    decode: Callable[..., Any] | None = None
    """Turns a raw element into an example: tensors in tuples and dicts. Called in parallel, as `Dataset.map` calls its
    function; must be deterministic. Default: raw elements are examples."""

    decode_batch: Callable[..., Any] | None = None
    """Optional, for speed: turns a batch of raw elements into a batch of the examples that `decode` returns, which the
    planner compares on its sample. Default: `decode` is called for each."""

    origin: Callable[..., Any] | None = None
    """Returns a scalar string tensor that names a raw element in errors, such as its path; called as `decode` is.
    Default: elements are numbered."""

    sample: Callable[[int], Any] | None = None
    """Returns a dataset of at most that many raw elements, spread over the data, for the planner to look at. Default:
    the first ones."""

    shuffled: Callable[[Any], Any] | None = None
    """Given a seed or None, returns the same raw elements in a coarse random order, read side by side (as files are),
    for pipelines that shuffle. With a seed every iteration has the same order. Default: `dataset`."""

    keyed: bool = False
    """Whether `shuffled` also takes a tensor as seed: int64, shape (2,). Unless a cache keeps one order, it then
    differs from epoch to epoch under a seed too, and is found again without one. Default: only integers."""

    at: Callable[[Any], Any] | None = None
    """Given a dataset of positions (int64 scalars below `count`), returns one of the raw elements there, in that order,
    for pipelines that shuffle: they draw a permutation of all positions, and begin in its middle after an interruption,
    so that the dataset may end before its length. Default: a buffer mixes `shuffled`."""

    pools: Pools | None = None
    """Optional, for speed, where elements are cheap to read many at a time: pipelines that shuffle take pools in place
    of `shuffled` and a buffer, and no cache unless one is asked for."""

    encoded: Callable[..., Any] | None = None
    """If `decode` decodes images: turns a raw element into a tuple of the image's encoded bytes (scalar string tensor)
    and the rest of the example, so that a crop decodes only its window."""

    only_jpeg: bool = False
    """Whether all encoded images are JPEGs; if not, each crop looks at the format."""

    fingerprint: Callable[[], Any] | None = None
    """Returns what changes whenever raw elements, or files that `decode` reads, may have changed, such as paths with
    sizes and times: numbers, strings and arrays in dicts and lists. A cache on disk needs it, or a `cache_key`; changes
    of `decode` itself it finds."""

    class_names: tuple[str, ...] | None = None
    """Names of the classes, in the order of their labels. Default: unknown."""

    resident: bool = False
    """Whether the examples are in memory or in mapped files, so that a cache without a `transform` saves nothing."""

    part: Callable[[int, int], "Source"] | None = None
    """Given i and n, returns the elements i, i+n, … as a source; files may be divided in place of elements. Needed
    where several processes train on a tf.data service. Without a service, it lets each process read its part alone."""

    files: tuple[Any, ...] | None = None
    """If each element is an image in a file of its own: their paths, or tuples of several, for `verify_images`."""

    checked: Callable[[str], "Source"] | None = None
    """Given `on_bad_file`, looks at the files when a pipeline is planned: returns the source without those that do not
    decode ("skip"), or raises an error that names one ("raise")."""

    packed: Callable[[int, Any], "Source"] | None = None
    """If elements are documents of tokens: given a length and the numbers of some, or a slice, returns these packed
    into rows of that length, for `pack`."""

    batched: bool = False
    """Whether elements are whole batches, which the pipeline yields as they are."""

    changes: str = ""
    """What may change the elements, or their order, the next time they are read. A position in them is then refused,
    and so are `split` and several processes. Default: nothing."""

    note: str = ""
    """What the plan says besides, such as what of the data is left out or not used as it is meant."""

    @property
    def is_at_hand(self) -> bool:
        """Whether raw elements are in memory, or keys by which something is read later."""
        return self.resident or self.at is not None

    def __post_init__(self) -> None:
        readers = ("dataset", "decode", "decode_batch", "origin", "sample", "shuffled", "at", "encoded")
        for field in (*readers, "fingerprint", "part", "checked", "packed"):
            value = getattr(self, field)
            if not callable(value) and (value is not None or field == "dataset"):
                raise TypeError(
                    f"Expected a function for `{field}` of a Source. Received: {value!r}. Pass a function, such as "
                    "`lambda: dataset` for `dataset`."
                )
        if self.batched and (found := [field for field in _OF_EXAMPLES if getattr(self, field)]):
            raise ValueError(
                f"Expected a source of whole batches (batched=True) without {', '.join(_OF_EXAMPLES)}. Received: "
                f"{', '.join(found)}. Do that in its `dataset`."
            )
        if self.count is not None:
            count = checks.integer("count", self.count, "Pass the number of elements.", least=0)
            object.__setattr__(self, "count", count)


def named_leaves(data: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yields each leaf of nested tuples and dicts, in the order of `tf.nest`, with an expression for it in errors."""
    if isinstance(data, dict):
        try:
            keys = sorted(data)
        except TypeError as error:
            raise TypeError(
                f"Expected keys of one type, since TensorFlow sorts them. Received at {name}: {list(data)}. Pass "
                "strings."
            ) from error
        for key in keys:
            yield from named_leaves(data[key], f"{name}[{key!r}]")
    elif isinstance(data, tuple):
        for index, value in enumerate(data):
            yield from named_leaves(value, f"{name}[{index}]")
    else:
        yield name, data


def common_length(lengths: dict[str, int], where: str = "") -> int:
    """Returns the one length in `lengths`, which are by name; refuses differing ones, and those without examples."""
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} has {length:,}" for name, length in lengths.items())
        raise PipelineError(f"Expected one common length{where}. Found: {listed}. Pass as many labels as examples.")
    if not any(lengths.values()):
        found = ", ".join(lengths) or "no array"
        raise PipelineError(f"Expected at least one example{where}. Found none in {found}. Check what fills it.")
    return next(iter(lengths.values()))


def is_numeric(dtype: np.dtype[Any]) -> bool:
    """Whether a type is one of numbers or booleans that TensorFlow has too."""
    return dtype.kind in "biufc" and dtype.itemsize <= (16 if dtype.kind == "c" else 8)


def find_paths(what: str, paths: Any) -> list[str]:
    """Returns the files that a path, a glob or a list of them stands for; `what` names them in errors."""
    expect_order("paths", paths)
    files: list[str] = []
    for given in [paths] if isinstance(paths, str | os.PathLike) else paths:
        path = expect_utf8(expect_reachable(as_path(f"the path of {what}", given), by_tensorflow=True))
        found = [path] if tf.io.gfile.exists(path) else sorted(tf.io.gfile.glob(path))
        if not found:
            raise PipelineError(f"Expected {what}. Nothing matches {path!r}. Check the path.")
        files += map(absolute, found)
    if not files:
        raise PipelineError(f"Expected {what}. Received an empty list. Check what fills it.")
    return files


def expect_unchanged(stamps: Sequence[list[str | int]]) -> None:
    """Refuses files that changed since their source was made, when `file_stamps` gave these stamps."""
    for stamp in stamps:
        if file_stamps([str(stamp[0])]) != [stamp]:
            raise PipelineError(
                f"Expected {stamp[0]!r} as it was when the source was made. It has changed since. Make the source "
                "again."
            )


def expect_lasting(source: Source, where: str) -> None:
    """Refuses to divide a source whose elements, or their order, may change between reads.

    Raises:
        UnsupportedError: If `source.changes` is set.
    """
    if source.changes:
        raise UnsupportedError(
            f"Expected a source that is the same {where}. Found {source.changes}: some examples would be in both "
            "parts, and others in neither. What to do: leave order and draws to `shuffle` and `augment`, or divide the "
            "data where they are made. If they never change, wrap them in tf.data.Dataset.from_generator and pass that."
        )


def side_by_side(pieces: Any, read: Callable[..., Any], most: int, seed: Any, *, block: int = 1) -> Any:
    """Shuffles pieces of the data and interleaves what `read` gives of each, at most so many at once.

    `block` elements are taken of one piece in turn: threads that wake for each small one would cost more than reading.

    With a seed, the order is the same on every iteration; it may be a key, an int64 tensor of shape (2,).
    """
    with tf.init_scope():  # a graph has no numbers
        count = int(pieces.cardinality())
    key = Epoch.first(seed).lasting_key("files") if isinstance(seed, int) else seed
    order = pieces.shuffle(count) if key is None else shuffle(pieces, count, key)
    parallel = {"cycle_length": min(count, most), "block_length": block, "num_parallel_calls": tf.data.AUTOTUNE}
    return order.interleave(read, **parallel)


def held_on_host(tensors: Callable[[], Any]) -> Any:
    """Returns tensors for the function that is being traced, without the copy that capturing large ones costs."""
    with tf.init_scope(), tf.device("CPU:0"):
        given = tensors()
        leaves = tf.nest.flatten(given, expand_composites=True)
        sizes = [(leaf.dtype.size or _TEXT_BYTES) * leaf.shape.num_elements() for leaf in leaves]
        if sum(sizes) <= _QUICKLY_COPIED:
            return given
        # TensorFlow copies what a dataset's function captures, but not what lies in a dataset that it captures. To look
        # that up takes 0.05 ms a call.
        held = tf.data.Dataset.from_tensors(given)
    return held.get_single_element(name=HELD)
