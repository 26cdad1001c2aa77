"""A traced function's graph with the shapes of one call, where the trace may have left sizes open."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfopt.internals.graphs import FuncGraph, get_resource_handle_data, set_handle_data, value_of

_LARGEST_VALUE = 64  # elements; shapes and loop counters have fewer
# Operations that put an element into a list, and which of their inputs it is.
_ELEMENT_INPUT = {"TensorListSetItem": 2, "TensorListPushBack": 1}


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a tensor before anything runs."""

    shape: tf.TensorShape
    value: Any = None
    """An array, for small integers and booleans that follow from constants and shapes; otherwise None."""
    handle: Any = None
    """TensorFlow's note of what a variable or list holds."""


def known_of(tensor: tf.Tensor) -> Known:
    """What a graph says of one of its tensors."""
    size = tensor.shape.num_elements()
    counts = (tensor.dtype.is_integer or tensor.dtype.is_bool) and size is not None and size <= _LARGEST_VALUE
    value = value_of(tensor) if counts else None
    if tensor.dtype not in (tf.resource, tf.variant):
        return Known(tensor.shape, value)
    handle = get_resource_handle_data(tensor)
    element = _element_shape(origin(tensor).op)
    if element is not None and handle.is_set and len(handle.shape_and_type) == 1:
        (held,) = handle.shape_and_type
        shape = tf.TensorShape(held.shape)
        if shape.is_compatible_with(element):
            held.shape.CopyFrom(shape.merge_with(element).as_proto())
    return Known(tensor.shape, handle=handle if handle.is_set else None)


def origin(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor that identities pass on."""
    while tensor.op.type in ("Identity", "IdentityN"):
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor


def _element_shape(operation: tf.Operation) -> tf.TensorShape | None:
    """The shape of what an operation puts into a list, by which TensorFlow does not refine that of the list's elements.

    None for other operations.
    """
    if operation.type == "TensorListFromTensor":
        return operation.inputs[0].shape[1:]
    place = _ELEMENT_INPUT.get(operation.type)
    return None if place is None else operation.inputs[place].shape


class TracedGraph:
    """A function's graph as it was traced, to be read many times."""

    def __init__(self, graph: FuncGraph):
        self.graph = graph
        definition = graph.as_graph_def()
        self.versions = definition.versions
        self.nodes = {node.name: node for node in definition.node}
        for node in definition.node:
            data = [name for name in node.input if not name.startswith("^")]
            if len(data) < len(node.input):
                del node.input[:]
                node.input.extend(data)
            node.attr.pop("_class", None)
            node.device = ""

    def sources_of(self, names: Iterable[str]) -> list[str]:
        """Returns the nodes of these names and all that their values depend on, each after what it depends on."""
        ordered: dict[str, None] = {}
        waiting = [(name, False) for name in names]
        entered = set()
        while waiting:
            name, left = waiting.pop()
            if left:
                ordered[name] = None
            elif name not in entered:
                entered.add(name)
                waiting.append((name, True))
                waiting += [(source.partition(":")[0], False) for source in self.nodes[name].input]
        return list(ordered)


class ShapedGraph:
    """Part of a function's graph, imported for arguments of known shapes, so that TensorFlow infers the others."""

    def __init__(self, traced: TracedGraph, arguments: Sequence[Known]):
        self._traced = traced
        self._graph = FuncGraph("shapes")
        self._operations: dict[str, tf.Operation] = {}
        self._tensors: dict[str, tf.Tensor] = {}
        # Most are never asked for, and a placeholder takes 0.3 ms.
        self._given: dict[str, tuple[tf.Tensor, Known]] = {}
        for tensor, known in zip(traced.graph.inputs, arguments, strict=True):
            self.give(tensor, known)

    def give(self, tensor: tf.Tensor, known: Known) -> None:
        """Takes what is known of a tensor of the function, instead of importing what makes it."""
        self._given[tensor.name] = tensor, known

    def add_nodes(self, names: Sequence[str]) -> None:
        """Imports nodes whose inputs are there or among them."""
        if not names:
            return
        inside = set(names)
        definition = tf.compat.v1.GraphDef(versions=self._traced.versions)
        outside = {}
        for name in names:
            node = self._traced.nodes[name]
            definition.node.append(node)
            for source in node.input:
                if source.partition(":")[0] not in inside:
                    outside[source] = self._named(source if ":" in source else f"{source}:0")
        with self._graph.as_default():
            # Not found by name later: TensorFlow renames a node if another has taken its name as a scope.
            made = tf.graph_util.import_graph_def(definition, outside, return_elements=list(names), name="")
        self._operations.update(zip(names, made, strict=True))

    def known(self, tensor: tf.Tensor) -> Known:
        """What is known of a tensor of the function, once it was added."""
        return known_of(self._named(tensor.name))

    def operation(self, name: str) -> tf.Operation:
        """Returns an operation that was imported."""
        return self._operations[name]

    def _named(self, name: str) -> tf.Tensor:
        if name not in self._tensors:
            if name in self._given:
                self._tensors[name] = self._stand_in(*self._given[name])
            else:
                operation, _, place = name.rpartition(":")
                self._tensors[name] = self._operations[operation].outputs[int(place)]
        return self._tensors[name]

    def _stand_in(self, tensor: tf.Tensor, known: Known) -> tf.Tensor:
        """A constant for a tensor of the function, or a placeholder if its value is unknown."""
        with self._graph.as_default():
            if known.value is not None:
                return tf.constant(known.value, tensor.dtype)
            fits = known.shape.is_compatible_with(tensor.shape)
            shape = known.shape.merge_with(tensor.shape) if fits else known.shape
            new = tf.compat.v1.placeholder(tensor.dtype, shape)
        if tensor.dtype in (tf.resource, tf.variant):
            set_handle_data(new, known.handle or get_resource_handle_data(tensor))
        return new
