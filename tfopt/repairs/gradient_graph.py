"""What the graph of a training step says about its gradients: computed in float16, or scaled by hand."""

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tfopt.internals.graphs import FuncGraph

# How TensorFlow names the operations of tape.gradient.
_BACKWARD = "gradient_tape/"
_CALLS = ("PartitionedCall", "StatefulPartitionedCall")


def depends_on(tensors: Iterable[Any], variable: Any) -> bool:
    """Whether any of some tensors of a graph is computed from a variable."""
    graph = tf.compat.v1.get_default_graph()
    chain: list[Any] = []
    while isinstance(graph, FuncGraph):
        chain.append(graph)
        graph = graph.outer_graph
    known = [part.handle for part in getattr(variable, "values", (variable,))]
    for inside in chain[::-1]:
        known += [inner for outer, inner in inside.captures if any(outer is one for one in known)]
    marks = {id(tensor.op) for tensor in known if hasattr(tensor, "op") and isinstance(tensor.graph, FuncGraph)}
    return any(id(operation) in marks for operation in _before(_operations(tensors)))


def in_float16(gradients: Iterable[Any]) -> bool:
    """Whether gradients, as tensors of a graph, were computed in float16, or by a function that may do so."""
    backward = [operation for operation in _before(_operations(gradients)) if _BACKWARD in operation.name]
    return any(
        operation.type in _CALLS or any(output.dtype == tf.float16 for output in operation.outputs)
        for operation in backward
    )


def scaled_by_hand(gradients: Iterable[Any]) -> bool:
    """Whether gradients, as tensors of a graph, are divided by a number that their loss was multiplied by."""
    ends = _operations(gradients)
    after = _before(ends, until_backward=True)
    divisors = set().union(*map(_divisor, after)) if after else set()
    if not divisors:
        return False
    backward = [operation for operation in _before(ends) if _BACKWARD in operation.name]
    factors = set().union(*map(_factor, backward)) if backward else set()
    return not divisors.isdisjoint(factors)


def _operations(tensors: Iterable[Any]) -> list[Any]:
    """The operations that make some tensors; none for values of eager execution."""
    dense = [tensor.values if isinstance(tensor, tf.IndexedSlices) else tensor for tensor in tensors]
    return [x.op for x in dense if isinstance(x, tf.Tensor) and isinstance(getattr(x, "graph", None), FuncGraph)]


def _before(ends: Iterable[Any], *, until_backward: bool = False) -> list[Any]:
    """Some operations and all that they depend on, in one graph, without the functions it calls."""
    found: dict[int, Any] = {}
    waiting = list(ends)
    while waiting:
        operation = waiting.pop()
        if id(operation) not in found and not (until_backward and _BACKWARD in operation.name):
            found[id(operation)] = operation
            waiting += [tensor.op for tensor in operation.inputs]
    return list(found.values())


def _divisor(operation: Any) -> set[Any]:
    """What an operation divides by, if it is one number: its value, or the inputs it is computed from."""
    if operation.type in ("RealDiv", "DivNoNan"):
        return _number(operation.inputs[1], 1.0)
    if operation.type == "Mul":
        return set().union(*(_number(tensor, -1.0) for tensor in operation.inputs))
    return set()


def _factor(operation: Any) -> set[Any]:
    if operation.type != "Mul":
        return set()
    return set().union(*(_number(tensor, 1.0) for tensor in operation.inputs))


def _number(tensor: Any, power: float) -> set[Any]:
    if tensor.shape.num_elements() != 1:
        return set()
    value = tf.get_static_value(tensor)
    if value is not None:
        number = abs(float(value.reshape(-1)[0]))
        return {float(f"{number**power:.5g}")} if number and number**power > 1 else set()
    return {
        operation.name
        for operation in _before([tensor.op])
        if not operation.inputs and operation.type != "Const" and tensor.op.type != "Const"
    }
