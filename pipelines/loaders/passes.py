"""How each kind of loader is read once from start to end; no framework is imported for it."""

import collections
import contextlib
import itertools
import multiprocessing
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

from tfopt.errors import PipelineError

Convert = Callable[[int, Any], Any]  # of the number of an element, from 0, and the element
_HOOKS = ("on_epoch_begin", "on_epoch_end")
ENDLESS = sys.maxsize
"""What `len` says of Grain's datasets that repeat for ever."""


def is_py_dataset(given: Any) -> bool:
    """Whether this is a `keras.utils.PyDataset`."""
    return _descends(given, "PyDataset", "keras")


def is_torch_loader(given: Any) -> bool:
    """Whether this is a PyTorch `DataLoader`."""
    return _descends(given, "DataLoader", "torch.utils.data")


def is_grain(given: Any) -> bool:
    """Whether this is Grain's `DataLoader`, `MapDataset` or `IterDataset`."""
    return any(_descends(given, name, "grain") for name in ("DataLoader", "MapDataset", "IterDataset"))


def length_of(data: Any) -> int | None:
    """Returns what `len` says; None if it says nothing, `sys.maxsize` for endless data."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):  # PyTorch's loaders of iterable data have a `__len__` that raises
        return None


def changes_itself(data: Any) -> bool:
    """Whether a PyDataset has a function of its own that is called between epochs."""
    return any(getattr(type(data), hook).__module__.split(".")[0] != "keras" for hook in _HOOKS)


def read_py_dataset(
    data: Any, steps: int | None, order: Sequence[int] | None, convert: Convert
) -> Generator[Any, None, None]:
    """Yields the batches of a PyDataset in this order, or without end if there is none, read by its workers.

    `on_epoch_end` is called before the last batch is yielded, so that nothing of the next epoch precedes it. `steps` is
    the length that the PyDataset had when it was planned, None for endless ones. `convert` gets each batch before
    `on_epoch_end` may change it.
    """
    if data.num_batches != steps:
        raise _wrong_length(type(data).__name__, steps or 0, f"{data.num_batches} now")
    indices: Iterable[int] = itertools.count() if order is None else order
    ended = False
    data.on_epoch_begin()
    try:
        with contextlib.closing(_batches(data, indices)) as batches:
            for number, batch in enumerate(batches):
                converted = convert(number, batch)
                if order is not None and number + 1 == len(order):
                    ended = True
                    batches.close()
                    data.on_epoch_end()
                yield converted
    except GeneratorExit:  # an epoch that is cut short has ended too
        if not ended:
            data.on_epoch_end()
        raise


def read_iterable(
    iterator: Iterator[Any], expected: int | None, name: str, convert: Convert
) -> Generator[Any, None, None]:
    """Yields what an iterator yields, and closes it; refuses a number of elements other than `len` said."""
    read = 0
    try:
        for element in iterator:
            read += 1
            if expected is not None and read > expected:
                raise _wrong_length(name, expected, f"more than {expected:,}")
            yield convert(read - 1, element)
    finally:
        close(iterator)
    if expected is not None and read < expected:
        raise _wrong_length(name, expected, f"{read:,}")


def close(iterator: Any) -> None:
    """Ends an iterator, if it has a way to."""
    ending = getattr(iterator, "close", None)
    if callable(ending):
        ending()


def _batches(data: Any, indices: Iterable[int]) -> Generator[Any, None, None]:
    """Yields batches in order; with workers, up to `max_queue_size` are computed at once or wait."""
    if data.workers < 1 or (data.workers == 1 and not data.use_multiprocessing):
        yield from (data[index] for index in map(int, indices))
        return
    waiting: collections.deque[Any] = collections.deque()
    executor: Executor
    if data.use_multiprocessing:  # started for each epoch, since `on_epoch_end` changes the data
        context = multiprocessing.get_context()
        executor = ProcessPoolExecutor(data.workers, context, initializer=_keep, initargs=(data,))
        batch_of = _kept_batch
    else:
        executor, batch_of = ThreadPoolExecutor(data.workers, "tfopt-loader"), data.__getitem__
    try:
        for index in map(int, indices):
            if len(waiting) >= max(1, data.max_queue_size):
                yield waiting.popleft().result()
            waiting.append(executor.submit(batch_of, index))
        while waiting:
            yield waiting.popleft().result()
    finally:
        executor.shutdown(cancel_futures=True)


_kept: list[Any] = []  # in a worker process: its PyDataset


def _keep(data: Any) -> None:
    _kept[:] = [data]


def _kept_batch(index: int) -> Any:
    return _kept[0][index]


def _descends(given: Any, name: str, package: str) -> bool:
    return any(
        base.__name__ == name and f"{base.__module__}.".startswith((f"{package}.", f"{package}_"))
        for base in type(given).__mro__
    )


def _wrong_length(name: str, expected: int, found: str) -> PipelineError:
    return PipelineError(
        f"Expected {expected:,} elements, as len() of {name} said. Found {found}. Correct its length: Keras takes the "
        "number of steps from it."
    )
