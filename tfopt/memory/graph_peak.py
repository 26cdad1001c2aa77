"""What a training step holds at its peak without XLA: the tensors of its graph that are in use at the same time.

A tensor takes memory from the operation that makes it to the last one that reads it, directly or through a view.
Operations run in generations: each once all that it depends on has run. A result takes the place of an input of its
size that nobody reads later, as TensorFlow has it for element-wise operations.
"""

import collections
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from itertools import accumulate, chain
from typing import NamedTuple

import tensorflow as tf

from tfopt.internals.graphs import FuncGraph
from tfopt.memory.peak import BACKWARD, FORWARD, UPDATE, Peak, Phases
from tfopt.model.graph_flops import LOOPS, WITH_FUNCTIONS, functions_of
from tfopt.model.graph_loops import counters, trips, unchanged_variables
from tfopt.model.graph_shapes import Known, known_of, origin

_VIEWS = (
    *("Bitcast", "CheckNumerics", "EnsureShape", "ExpandDims", "PlaceholderWithDefault", "PreventGradient"),
    *("ReadVariableOp", "Reshape", "Snapshot", "Squeeze", "StopGradient", "TensorListGetItem"),
)


class _Place(NamedTuple):
    """Where in a step an operation stands."""

    names: tuple[str, ...] = ()
    """As in `Peak.activations`."""
    phase: int = FORWARD
    times: int = 1
    """How often it runs, in a loop."""


@dataclass(slots=True, eq=False)
class _Memory:
    """Memory that an operation's result takes."""

    size: int
    """Bytes."""
    place: _Place
    """Of the operation."""
    inputs: "_Value"
    """What it read."""
    made: int
    """When: the number of the operation."""
    last_read: int
    readers: set[int] = field(default_factory=set)
    """The phases of the operations that read it."""
    is_kept: bool = False
    """Whether a list keeps the result of each trip of a loop."""

    @property
    def total(self) -> int:
        return self.size * (self.place.times if self.is_kept else 1)

    @property
    def start(self) -> int:
        """When it is first counted: later by one where it takes the place of an input."""
        return self.made + any(one.size == self.size and one.last_read == self.made for one in self.inputs)


_Value = tuple[_Memory, ...]
"""What a tensor keeps in memory: nothing for variables and arguments of the step, several for a list of tensors."""


def peak_of_graph(graph: FuncGraph, phases: Phases) -> Peak:
    """Returns what a training step, traced for a batch of a fixed size, holds at its peak.

    A size the trace leaves open counts as that of the largest input. Of several branches, the longest runs. A loop
    whose trips the trace leaves open runs as often as the one that made what it reads, which is right for the gradient
    of a loop. What an operation needs while it runs, such as cuDNN's workspace, is not known.
    """
    walk = _Walk(phases)
    walk.read(walk.call(graph, [() for _ in graph.inputs], _Place()), FORWARD)
    changes: collections.Counter[int] = collections.Counter()
    for one in walk.made:
        changes[one.start] += one.total
        changes[one.last_read + 1] -= one.total
    moments = sorted(changes)
    held = dict(zip(moments, accumulate(changes[moment] for moment in moments), strict=True))
    most = max(held, key=held.__getitem__, default=0)
    alive = [one for one in walk.made if one.start <= most <= one.last_read]
    activations: collections.Counter[tuple[str, ...]] = collections.Counter()
    for one in alive:
        if one.place.phase == FORWARD and one.readers & {BACKWARD, UPDATE}:
            activations[one.place.names] += one.total
    gradients = sum(one.total for one in alive if one.place.phase == BACKWARD and UPDATE in one.readers)
    return Peak(held.get(most, 0), gradients, activations)


class _Walk:
    """Goes through a graph and the functions it calls, and notes when which memory is made and read."""

    def __init__(self, phases: Phases):
        self.made: list[_Memory] = []
        self._phases = phases
        self._now = 0

    def read(self, values: Iterable[_Value], phase: int) -> None:
        """Notes that an operation of this phase now reads these tensors."""
        self._now += 1
        for one in chain.from_iterable(values):
            one.last_read = self._now
            one.readers.add(phase)

    def call(self, graph: FuncGraph, arguments: Iterable[_Value], caller: _Place) -> list[_Value]:
        """Goes through a function once."""
        values = dict(zip((tensor.name for tensor in graph.inputs), arguments, strict=True))
        order = TopologicalSorter(_dependencies(graph))
        order.prepare()
        while generation := order.get_ready():
            for operation in generation:
                if operation.type == "Placeholder":
                    continue
                inputs = [values[origin(tensor).name] for tensor in operation.inputs]
                results = self._run(operation, inputs, caller)
                values.update(zip((tensor.name for tensor in operation.outputs), results, strict=True))
            order.done(*generation)
        return [values[origin(tensor).name] for tensor in graph.outputs]

    def _run(self, operation: tf.Operation, inputs: list[_Value], caller: _Place) -> Sequence[_Value]:
        kind = operation.type
        follows = any(one.place.phase == BACKWARD for one in chain.from_iterable(inputs))
        phase = max(caller.phase, self._phases.named(operation.name), BACKWARD if follows else FORWARD)
        place = _Place((operation.name, *caller.names), phase, caller.times)
        if kind in LOOPS:
            return self._loop(operation, inputs, place)
        if kind in WITH_FUNCTIONS:
            longest = max(functions_of(operation), key=lambda graph: len(graph.get_operations()))
            return self.call(longest, inputs[len(inputs) - len(longest.inputs) :], place)
        if kind in _VIEWS:
            return inputs[: len(operation.outputs)]
        if kind in ("EmptyTensorList", "TensorListReserve"):
            return [()]
        if kind in ("TensorListPushBack", "TensorListSetItem"):
            item = inputs[1 if kind == "TensorListPushBack" else 2]
            for one in item:
                one.is_kept = True
            return [inputs[0] + item]
        if kind == "TensorListPopBack":
            return [inputs[0], inputs[0]]
        self.read(inputs, phase)
        return [self._new(tensor, inputs, place) for tensor in operation.outputs]

    def _loop(self, operation: tf.Operation, inputs: list[_Value], place: _Place) -> list[_Value]:
        """Goes through a loop's body once."""
        condition, body = functions_of(operation)
        unchanged = unchanged_variables(body)
        known = [known_of(tensor) for tensor in operation.inputs]
        fixed = [one if same else Known(one.shape) for one, same in zip(known, unchanged, strict=True)]
        times = trips(condition, counters(body, known), fixed)
        if times is None:
            times = max((one.place.times for one in chain.from_iterable(inputs)), default=1)
        else:
            times *= place.times
        place = place._replace(times=times)
        variables = [
            value if same or tensor.dtype == tf.variant else self._new(tensor, [value], place)
            for tensor, value, same in zip(body.inputs, inputs, unchanged, strict=True)
        ]
        results = self.call(body, variables, place)
        self.read([*inputs, *variables], place.phase)  # in each trip
        return results

    def _new(self, tensor: tf.Tensor, inputs: list[_Value], place: _Place) -> _Value:
        """The memory of a tensor made of others."""
        read = tuple(chain.from_iterable(inputs))
        elements = tensor.shape.num_elements()
        if tensor.dtype == tf.variant:  # a list that holds as much as what it is made of
            size = max((one.total for one in read), default=0)
        elif elements is None:
            size = max((one.size for one in read), default=0)
        else:
            size = elements * tensor.dtype.size
        self.made.append(_Memory(size, place, read, self._now, self._now))
        return (self.made[-1],)


def _dependencies(graph: FuncGraph) -> dict[tf.Operation, list[tf.Operation]]:
    """The operations that run, each with those that run before it."""
    found: dict[tf.Operation, list[tf.Operation]] = {}
    waiting = [*(origin(tensor).op for tensor in graph.outputs), *graph.control_outputs]
    while waiting:
        operation = waiting.pop()
        if operation not in found:
            found[operation] = [*(origin(tensor).op for tensor in operation.inputs), *operation.control_inputs]
            waiting += found[operation]
    return {operation: found[operation] for operation in graph.get_operations() if operation in found}
