"""FLOPs of a traced function, with those of all functions it calls."""

import collections
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import tensorflow as tf

from tfopt.internals.graphs import FuncGraph
from tfopt.model.graph_loops import counters, trips, unchanged_variables
from tfopt.model.graph_shapes import Known, ShapedGraph, TracedGraph, origin
from tfopt.model.operation_products import end_of_dilation, is_opaque, is_product, multiply_adds, product_dtype

_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
LOOPS = ("While", "StatelessWhile")
_IFS = ("If", "StatelessIf")
_CASES = ("Case", "StatelessCase")
WITH_FUNCTIONS = (*_CALLS, *LOOPS, *_IFS, *_CASES)
"""Operations that call functions."""
_PASSES = 3  # until the shapes of a loop's variables hold for all its trips
# Where TensorFlow puts the operations of a gradient: of a tape, and of a function or loop.
_TAPE = re.compile(r"(^|/)gradient_tape/")
_GRADIENT = re.compile(r"(?:.*/)?gradients(_\d+)?/(.*?)_grad(?:_\d+)?/")  # the innermost


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
    computes again (`keras.remat`, `tfopt.memory.recompute`), and the optimizer's own (Muon).

    Args:
        optimizers: Names of the optimizers.
    """

    def __init__(self, optimizers: Iterable[str] = ()):
        names = "|".join(map(re.escape, optimizers))
        self._of_optimizer = re.compile(rf"(^|/)({names})(_\d+)?/" if names else "$^")
        self._functions: dict[tuple[FuncGraph, frozenset[int] | None], _Function] = {}
        # Multiply-adds of operations and trips of loops; None if functions with the same names differ.
        self._by_name: dict[str, int | None] = {}

    def count(self, graph: FuncGraph, arguments: Sequence[Known], used: frozenset[int] | None = None) -> GraphFlops:
        """Counts one call of a function.

        Args:
            graph: The function's graph.
            arguments: What is known of its inputs, captured ones included.
            used: Which of its outputs are used, by their place; None: all. TensorFlow computes no others.
        """
        function = self._function(graph, used)
        shaped = ShapedGraph(function.traced, arguments)
        found = GraphFlops()
        # An import takes 0.1 ms an operation: only what the trace leaves open needs it.
        missing = {name: one for name, one in function.products.items() if multiply_adds(one) is None}
        after = [end.name for one in missing.values() if (end := end_of_dilation(one))]
        pending: list[str] = []
        for name in function.traced.sources_of([*function.outputs, *function.calls, *missing, *after]):
            if name in function.inputs:
                continue
            if function.traced.nodes[name].op not in WITH_FUNCTIONS:
                pending.append(name)
                continue
            shaped.add_nodes(pending)
            pending = []
            operation = graph.get_operation_by_name(name)
            known = [shaped.known(tensor) for tensor in operation.inputs]
            called = self._call(operation, known, function.used_of(operation))
            if name in function.calls:
                found.add(called)
            for tensor, result in zip(operation.outputs, called.results, strict=True):
                shaped.give(tensor, result)
        shaped.add_nodes(pending)
        for name, operation in function.products.items():
            self._add_operation(found, name, shaped.operation(name) if name in missing else operation)
        found.unknown |= {name: f"what {kind} computes is not known" for name, kind in function.opaque.items()}
        found.results = [
            shaped.known(tensor) if used is None or place in used else Known(tensor.shape)
            for place, tensor in enumerate(graph.outputs)
        ]
        return found

    def is_optimizer(self, name: str) -> bool:
        """Whether an operation of this name belongs to an optimizer."""
        return self._of_optimizer.search(name) is not None

    def calls_work(self, operation: tf.Operation, used: frozenset[int] | None) -> bool:
        """Whether a call has products that count, or may have."""
        functions = [self._function(graph, used) for graph in functions_of(operation)]
        return any(one.products or one.opaque or one.calls for one in functions)

    def _function(self, graph: FuncGraph, used: frozenset[int] | None) -> "_Function":
        if (graph, used) not in self._functions:
            self._functions[graph, used] = _Function(graph, used, self)
        return self._functions[graph, used]

    def _add_operation(self, found: GraphFlops, name: str, operation: tf.Operation) -> None:
        number = multiply_adds(operation)
        if not operation.type.startswith("Cudnn"):  # the gradient of all its products is one operation
            number = self._remembered(name, number)
        if number is not None:
            found.by_dtype[product_dtype(operation)] += 2 * number
        elif all(tensor.shape.is_fully_defined() for tensor in operation.inputs):
            found.unknown[name] = f"what {operation.type} computes is not known"
        else:
            shapes = " and ".join(str(tensor.shape) for tensor in operation.inputs[:2])
            found.unknown[name] = f"a size is open: {shapes}"

    def _remembered(self, name: str, number: int | None) -> int | None:
        """Remembers what is known of an operation; what is not known of a gradient's follows from the forward one.

        Loops hide sizes and trips from their gradient: it takes them from lists that the forward pass has filled. Each
        product of a product's gradient takes as many multiply-adds as that product.
        """
        found = _GRADIENT.match(name)
        if number is None and found is not None:
            return self._by_name.get(found[2])
        if self._by_name.setdefault(name, number) != number:
            self._by_name[name] = None
        return number

    def _call(self, operation: tf.Operation, arguments: list[Known], used: frozenset[int] | None) -> GraphFlops:
        functions = functions_of(operation)
        if operation.type in LOOPS:
            return self._loop(operation.name, functions[0], functions[1], arguments)
        if operation.type in _CALLS:
            return self.count(functions[0], arguments, used)
        choice, arguments = arguments[0].value, arguments[1:]
        if choice is not None and choice.size == 1:
            number = int(choice) if operation.type in _CASES else int(not choice)  # `If` lists true first
            functions = [functions[min(max(number, 0), len(functions) - 1)]]
        branches = [self.count(function, arguments, used) for function in functions]
        return _any_of(branches, [function.outputs for function in functions], operation.name)

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
        times = self._remembered(name, trips(condition, counting, variables))
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
    """What of a traced function runs and counts, if only some of its outputs are used."""

    def __init__(self, graph: FuncGraph, used: frozenset[int] | None, counter: FlopsCounter):
        self.traced = TracedGraph(graph)
        self.inputs = {tensor.op.name for tensor in graph.inputs}
        outputs = [tensor for place, tensor in enumerate(graph.outputs) if used is None or place in used]
        self.outputs = [tensor.op.name for tensor in outputs]
        operations = graph.get_operations()
        # A convolution's gradient is traced for all its inputs, but runs for those that are needed.
        running = self.traced.sources_of([*self.outputs, *(one.name for one in graph.control_outputs)])
        self._consumed = {source for name in running for source in self.traced.nodes[name].input}
        self._consumed |= {tensor.name for tensor in outputs}
        counting = set(running) - _computed_again(operations)
        self.products: dict[str, tf.Operation] = {}
        self.opaque: dict[str, str] = {}
        self.calls: set[str] = set()
        for operation in operations:
            name, kind = operation.name, operation.type
            if name not in counting or counter.is_optimizer(name):
                continue
            if kind in WITH_FUNCTIONS:
                if counter.calls_work(operation, self.used_of(operation)):
                    self.calls.add(name)
            elif is_product(kind):
                self.products[name] = operation
            elif is_opaque(operation):
                self.opaque[name] = kind

    def used_of(self, operation: tf.Operation) -> frozenset[int] | None:
        """Which outputs of a call are used, by their place; None: all, as of a loop, which runs as it stands."""
        if operation.type in LOOPS or operation.type not in WITH_FUNCTIONS:
            return None
        names = {place: f"{operation.name}:{place}" for place in range(len(operation.outputs))}
        return frozenset(place for place, name in names.items() if {name, name.removesuffix(":0")} & self._consumed)


def functions_of(operation: tf.Operation) -> list[FuncGraph]:
    """The functions that an operation calls: a loop's condition and body, the branches, or a single one."""
    kind = operation.type
    if kind in _CASES:
        names = [function.name for function in operation.get_attr("branches")]
    else:
        of = ("cond", "body") if kind in LOOPS else ("then_branch", "else_branch") if kind in _IFS else ("f",)
        names = [operation.get_attr(name).name for name in of]
    return [operation.graph._get_function(name).graph for name in names]


def _computed_again(operations: Sequence[tf.Operation]) -> set[str]:
    """The operations of a second forward pass, to save memory: what follows from its mark and is no gradient."""
    follows = {one.name for one in operations if _is_mark(one)}
    for operation in operations if follows else ():
        if any(tensor.op.name in follows for tensor in operation.inputs):
            follows.add(operation.name)
    return {one.name for one in operations if one.name in follows and not _is_gradient(one)}


def _is_mark(operation: tf.Operation) -> bool:
    """Whether it makes an argument of a second run follow from the gradients, as recompute_grad and tfopt.memory do."""
    if operation.type != "SelectV2":
        return False
    chosen = operation.inputs[0].op
    if chosen.type == "Equal":  # recompute_grad adds a 0
        left, right = chosen.inputs
        last = tf.get_static_value(operation.inputs[2])
        return left is right and last is not None and last.size == 1 and bool(np.isnan(last).all())
    if chosen.type != "Any" or chosen.inputs[0].op.type != "Greater":
        return False
    bounded, limit = chosen.inputs[0].op.inputs  # tfopt.memory asks for a hyperbolic tangent above 2
    value = tf.get_static_value(limit)
    return bounded.op.type == "Tanh" and value is not None and bool((value > 1).all())


def _is_gradient(operation: tf.Operation) -> bool:
    if _TAPE.search(operation.name):
        return True
    if operation.type in _CALLS:
        function = operation.graph._get_function(operation.get_attr("f").name)
        return "forward_function_name" in function.cached_definition.attr
    found = _GRADIENT.match(operation.name)
    # The gradient of an IdentityN is a custom one, here that of recompute_grad.
    return found is not None and not found[2].rpartition("/")[2].startswith("IdentityN")


def _any_of(branches: Sequence[GraphFlops], outputs: Sequence[Sequence[tf.Tensor]], name: str) -> GraphFlops:
    """The FLOPs of whichever branch runs, from those of each and its traced outputs."""
    found = GraphFlops()
    found.add(branches[0])
    for other in branches[1:]:
        found.unknown |= other.unknown
        if +found.by_dtype != +other.by_dtype:
            found.unknown[name] = "which branch runs follows from its data"
    for place, results in enumerate(zip(*(branch.results for branch in branches), strict=True)):
        # Under XLA a branch stands in for what only another's gradient takes, by a tensor whose open sizes are 0.
        real = [one for one, made in zip(results, outputs, strict=True) if origin(made[place]).op.type != "FakeParam"]
        first, *others = real or results
        shape = first.shape
        for other in others:
            shape = _common_shape(shape, other.shape)
        found.results.append(replace(first, shape=shape, value=first.value if len(branches) == 1 else None))
    return found


def _common_shape(first: tf.TensorShape, second: tf.TensorShape) -> tf.TensorShape:
    """The most that holds for both shapes."""
    return first.most_specific_compatible_shape(second)
