"""Reads tf.data's own model of a running iterator: how long each of its nodes works, and on how many elements.

A node is an iterator inside the iterator. TensorFlow counts, for its autotuning, the elements that it gives and the
time that it works: wall time of its function's kernels or of its own code, without waiting for its input or for room.
"""

import statistics
import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

_INTERVAL_SECONDS = 0.01  # a reading takes some 0.15 ms
# Their inner datasets come and go; those of all others stay in their places.
_NESTING = ("FlatMap", "Interleave", "ParallelInterleave")
_KNOWN_RATIO = (3, 4)  # KNOWN_RATIO and ASYNC_KNOWN_RATIO in tensorflow/core/framework/model.proto

_BLOCKS = 9

Path = tuple[tuple[int, str], ...]
_Chunk = tuple[float, int]  # seconds of work between two readings, and elements


@dataclass(slots=True)
class Node:
    """What was seen of the nodes at one place of the pipeline, added up.

    Args:
        name: TensorFlow's name of the operation, such as "ParallelMapV2".
        elements: How many elements it gave.
        seconds: How long it worked: its usual time for one of them, for all. Where other programs take the processor
            away from it, only some of its elements take longer.
        ratio: How many elements of its input make one of its own; None where that depends on the data.
        parallelism: How many of its calls may run at once; None where it works in its consumer's thread.
        inputs: The nodes that it reads from, by place. Nested datasets of an interleave stand together in place 1.
    """

    name: str
    elements: int = 0
    seconds: float = 0.0
    ratio: float | None = None
    parallelism: float | None = None
    inputs: dict[tuple[int, str], "Node"] = field(default_factory=dict)

    @property
    def nests(self) -> bool:
        """Whether it reads from datasets that its function makes."""
        return self.name.startswith(_NESTING)

    def walk(self) -> Iterator["Node"]:
        """Yields it and all that it reads from."""
        yield self
        for node in self.inputs.values():
            yield from node.walk()


class NodeSampler:
    """Reads an iterator's model at short intervals, in a thread of its own, until its `with` block ends.

    Once is not enough: nodes of datasets that ended, inside an interleave or a repeat, are gone with their figures.

    Args:
        iterator: The iterator of a `tf.data.Dataset` whose autotuning is on.
    """

    def __init__(self, iterator: Any):
        self._iterator = iterator
        self._last: dict[tuple[Path, int], Any] = {}
        self._chunks: dict[Path, list[_Chunk]] = defaultdict(list)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="tfopt-profile")

    def __enter__(self) -> "NodeSampler":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._read()

    def tree(self) -> Node:
        """Returns the nodes seen, from the last one that elements pass to the sources."""
        root = Node("Root")
        for (path, _), seen in sorted(self._last.items(), key=lambda item: len(item[0][0])):
            node = root
            for place in path:
                node = node.inputs.setdefault(place, Node(place[1]))
            _add(node, seen)
            node.seconds = node.elements * _usual_seconds(self._chunks[path])
        return root

    def _run(self) -> None:
        while not self._ended.wait(_INTERVAL_SECONDS):
            self._read()

    def _read(self) -> None:
        model = tf.data.experimental.get_model_proto(self._iterator)
        for path, node in _places(model, model.nodes[model.output], ()):
            before = self._last.get((path, node.id))
            worked = node.processing_time - (before.processing_time if before else 0)
            given = node.num_elements - (before.num_elements if before else 0)
            self._chunks[path].append((worked / 1e9, given))
            self._last[path, node.id] = node


def _places(model: Any, node: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Yields each node with its place: from the last one on, which input it is, and its name."""
    yield path, node
    for index, number in enumerate(node.inputs):
        if number in model.nodes:
            inner = model.nodes[number]
            slot = min(index, 1) if node.name.startswith(_NESTING) else index
            yield from _places(model, inner, (*path, (slot, inner.name)))


def _add(node: Node, seen: Any) -> None:
    node.elements += seen.num_elements
    node.ratio = seen.ratio if seen.node_class in _KNOWN_RATIO else None
    for parameter in seen.parameters:
        if parameter.name == "parallelism":
            node.parallelism = max(1.0, parameter.max if parameter.tunable else parameter.value)


def _usual_seconds(chunks: list[_Chunk]) -> float:
    """Returns the seconds for an element: the median over some parts of the run, each of about as many elements."""
    total = sum(given for _, given in chunks)
    costs, seconds, elements = [], 0.0, 0
    for worked, given in chunks:
        seconds, elements = seconds + worked, elements + given
        if elements * _BLOCKS >= total > 0:
            costs.append(seconds / elements)
            seconds, elements = 0.0, 0
    if elements:
        costs.append(seconds / elements)
    return statistics.median(costs) if costs else 0.0
