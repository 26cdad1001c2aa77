"""What the processes of one training do together: all must call it, at the same point."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt import errors
from tfopt.errors import ClusterError
from tfopt.pipelines.sources.parts import worker_place

_MOST_CHARACTERS = 2000


def total(strategy: Any, value: Any) -> np.ndarray:
    """Returns the sum of what each process passes, arrays of one shape."""
    value = np.asarray(value)
    if worker_place(strategy)[1] == 1:
        return value
    given = iter([value])  # this process's other replicas add nothing
    parts = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(next(given, np.zeros_like(value)))
    )
    return strategy.reduce(tf.distribute.ReduceOp.SUM, parts, axis=None).numpy()


def exchange(strategy: Any, value: Any) -> list[Any]:
    """Returns what each process passes, in their order. It must be JSON."""
    index, count = worker_place(strategy)
    data = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = np.zeros(count, np.int64)
    sizes[index] = data.size
    sizes = total(strategy, sizes)
    rows = np.zeros((count, int(np.max(sizes))), np.int64)
    rows[index, : data.size] = data
    return [json.loads(bytes(row[:size].tolist())) for row, size in zip(total(strategy, rows), sizes, strict=True)]


@contextmanager
def all_or_none(strategy: Any) -> Iterator[None]:
    """Makes an error that one process raises within the block one of all: none goes on and waits for it.

    All must get to the end of the block, so nothing in it may wait for the others.

    Raises:
        tfopt.errors.TfoptError: In the other processes, of the same kind if it is one of tfopt's; else ClusterError.
    """
    own: BaseException | None = None
    try:
        yield
    except BaseException as error:  # noqa: BLE001  raised again below; Ctrl-C in one process, too
        own = error
    said = exchange(strategy, None if own is None else [type(own).__name__, str(own)[:_MOST_CHARACTERS]])
    if own is not None:
        raise own
    for index, fault in enumerate(said):
        if fault is not None:
            kind = getattr(errors, fault[0], ClusterError)
            raise (kind if issubclass(kind, errors.TfoptError) else ClusterError)(
                f"Expected all workers to go on together. Found in worker {index}: {fault[0]}: {fault[1]}"
            )
