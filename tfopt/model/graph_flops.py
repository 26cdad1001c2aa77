"""FLOPs of a traced function, with those of all functions it calls."""

import collections
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import tensorflow as tf
from tensorflow.python.framework.func_graph import FuncGraph

from tfopt.model.graph_loops import counters, trips, unchanged_variables
from tfopt.model.graph_shapes import Known, ShapedGraph, TracedGraph
from tfopt.model.operation_products import is_opaque, is_product, multiply_adds, product_dtype

_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
_LOOPS = ("While", "StatelessWhile")
_IFS = ("If", "StatelessIf")
_CASES = ("Case", "StatelessCase")
_WITH_FUNCTIONS = (*_CALLS, *_LOOPS, *_IFS, *_CASES)
_PASSES = 3  # until the shapes of a loop's variables hold for all its trips
# Where TensorFlow puts the operations of a gradient: of a tape, and of a function or loop.
_TAPE = re.compile(r"(^|/)gradient_tape/")
_GRADIENT = re.compile(r"(^|/)gradients(_\d+)?/(.*?)_grad(_\d+)?/")


@dataclass(slots=True)
class GraphFlops:
    """FLOPs of one call of a function; a multiply-add counts as two."""

    by_dtype: collections.Counter[str] = field(default_factory=collections.Counter)
    unknown: dict[str, str] = field(default_factory=dict)
    """Operations whose FLOPs are unknown, each with the reason."""
    results: list[Known] = field(default_factory=list)
    """What is known of the function's outputs."""

    def add(self, other: "GraphFlops", times: int = 1) -> None:
        """Adds the FLOPs of a function that is called so often."""
        for dtype, number in other.by_dtype.items():
            self.by_dtype[dtype] += times * number
        self.unknown |= other.unknown


class FlopsCounter:
    """Counts the matrix products and convolutions of a traced training step, its gradients included.

    Two kinds of products belong to the training, not to the model, and are left out: those that the backward pass
    computes again (`keras.remat`), and the optimizer's own (Muon).

    Args:
        optimizers: Names of the optimizers.
    """

    def __init__(self, optimizers: Iterable[str] = ()):
        names = "|".join(map(re.escape, optimizers))
        self._of_optimizer = re.compile(rf"(^|/)({names})(_\d+)?/" if names else "$^")
        self._functions: dict[FuncGraph, _Function] = {}
        self._by_name: dict[str, int | None] = {}

    def count(self, graph: FuncGraph, arguments: Sequence[Known]) -> GraphFlops:
        """Counts one call of a function, given what is known of its inputs, captured ones included."""
        function = self._function(graph)
        shaped = ShapedGraph(function.traced, arguments)
        found = GraphFlops()
        pending: list[str] = []
        for name in function.traced.sources_of([*function.outputs, *function.work]):
            if name in function.inputs:
                continue
            if function.traced.nodes[name].op not in _WITH_FUNCTIONS:
                pending.append(name)
                continue
            shaped.add_nodes(pending)
            pending = []
            operation = graph.get_operation_by_name(name)
            called = self._call(operation, [shaped.known(tensor) for tensor in operation.inputs])
            if name in function.work:
                found.add(called)
            for tensor, known in zip(operation.outputs, called.results, strict=True):
                shaped.give(tensor, known)
        shaped.add_nodes(pending)
        for name in function.work:
            if function.traced.nodes[name].op not in _WITH_FUNCTIONS:
                self._add_operation(found, name, shaped.operation(name))
        found.results = [shaped.known(tensor) for tensor in graph.outputs]
        return found

    def works(self, operation: tf.Operation) -> bool:
        """Whether an operation has products that count, or may have."""
        if self._of_optimizer.search(operation.name):
            return False
        if operation.type in _WITH_FUNCTIONS:
            return any(self._function(graph).work for graph in _functions_of(operation))
        return is_product(operation.type) or is_opaque(operation.type)

    def _function(self, graph: FuncGraph) -> "_Function":
        if graph not in self._functions:
            self._functions[graph] = _Function(graph, self)
        return self._functions[graph]

    def _add_operation(self, found: GraphFlops, name: str, operation: tf.Operation) -> None:
        number = multiply_adds(operation) if is_product(operation.type) else None
        if number is None and (forward := _forward_name(name)) is not None:
            # Loops hide sizes from their gradient. Each product of a product's gradient takes as many multiply-adds.
            number = self._by_name.get(forward)
        elif self._by_name.setdefault(name, number) != number:
            self._by_name[name] = None
        if number is not None:
            found.by_dtype[product_dtype(operation)] += 2 * number
        elif is_opaque(operation.type) or all(tensor.shape.is_fully_defined() for tensor in operation.inputs):
            found.unknown[name] = f"what {operation.type} computes is not known"
        else:
            shapes = " and ".join(str(tensor.shape) for tensor in operation.inputs[:2])
            found.unknown[name] = f"a size is open: {shapes}"

    def _call(self, operation: tf.Operation, arguments: list[Known]) -> GraphFlops:
        functions = _functions_of(operation)
        if operation.type in _LOOPS:
            return self._loop(operation.name, functions[0], functions[1], arguments)
        if operation.type in _CALLS:
            return self.count(functions[0], arguments)
        choice, arguments = arguments[0].value, arguments[1:]
        if choice is not None and choice.size == 1:
            number = int(choice) if operation.type in _CASES else int(not choice)  # `If` lists true first
            functions = [functions[min(max(number, 0), len(functions) - 1)]]
        return _any_of([self.count(function, arguments) for function in functions], operation.name)

    def _loop(self, name: str, condition: FuncGraph, body: FuncGraph, arguments: list[Known]) -> GraphFlops:
        unchanged = unchanged_variables(body)
        variables = [one if same else replace(one, value=None) for one, same in zip(arguments, unchanged, strict=True)]
        for _ in range(_PASSES):
            once = self.count(body, variables)
            relaxed = [
                before if same else replace(before, shape=_common_shape(before.shape, after.shape))
                for before, after, same in zip(variables, once.results, unchanged, strict=True)
            ]
            if [one.shape for one in relaxed] == [one.shape for one in variables]:
                break
            variables = relaxed
        counting = counters(body, arguments)
        times = trips(condition, counting, variables)
        found = GraphFlops()
        found.add(once, 1 if times is None else times)
        if times is None and once.by_dtype.total():
            found.unknown[name] = "how often the loop runs follows from its data"
        for place, result in enumerate(once.results):
            if unchanged[place]:
                result = arguments[place]
            elif place in counting and times is not None:
                start, step = counting[place]
                result = replace(arguments[place], value=np.array(start + times * step))
            else:
                result = replace(result, value=None)
            found.results.append(result)
        return found


class _Function:
    """What a traced function holds that counts."""

    def __init__(self, graph: FuncGraph, counter: FlopsCounter):
        self.traced = TracedGraph(graph)
        self.inputs = {tensor.op.name for tensor in graph.inputs}
        self.outputs = [tensor.op.name for tensor in graph.outputs]
        operations = graph.get_operations()
        again = _computed_again(operations)
        ends = [*self.outputs, *(one.name for one in graph.control_outputs)]
        runs = set(self.traced.sources_of(ends))
        self.work = [
            one.name for one in operations if one.name in runs and one.name not in again and counter.works(one)
        ]


def _functions_of(operation: tf.Operation) -> list[FuncGraph]:
    """The functions that an operation calls: a loop's condition and body, the branches, or a single one."""
    kind = operation.type
    if kind in _CASES:
        names = [function.name for function in operation.get_attr("branches")]
    else:
        of = ("cond", "body") if kind in _LOOPS else ("then_branch", "else_branch") if kind in _IFS else ("f",)
        names = [operation.get_attr(name).name for name in of]
    return [operation.graph._get_function(name).graph for name in names]


def _computed_again(operations: Iterable[tf.Operation]) -> set[str]:
    """The operations of `tf.recompute_grad`'s second forward pass: what follows from its mark and is no gradient."""
    follows: set[str] = set()
    for operation in operations:
        if _is_mark(operation) or any(tensor.op.name in follows for tensor in operation.inputs):
            follows.add(operation.name)
    return {one.name for one in operations if one.name in follows and not _is_gradient(one)}


def _is_mark(operation: tf.Operation) -> bool:
    """Whether it is the 0 that recompute_grad adds to its arguments, so that they follow from the gradients."""
    if operation.type != "SelectV2" or operation.inputs[0].op.type != "Equal":
        return False
    left, right = operation.inputs[0].op.inputs
    last = tf.get_static_value(operation.inputs[2])
    return left is right and last is not None and last.size == 1 and bool(np.isnan(last).all())


def _is_gradient(operation: tf.Operation) -> bool:
    if _TAPE.search(operation.name):
        return True
    if operation.type in _CALLS:
        function = operation.graph._get_function(operation.get_attr("f").name)
        return "forward_function_name" in function.cached_definition.attr
    found = _GRADIENT.search(operation.name)
    # The gradient of an IdentityN is a custom one, here that of recompute_grad.
    return found is not None and not found[3].rpartition("/")[2].startswith("IdentityN")


def _forward_name(name: str) -> str | None:
    """The name of the operation whose gradient an operation belongs to; None if it is no gradient."""
    found = _GRADIENT.search(name)
    return found and found[3]


def _any_of(branches: Sequence[GraphFlops], name: str) -> GraphFlops:
    """The FLOPs of whichever branch runs."""
    found = GraphFlops()
    found.add(branches[0])
    for other in branches[1:]:
        found.unknown |= other.unknown
        if +found.by_dtype != +other.by_dtype:
            found.unknown[name] = "which branch runs follows from its data"
    for results in zip(*(branch.results for branch in branches), strict=True):
        first = results[0]
        shape = first.shape
        for other in results[1:]:
            shape = _common_shape(shape, other.shape)
        found.results.append(replace(first, shape=shape, value=first.value if len(branches) == 1 else None))
    return found


def _common_shape(first: tf.TensorShape, second: tf.TensorShape) -> tf.TensorShape:
    """The most that holds for both shapes."""
    return first.most_specific_compatible_shape(second)
