"""Says what cannot be fingerprinted, and why: what may change, or holds something outside the program."""

import io
import mmap
import random
import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

_CHANGES = "whose value may change"
_MOVES = "which yields something else each time"
_DRAWS = "whose next draw depends on those before"
_OPEN = "which stands for something outside the program"
_LOCKS = "which belongs to this process"

_BY_CLASS: list[tuple[type | tuple[type, ...], str, str]] = [
    (tf.Variable, "a tf.Variable", _CHANGES),
    (tf.data.Dataset, "a tf.data.Dataset", "whose elements cannot be read off it"),
    (tf.random.Generator, "a tf.random.Generator", _DRAWS),
    ((np.random.Generator, np.random.BitGenerator, np.random.RandomState), "a generator of NumPy", _DRAWS),
    (random.Random, "a random.Random", _DRAWS),
    (io.IOBase, "an open file", _OPEN),
    (socket.socket, "a socket", _OPEN),
    (mmap.mmap, "a memory map", _OPEN),
    ((type(threading.Lock()), type(threading.RLock())), "a lock", _LOCKS),
    (threading.Thread, "a thread", _LOCKS),
    (Iterator, "an iterator", _MOVES),
]
# By name, so that nothing is imported that the value's maker did not: (start of the module, class).
_BY_NAME = {
    ("keras.", "Layer"): ("a Keras layer", "whose weights may change"),
    ("keras.", "Variable"): ("a Keras variable", _CHANGES),
    ("keras.", "SeedGenerator"): ("a Keras seed generator", _DRAWS),
    ("keras.", "Metric"): ("a Keras metric", _CHANGES),
    ("keras.", "Optimizer"): ("a Keras optimizer", _CHANGES),
    ("tensorflow.", "LookupInterface"): ("a lookup table", "whose entries cannot be read off it"),
}


def reason_to_refuse(value: Any) -> str | None:
    """Returns what a value is and why it cannot be fingerprinted, None where this may be possible.

    Example:
        >>> reason_to_refuse(iter([1]))
        'an iterator, which yields something else each time'
    """
    kind = type(value)
    for base in kind.__mro__:
        for (module, name), (what, why) in _BY_NAME.items():
            if base.__name__ == name and base.__module__.startswith(module):
                return f"{what}, {why}"
    found = (f"{what}, {why}" for refused, what, why in _BY_CLASS if issubclass(kind, refused))
    return next(found, None)
