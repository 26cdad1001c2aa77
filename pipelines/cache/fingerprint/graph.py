"""Fingerprints nested values: walks to everything that a value is made of, and hashes from the leaves up.

Functions call each other and classes name themselves, so that values form a graph with cycles, not a tree.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from tfopt.pipelines.cache.fingerprint.describe import describe
from tfopt.pipelines.cache.fingerprint.description import Description, Part, RefusedError, digest, leaf


def fingerprint(value: Any, *, name: str) -> str:
    """Returns a text that is the same for the same functions and data, in every process, and else another.

    Use it to name what is kept on disk after what it was made of. Functions are read, never called: their code,
    constants, defaults, closures, and the globals that they name, the user's own functions and classes among them in
    turn. Comments, docstrings, line numbers and the file do not count. What comes from an installed package counts by
    its name and the package's version and files. The order of a dict's items counts, that of a set's does not.
    Another version of Python may give another text.

    It cannot see what a function looks up while it runs: files that it opens, environment variables, the time, the
    state that packages keep (such as `keras.config.floatx()`), names in texts (`getattr`, `eval`, `importlib`).

    Args:
        value: Plain values, arrays, eager tensors, functions, classes and objects of them, nested at will.
        name: What to call the value in messages, such as "transform".

    Returns:
        A SHA-256 as 64 hexadecimal digits.

    Raises:
        ValueError: A part has a state that cannot be read or may change: a variable, a layer, a table, an open file,
            an iterator, a lock, a generator of random numbers, an object of compiled code.

    Example:
        >>> scale = 2.0
        >>> fingerprint(lambda x: x * scale, name="transform") == fingerprint(lambda x: x * 2.0, name="transform")
        False
    """
    return _resolve(_walk(value, name)).hex()


@dataclass(slots=True)
class _Node:
    """A value that was met; its parts are digests of leaves and numbers of other nodes."""

    value: Any  # also keeps it alive: nodes are found by id
    step: str
    parent: "_Node | None"
    kind: str = ""
    text: str = ""
    parts: list[bytes | int] = field(default_factory=list)
    ordered: bool = True

    def path(self) -> str:
        """Returns how the value is reached, such as "transform → global `K`"."""
        steps: list[str] = []
        node: _Node | None = self
        while node is not None:
            steps.append(node.step)
            node = node.parent
        return " → ".join(step for step in reversed(steps) if step)


def _walk(value: Any, name: str) -> list[_Node]:
    """Returns all that a value is made of, itself first; each object once."""
    nodes: list[_Node] = []
    numbers: dict[int, int] = {}
    waiting: deque[_Node] = deque()

    def meet(step: str, part: Any, parent: _Node | None) -> bytes | int:
        known = leaf(part)
        if known is not None:
            return known
        if id(part) not in numbers:
            numbers[id(part)] = len(nodes)
            nodes.append(_Node(part, step, parent))
            waiting.append(nodes[-1])
        return numbers[id(part)]

    meet(name, Description("value", parts=[("", value)]), None)
    while waiting:
        node = waiting.popleft()
        described, parts = _describe(node, name)
        node.kind, node.text, node.ordered = described.kind, described.text, described.ordered
        node.parts = [meet(step, part, node) for step, part in parts]
    return nodes


def _describe(node: _Node, name: str) -> tuple[Description, list[Part]]:
    try:
        described = node.value if type(node.value) is Description else describe(node.value)
        return described, list(described.parts)
    except RefusedError as refused:
        raise ValueError(
            f"Expected {name!r} to be made of code and of data that can be read, so that its fingerprint tells it from "
            f"every other. Found {node.path()}: {refused}. Pass cache_key='…', a text that you change whenever the "
            "result would change."
        ) from refused


def _resolve(nodes: list[_Node]) -> bytes:
    """Returns the digest of the first node."""
    digests: dict[int, bytes] = {}
    users: list[list[int]] = [[] for _ in nodes]
    missing = [sum(isinstance(part, int) for part in node.parts) for node in nodes]
    for number, node in enumerate(nodes):
        for part in node.parts:
            if isinstance(part, int):
                users[part].append(number)
    ready = [number for number, count in enumerate(missing) if not count]
    while ready:
        number = ready.pop()
        digests[number] = _digest(nodes[number], digests)
        for user in users[number]:
            missing[user] -= 1
            if not missing[user]:
                ready.append(user)
    return digests[0] if 0 in digests else _resolve_cycles(nodes, digests)


def _resolve_cycles(nodes: list[_Node], digests: dict[int, bytes]) -> bytes:
    """Returns the digest of the first node where it leads into a cycle.

    Each round hashes every node of the rest once more from its parts' last hashes, which tells apart what differs one
    step further away. Once a round tells no more nodes apart than the one before, no later one will; the hashes of
    that round together then stand for the whole graph.
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
    return digest(node.kind, node.text, parts if node.ordered else sorted(parts))
