"""`loader()`: whatever yields batches in Python as a source: PyDatasets, generator functions, PyTorch and Grain."""

import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.pipelines.loaders.conversion import arrays_of, common_spec, copied, expect_spec
from tfopt.pipelines.loaders.passes import (
    ENDLESS,
    changes_itself,
    close,
    is_grain,
    is_py_dataset,
    is_torch_loader,
    length_of,
    read_iterable,
    read_py_dataset,
)
from tfopt.pipelines.shared.elements import without_autograph
from tfopt.pipelines.shared.options import function_name
from tfopt.pipelines.sources.source import Source

_SAMPLED_BATCHES = 2
_SAMPLED_EXAMPLES = 32


def loader(data: Any, *, batched: bool = True) -> Source:
    """Returns a loader of another framework, or a Python generator function, as a source.

    Use it for data that `model.fit` takes without tfopt, or that only Python can make. Batches are read in a background
    thread, ahead of the training. The loader makes and orders them; `augment=per_batch(...)`, `prefetch` and `device`
    work as for other sources. What needs single examples, such as `cache` and `transform`, is refused.

    Args:
        data: A `keras.utils.PyDataset`, whose `workers`, `use_multiprocessing` and `max_queue_size` are honoured; a
            PyTorch `DataLoader`; Grain's `DataLoader`, `MapDataset` or `IterDataset`; a function without arguments that
            returns a new iterator each time, such as a generator function; or any other object that can be iterated
            repeatedly. The first few elements are read here, to learn their structure.
        batched: Whether elements are batches. False for single examples, which take all options that a
            `tf.data.Dataset` of examples takes. Default: True, as in `model.fit`.

    Returns:
        The source. It has the loader's `len`, if there is one.

    Raises:
        TypeError: If `data` can be read only once, as a generator can, or not at all.
        ValueError: If `batched` is False for a PyDataset.
        PipelineError: If it yields nothing, or elements that are not batches of arrays or tensors.

    Example:
        >>> import numpy as np
        >>> from tfopt.pipelines import build_pipeline
        >>> def batches():
        ...     for size in (4, 4, 2):
        ...         yield np.zeros((size, 3)), np.zeros(size)
        >>> [len(x) for x, y in build_pipeline(loader(batches))]
        [4, 4, 2]
    """
    if is_py_dataset(data):
        if not batched:
            raise ValueError(
                f"Expected batches of a PyDataset. Received batched=False for {type(data).__name__}. Leave it out."
            )
        return _of_py_dataset(data)
    if isinstance(data, Iterator):
        raise TypeError(
            f"Expected a loader that can be read in each epoch. Received: {type(data).__name__}, which can be read "
            "only once. Pass the function that makes it, without calling it: loader(batches) in place of "
            "loader(batches())."
        )
    arrays = isinstance(data, str | bytes | Mapping | list | tuple | np.ndarray | tf.Tensor | tf.data.Dataset | type)
    if arrays or not (callable(data) or isinstance(data, Iterable)):
        raise TypeError(
            "Expected a PyDataset, a PyTorch or Grain loader, a generator function or another object that yields "
            f"batches. Received: {type(data).__name__}. Pass arrays and datasets to build_pipeline as they are."
        )
    return _of_iterable(data, batched=batched)


def is_loader(given: Any) -> bool:
    """Whether `build_pipeline` treats an object as a loader; imports no framework."""
    is_function = inspect.isroutine(given) or isinstance(given, functools.partial)
    return is_function or is_py_dataset(given) or is_torch_loader(given) or is_grain(given)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Elements:
    """What a loader yields: a few of its elements, and how all of them become tensors."""

    batched: bool
    spec: Any
    sampled: tuple[Any, ...]

    def convert(self, number: int, element: Any) -> Any:
        """Returns the arrays of an element; refuses one that differs from those that were sampled."""
        what = f"{'batch' if self.batched else 'example'} {number}"
        arrays = arrays_of(element, what, batched=self.batched)
        expect_spec(arrays, self.spec, what)
        return copied(arrays)

    def dataset(self, read: Callable[..., Iterator[Any]], *order: Any) -> Any:
        """Returns a dataset of the arrays that a function yields, each time it is called."""
        return tf.data.Dataset.from_generator(read, output_signature=self.spec, args=order or None)

    def few(self, limit: int) -> Any:
        """Returns a dataset of at most so many sampled elements."""
        return self.dataset(lambda: iter(self.sampled[:limit]))


def _sampled(elements: Iterable[Any], name: str, *, batched: bool) -> _Elements:
    """Returns what a few elements tell of all; reads all that it is given."""
    kind = "batch" if batched else "example"
    numbered = enumerate(elements)
    kept = [copied(arrays_of(element, f"{kind} {number}", batched=batched)) for number, element in numbered]
    if not kept:
        raise PipelineError(f"Expected at least one element of {name}. Found none. Check what it reads.")
    return _Elements(batched=batched, spec=common_spec(kept, batched=batched), sampled=tuple(kept))


def _of_py_dataset(data: Any) -> Source:
    name, steps = type(data).__name__, data.num_batches
    changes = changes_itself(data)
    first = range(_SAMPLED_BATCHES) if steps is None else sorted({0, steps - 1}) if steps else ()
    elements = _sampled((data[index] for index in first), name, batched=True)

    def endless() -> Any:
        dataset = elements.dataset(lambda: read_py_dataset(data, None, None, elements.convert))
        return dataset.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))

    @without_autograph
    def in_order(order: Any) -> Any:
        return elements.dataset(lambda order: read_py_dataset(data, steps, order, elements.convert), order)

    def at(positions: Any) -> Any:
        return positions.batch(max(1, steps or 0)).flat_map(in_order)

    reading = f"{data.workers} {'processes' if data.use_multiprocessing else 'threads'}"
    alone = data.workers < 1 or (data.workers == 1 and not data.use_multiprocessing)
    return Source(
        name=name,
        dataset=endless if steps is None else lambda: at(tf.data.Dataset.range(steps)),
        count=steps,
        sample=elements.few,
        at=None if steps is None else at,
        batched=True,
        changes="its on_epoch_begin or on_epoch_end, which may change its batches" if changes else "",
        note="read ahead by "
        + ("a thread" if alone else f"{reading}, up to {data.max_queue_size} batches, as its max_queue_size says"),
    )


def _of_iterable(data: Any, *, batched: bool) -> Source:
    is_function = callable(data) and not isinstance(data, Iterable)
    framework = "PyTorch " if is_torch_loader(data) else "Grain " if is_grain(data) else ""
    name = function_name(data) if is_function else framework + type(data).__name__
    length = None if is_function else length_of(data)
    count = None if length == ENDLESS else length
    first = _iterator(data, name, is_function=is_function)
    try:
        earlier: Any = weakref.ref(first)
    except TypeError:  # of some built-in ones
        earlier = None

    def open_again() -> Iterator[Any]:
        iterator = _iterator(data, name, is_function=is_function)
        if is_function and earlier is not None and iterator is earlier():
            raise TypeError(f"Expected a new iterator in each epoch. {name} gave the same one again. Make a new one.")
        return iterator

    limit = _SAMPLED_BATCHES if batched else _SAMPLED_EXAMPLES
    try:
        elements = _sampled(itertools.islice(first, limit), name, batched=batched)
    finally:
        close(first)
        del first  # PyTorch's worker processes end with it

    def dataset() -> Any:
        found = elements.dataset(lambda: read_iterable(open_again(), count, name, elements.convert))
        known = tf.data.INFINITE_CARDINALITY if length == ENDLESS else count
        return found if known is None else found.apply(tf.data.experimental.assert_cardinality(known))

    return Source(
        name=name,
        dataset=dataset,
        count=count,
        sample=elements.few,
        batched=batched,
        changes=f"{name}, which decides what it yields each time it is iterated",
        note="read ahead by a thread",
    )


def _iterator(data: Any, name: str, *, is_function: bool) -> Iterator[Any]:
    iterator = data() if is_function else iter(data)
    if isinstance(iterator, Iterator):
        return iterator
    if isinstance(iterator, Iterable) and not isinstance(iterator, tuple | dict | str):
        return iter(iterator)
    raise TypeError(
        f"Expected a function that returns an iterator. {name} returned {type(iterator).__name__}. Use `yield`, or "
        "return iter(...)."
    )
