"""Runs a pipeline alone, and reads tf.data's own model of it: how long each node works, and on how many elements.

A node is an iterator inside the iterator. For its autotuning TensorFlow counts the elements that a node produces and
the time it works: wall time of its function's kernels or its own code, without waiting for input or for room.
"""

import copy
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from tfopt.errors import PipelineError

# The first batch mostly shows the start-up. To get more of them, a run may take this many times as long.
_FEWEST_BATCHES = 4
_LONGEST = 3
_FIRST_PASS_SHARE = 0.7  # of the time; a shorter first pass leaves enough for later ones
_INTERVAL_SECONDS = 0.01  # a reading takes some 0.15 ms
# The inner datasets of these come and go; those of all others stay.
_NESTING = ("FlatMap", "Interleave", "ParallelInterleave")
_KNOWN_RATIO = (3, 4)  # KNOWN_RATIO and ASYNC_KNOWN_RATIO in tensorflow/core/framework/model.proto
_NO_LIMIT_BYTES = 2**60
_BLOCKS = 9  # parts of a run, whose median cost counts

_Path = tuple[tuple[int, str], ...]
_Chunk = tuple[float, int]  # seconds of work between two readings, and elements


@dataclass(slots=True)
class Node:
    """All nodes seen at one place of the pipeline, added up."""

    name: str  # TensorFlow's, of the operation, such as "ParallelMapV2"
    elements: int = 0  # that it produced
    # Its work: the usual time per element, for all of them. When other programs take the processor away, only some
    # elements take longer.
    seconds: float = 0.0
    ratio: float | None = None  # input elements per element of its own; None if that depends on the data
    parallelism: float | None = None  # calls that may run at once; None if it works in its consumer's thread
    # The nodes it reads from, by place. Nested datasets of an interleave share place 1.
    inputs: dict[tuple[int, str], "Node"] = field(default_factory=dict)

    @property
    def nests(self) -> bool:
        """Whether it reads from datasets that its function makes."""
        return self.name.startswith(_NESTING)

    def walk(self) -> Iterator["Node"]:
        """Yields the node and everything it reads from."""
        yield self
        for node in self.inputs.values():
            yield from node.walk()


@dataclass(frozen=True, slots=True)
class Run:
    """What one iterator did."""

    nodes: Node  # the root: from the last node that elements pass to the sources
    batches: int
    examples: int
    seconds: float  # including the start-up
    examples_per_second: float  # from the first batch on, if there was another
    cpu_seconds: float  # of this process
    ended: bool  # whether the data ended
    later: bool  # whether it is a later pass over the data, not the first

    @property
    def batch_size(self) -> float:
        """Examples per batch, on average."""
        return self.examples / self.batches


def run_passes(dataset: Any, seconds: float) -> Run:
    """Runs a first pass over a dataset of batches; if time allows, measures later passes instead."""
    dataset = _with_model(dataset)
    first = _run(dataset, seconds, later=False)
    if first.batches == 0:
        raise PipelineError(
            "Expected a dataset of at least one batch. Found none: it is empty, or has fewer examples than a batch. "
            "Check the source and the batch size."
        )
    if first.examples == 0:
        raise PipelineError(
            f"Expected batches of examples. Found {first.batches:,} batches without any: the first dimension of their "
            "first tensor is 0. Check what the dataset's functions return."
        )
    if not first.ended or first.seconds > _FIRST_PASS_SHARE * seconds:
        return first
    return _run(endless(dataset), seconds - first.seconds, later=True)


def endless(dataset: Any) -> Any:
    """Repeats a dataset for ever, without a limit on the memory of batches ahead; those of one pass are the most.

    TensorFlow never gives back what an ended pass had prefetched: within the limit, it would warn at each further pass
    and stop tuning.
    """
    options = copy.deepcopy(dataset.options())
    options._set_mutable(True)
    options.autotune.ram_budget = _NO_LIMIT_BYTES
    while type(dataset).__name__ == "_OptionsDataset":  # TensorFlow remarks on each change of an option
        dataset = dataset._input_dataset
    return dataset.repeat().with_options(options)


def run_unfused(dataset: Any, seconds: float) -> Run:
    """Runs a pipeline with a node for each stage, to split the cost of fused ones."""
    options = tf.data.Options()
    options.experimental_optimization.map_and_batch_fusion = False
    options.experimental_optimization.shuffle_and_repeat_fusion = False
    return _run(_with_model(dataset).with_options(options), seconds, later=False)


class _NodeSampler:
    """Reads an iterator's model at short intervals, in a thread of its own, until the `with` block ends.

    One reading is not enough: nodes of datasets that ended, inside an interleave or a repeat, are gone.
    """

    def __init__(self, iterator: Any):
        self._iterator = iterator
        self._last: dict[tuple[_Path, int], Any] = {}
        self._chunks: dict[_Path, list[_Chunk]] = defaultdict(list)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True, name="tfopt-profile")

    def __enter__(self) -> "_NodeSampler":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._read()

    def tree(self) -> Node:
        """Returns the root of the nodes seen."""
        root = Node("Root")
        for (path, _), seen in sorted(self._last.items(), key=lambda item: len(item[0][0])):
            node = root
            for place in path:
                node = node.inputs.setdefault(place, Node(place[1]))
            _add(node, seen)
            node.seconds = node.elements * _usual_seconds(self._chunks[path])
        return root

    def _sample(self) -> None:
        while not self._ended.wait(_INTERVAL_SECONDS):
            self._read()

    def _read(self) -> None:
        model = tf.data.experimental.get_model_proto(self._iterator)
        for path, node in _places(model, model.nodes[model.output], ()):
            before = self._last.get((path, node.id))
            worked = node.processing_time - (before.processing_time if before else 0)
            produced = node.num_elements - (before.num_elements if before else 0)
            self._chunks[path].append((worked / 1e9, produced))
            self._last[path, node.id] = node


def _places(model: Any, node: Any, path: _Path) -> Iterator[tuple[_Path, Any]]:
    """Yields each node with its place: the input slots and names on the way from the last one."""
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
    """Returns the seconds per element: the median over parts of the run with about as many elements each."""
    total = sum(produced for _, produced in chunks)
    costs, seconds, elements = [], 0.0, 0
    for worked, produced in chunks:
        seconds, elements = seconds + worked, elements + produced
        if elements * _BLOCKS >= total > 0:
            costs.append(seconds / elements)
            seconds, elements = 0.0, 0
    if elements:
        costs.append(seconds / elements)
    return statistics.median(costs) if costs else 0.0


def _with_model(dataset: Any) -> Any:
    """Turns autotuning on: TensorFlow keeps figures only of pipelines it tunes."""
    if dataset.options().autotune.enabled is not False:
        return dataset
    options = tf.data.Options()
    options.autotune.enabled = True
    return dataset.with_options(options)


def _run(dataset: Any, seconds: float, *, later: bool) -> Run:
    start, cpu_start = time.perf_counter(), time.process_time()
    counted: list[tuple[float, int]] = []  # when a batch came, in seconds from the start, and its examples
    ended = False
    try:
        iterator = iter(dataset)
        with _NodeSampler(iterator) as sampler:
            for batch in iterator:
                taken = time.perf_counter() - start
                counted.append((taken, _examples_in(batch)))
                if taken >= seconds and (len(counted) >= _FEWEST_BATCHES or taken >= _LONGEST * seconds):
                    break
            else:
                ended = True
    except tf.errors.OpError as error:
        raise PipelineError(
            f"Expected a pipeline that runs. Found that it fails while it is profiled: {error.message} "
            "Iterate over it without the profiler to see the same, and fix what it names."
        ) from error
    cpu_seconds = time.process_time() - cpu_start
    examples = sum(number for _, number in counted)
    taken = counted[-1][0] if counted else 0.0
    # Making the iterator and filling a shuffle are left out.
    since, before = counted[0] if len(counted) > 1 and taken > counted[0][0] else (0.0, 0)
    speed = (examples - before) / (taken - since) if counted else 0.0
    return Run(sampler.tree(), len(counted), examples, taken, speed, cpu_seconds, ended, later)


def _examples_in(batch: Any) -> int:
    """Returns the first dimension of a batch's first tensor; 1 for a scalar."""
    first = tf.nest.flatten(batch)[0]
    shape = first.dense_shape if isinstance(first, tf.SparseTensor) else first.shape
    return int(shape[0]) if len(shape) else 1
