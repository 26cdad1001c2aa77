"""`fingerprint(value, name=...)`: names a cache on disk after the data, functions and options it was made from.

It walks to everything a value consists of, and hashes from the leaves up.

Functions call each other and classes name themselves, so values form a graph with cycles, not a tree.
"""

import io
import logging
import mmap
import random
import socket
import threading
import types
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.pipelines.cache.fingerprint.code import (
    describe_callable,
    describe_class,
    describe_code,
    describe_function,
    describe_object,
)
from tfopt.pipelines.cache.fingerprint.modules import describe_module
from tfopt.pipelines.cache.fingerprint.values import Description, Part, RefusedError, describe_value, digest, leaf

_REFUSED: dict[type | tuple[type, ...], str] = {
    tf.Variable: "a tf.Variable, whose value may change",
    tf.data.Dataset: "a tf.data.Dataset, whose elements cannot be read off it",
    tf.random.Generator: "a tf.random.Generator, whose next draw depends on those before",
    (np.random.Generator, np.random.BitGenerator, np.random.RandomState): (
        "a generator of NumPy, whose next draw depends on those before"
    ),
    random.Random: "a random.Random, whose next draw depends on those before",
    io.IOBase: "an open file, which stands for something outside the program",
    socket.socket: "a socket, which stands for something outside the program",
    mmap.mmap: "a memory map, which stands for something outside the program",
    (type(threading.Lock()), type(threading.RLock())): "a lock, which belongs to this process",
    threading.Thread: "a thread, which belongs to this process",
    Iterator: "an iterator, which yields something else each time",
}
# By (start of the module, class), so that nothing is imported that the user has not imported.
_REFUSED_BY_NAME = {
    ("keras.", "Layer"): "a Keras layer, whose weights may change",
    ("keras.", "Variable"): "a Keras variable, whose value may change",
    ("keras.", "SeedGenerator"): "a Keras seed generator, whose next draw depends on those before",
    ("keras.", "Metric"): "a Keras metric, whose value may change",
    ("keras.", "Optimizer"): "a Keras optimizer, whose value may change",
    ("tensorflow.", "LookupInterface"): "a lookup table, whose entries cannot be read off it",
}


def fingerprint(value: Any, *, name: str) -> str:
    """Returns a text that is the same in every process for the same functions and data, and different for others.

    Functions are read, never called: their code, constants, defaults, closures, and the globals they name, including
    the user's own functions and classes in turn. Comments, docstrings, line numbers and the file do not count. What
    comes from an installed package counts by its name and the package's version and files. The order of a dict's items
    counts, that of a set's does not. Another version of Python may give another text. docs/pipelines.md says what a
    fingerprint cannot see.

    Args:
        value: Plain values, arrays, eager tensors, functions, classes and objects of them, nested in any way.
        name: What messages call the value, such as "transform".

    Returns:
        A SHA-256 as 64 hexadecimal digits.

    Raises:
        ValueError: If a part has state that cannot be read or may change: a variable, a layer, a table, an open file,
            a writable memory map, an lru_cache with results, an iterator, a lock, a random number generator, an object
            of compiled code.

    Example:
        >>> scale = 2.0
        >>> fingerprint(lambda x: x * scale, name="transform") == fingerprint(lambda x: x * 2.0, name="transform")
        False
    """
    return _resolve(_walk(value, name)).hex()


@dataclass(slots=True)
class _Node:
    """A value the walk has reached; its parts are digests of leaves and numbers of other nodes."""

    value: Any  # also keeps it alive: nodes are found by id
    step: str
    parent: "_Node | None"
    described: Description = field(init=False)
    parts: list[bytes | int] = field(init=False)

    def path(self) -> str:
        """Returns how the value is reached, such as "transform → global `K`"."""
        steps: list[str] = []
        node: _Node | None = self
        while node is not None:
            steps.append(node.step)
            node = node.parent
        return " → ".join(step for step in reversed(steps) if step)


def _walk(value: Any, name: str) -> list[_Node]:
    """Returns everything a value consists of, the value itself first and each object once."""
    nodes: list[_Node] = []
    numbers: dict[int, int] = {}

    def reach(step: str, part: Any, parent: _Node | None) -> bytes | int:
        known = leaf(part)
        if known is not None:
            return known
        if id(part) not in numbers:
            numbers[id(part)] = len(nodes)
            nodes.append(_Node(part, step, parent))
        return numbers[id(part)]

    reach(name, Description("value", parts=[("", value)]), None)
    for node in nodes:  # which grows meanwhile
        node.described, parts = _describe_node(node, name)
        node.parts = [reach(step, part, node) for step, part in parts]
    return nodes


def _describe_node(node: _Node, name: str) -> tuple[Description, list[Part]]:
    try:
        described = node.value if type(node.value) is Description else _describe(node.value)
        return described, list(described.parts)
    except RefusedError as refused:
        raise ValueError(
            f"Expected {name!r} to consist of code and data that can be read, so that its fingerprint is unique. "
            f"Found {node.path()}: {refused}. Pass cache_key='…', a text that you change whenever the result would "
            "change."
        ) from refused


def _describe(value: Any) -> Description:
    kind = type(value)
    if kind is types.FunctionType:
        return describe_function(value)
    if kind is types.CodeType:
        return describe_code(value)
    if issubclass(kind, type):
        return describe_class(value)
    if issubclass(kind, types.ModuleType):
        return describe_module(value)
    _refuse_unreadable(kind)
    if issubclass(kind, logging.Logger):
        return Description("logger", value.name)  # it computes nothing, and holds locks
    return describe_value(value) or describe_callable(value) or describe_object(value)


def _refuse_unreadable(kind: type) -> None:
    for base in kind.__mro__:
        for (module, name), found in _REFUSED_BY_NAME.items():
            if base.__name__ == name and base.__module__.startswith(module):
                raise RefusedError(found)
    for refused, found in _REFUSED.items():
        if issubclass(kind, refused):
            raise RefusedError(found)


def _resolve(nodes: list[_Node]) -> bytes:
    """Returns the digest of the first node."""
    digests: dict[int, bytes] = {}
    order = TopologicalSorter(
        {number: [part for part in node.parts if isinstance(part, int)] for number, node in enumerate(nodes)}
    )
    with suppress(CycleError):  # it then gives the nodes that lead into no cycle
        order.prepare()
    while ready := order.get_ready():
        digests.update((number, _digest(nodes[number], digests)) for number in ready)
        order.done(*ready)
    return digests[0] if 0 in digests else _resolve_cycles(nodes, digests)


def _resolve_cycles(nodes: list[_Node], digests: dict[int, bytes]) -> bytes:
    """Returns the digest of the first node if it leads into a cycle.

    Each round rehashes every remaining node from its parts' previous hashes, which tells apart what differs one step
    further away. Once a round tells no more nodes apart than the one before, no later round will; the hashes of that
    round together then stand for the whole graph.
    """
    rest = [number for number in range(len(nodes)) if number not in digests]
    last = dict.fromkeys(rest, b"")
    while True:
        known = {**digests, **last}
        current = {number: _digest(nodes[number], known) for number in rest}
        if len(set(current.values())) == len(set(last.values())):
            return digest("cycles", "", [current[0], *sorted(set(current.values()))])
        last = current


def _digest(node: _Node, digests: dict[int, bytes]) -> bytes:
    parts = [digests[part] if isinstance(part, int) else part for part in node.parts]
    described = node.described
    return digest(described.kind, described.text, parts if described.ordered else sorted(parts))
