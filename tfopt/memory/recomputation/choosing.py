"""Chooses what a model computes again: blocks that repeat, segments of its graph, or the layers that were named."""

import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from tfopt.internals.layers import CUTS_GRAPHS, Functional
from tfopt.memory.recomputation.activations import Activations
from tfopt.memory.recomputation.rerunning import Part
from tfopt.model.layers import is_keras_own, layer_paths
from tfopt.text import listed


class SegmentedGraph:
    """Replaces a graph's `_run_through_graph`: runs its segments one by one, the first `count` of them twice.

    Args:
        graph: The graph.
        segments: In the order in which they run.
        owner: The model of the graph, whose `losses` are looked at; a Sequential's graph is not asked for them.
    """

    def __init__(self, graph: Functional, segments: Sequence[keras.Function], owner: keras.Layer) -> None:
        self.graph = graph
        self._owner = owner
        self._segments = segments
        # Not the last one, since its gradient comes first.
        self.count = self.most = len(segments) - 1

    def __call__(self, inputs: Any, operation_fn: Callable[..., Any] = lambda x: x, call_fn: Any = None) -> Any:
        """Computes the outputs, as Keras' own method does."""
        tensors = dict(zip(map(id, self.graph.inputs), keras.tree.flatten(inputs), strict=True))
        for index, segment in enumerate(self._segments):

            def run(values: Any, segment: keras.Function = segment) -> Any:
                return segment._run_through_graph(values, operation_fn, call_fn)

            twice = Part(f"the segment up to {segment.name!r}", run, self._owner)
            outputs = (twice if index < self.count else run)([tensors[id(tensor)] for tensor in segment.inputs])
            tensors.update(zip(map(id, segment.outputs), outputs, strict=True))
        outputs = [tensors[id(tensor)] for tensor in self.graph.outputs]
        return keras.tree.pack_sequence_as(self.graph._outputs_struct, outputs)


Chosen: TypeAlias = keras.Layer | SegmentedGraph | Activations
"""A layer that is computed again, or a graph whose segments are, or a model whose activations are."""


def automatic(model: keras.Model) -> list[Chosen]:
    """Returns a model's repeating blocks, or its graph in segments.

    Raises:
        ValueError: If it has neither.
    """
    chosen = _found(model)
    if not chosen:
        cut = "" if CUTS_GRAPHS else " Keras cannot divide a graph before its version 3.14."
        raise ValueError(
            "Expected a model in which blocks repeat, or a graph that segments can divide. Received: "
            f"{model.name!r}, which has neither.{cut} Pass the names of the layers to compute again as `layers`."
        )
    return chosen


def _found(parent: keras.Layer) -> list[Chosen]:
    """Blocks inside a layer, at any depth, or the segments of its graph if they take in more of it."""
    graph = _graph_of(parent)
    inside = list(filter(_may_repeat, parent._flatten_layers(include_self=False, recursive=False)))
    if graph or parent._called:  # otherwise nothing inside has been called yet
        inside = [layer for layer in inside if layer._called]  # some only hold weights, which their owner uses
    blocks = _feeding_each_other(inside, graph) if graph else _of_one_kind(inside)
    nested = {layer: _found(layer) for layer in inside if layer not in blocks}
    covered = [*blocks, *(layer for layer, found in nested.items() if found)]
    if graph and 2 * sum(map(_layers_in, covered)) < _layers_in(parent):
        segmented = _divided(graph, parent)
        return [] if segmented is None else [segmented]
    return [*blocks, *(part for found in nested.values() for part in found)]


def _graph_of(layer: keras.Layer) -> Functional | None:
    """The graph that a Functional or Sequential model runs."""
    if isinstance(layer, keras.Sequential):
        return layer._functional if type(layer).call is keras.Sequential.call else None
    return layer if isinstance(layer, Functional) and type(layer).call is Functional.call else None


def _may_repeat(layer: keras.Layer) -> bool:
    """Whether a layer may be a block. Those of Keras that hold others, such as attention, are parts of one."""
    return bool(layer._layers) and (isinstance(layer, keras.Model) or not is_keras_own(layer))


def _of_one_kind(layers: Sequence[keras.Layer]) -> list[keras.Layer]:
    kinds = list(map(_kind, layers))
    return [layer for layer, kind in zip(layers, kinds, strict=True) if kinds.count(kind) > 1]


def _feeding_each_other(layers: Sequence[keras.Layer], graph: Functional) -> list[keras.Layer]:
    """Those of one kind of which one gets what another returns, or a layer what it returned itself."""
    chained: set[keras.Layer] = set()
    for node in (node for nodes in graph._nodes_by_depth.values() for node in nodes):
        for tensor in node.input_tensors:
            before, after = tensor._keras_history.operation, node.operation
            if before in layers and after in layers and _kind(before) == _kind(after):
                chained |= {before, after}
    return [layer for layer in layers if layer in chained]


def _kind(layer: keras.Layer) -> tuple[type, ...]:
    """The class; for a plain Sequential or Functional model, also the classes of its layers."""
    inner = layer._flatten_layers(include_self=False) if is_keras_own(layer) else ()
    return (type(layer), *map(type, inner))


def named(model: keras.Model, layers: Any) -> list[Chosen]:
    """Returns the layers that were given by name, by path or themselves.

    Raises:
        TypeError, ValueError: As `tfopt.memory.recompute`.
    """
    if isinstance(layers, str | keras.Layer) or not isinstance(layers, Iterable):
        raise TypeError(
            f"Expected layers to be 'auto', 'activations' or a list of names, paths or layers. Received: {layers!r}. "
            "Put a single one into a list."
        )
    paths = layer_paths(model)
    del paths[model]
    chosen = list(dict.fromkeys(_only(given, paths, model) for given in layers))
    if not chosen:
        raise ValueError("Expected layers to name at least one layer. Received: none. Take them back with undo(model).")
    for outer in chosen:
        inner = [layer for layer in outer._flatten_layers(include_self=False) if layer in chosen]
        if inner:
            raise ValueError(
                f"Expected layers none of which lies inside another. Received: {paths[inner[0]]!r} and "
                f"{paths[outer]!r}. Leave one out."
            )
    return [*chosen]


def _only(given: Any, paths: Mapping[keras.Layer, str], model: keras.Model) -> keras.Layer:
    """The one layer that was meant."""
    if not isinstance(given, str | keras.Layer):
        raise TypeError(f"Expected names, paths or layers. Received: {given!r}. Pass layer.name or the layer itself.")
    found = [layer for layer, path in paths.items() if given is layer or given == path]
    found = found or [layer for layer in paths if layer.name == given]
    if len(found) > 1:
        raise ValueError(
            f"Expected names that one layer has. Received: {given!r}, the name of "
            f"{listed([paths[layer] for layer in found], 3)}. Pass a path."
        )
    if not found or isinstance(found[0], keras.layers.InputLayer):
        near = difflib.get_close_matches(given, paths.values(), n=1) if isinstance(given, str) else []
        hint = f"Did you mean {near[0]!r}?" if near else "model.summary(expand_nested=True) lists them."
        raise ValueError(
            f"Expected layers that {model.name!r} computes. Received: {given!r}, which it does not compute. {hint}"
        )
    return found[0]


def _divided(graph: Functional, owner: keras.Layer) -> SegmentedGraph | None:
    """Returns the graph in the segments that keep the least; None if that saves nothing, or Keras cannot cut it.

    Kept is what crosses from one segment to a later one, and what one segment computes while its gradient is computed.
    For n equal layers that makes about √n segments.
    """
    if not CUTS_GRAPHS:
        return None
    calls = [
        node
        for depth in sorted(graph._nodes_by_depth, reverse=True)
        for node in graph._nodes_by_depth[depth]
        if not node.is_input
    ]
    segments = [calls[begin:end] for begin, end in pairwise(_least_kept(calls, graph))]
    return SegmentedGraph(graph, _functions(segments, graph), owner) if len(segments) > 1 else None


def _least_kept(calls: Sequence[Any], graph: Functional) -> list[int]:
    """The places that divide the calls best: indices of the first call of each segment, and the end."""
    last_use = {id(tensor): index for index, call in enumerate(calls) for tensor in call.input_tensors}
    kept_anyway = {id(tensor) for tensor in (*graph.inputs, *graph.outputs)}
    returned = [
        [(_bytes([tensor]), last_use.get(id(tensor), -1)) for tensor in call.outputs if id(tensor) not in kept_anyway]
        for call in calls
    ]
    # Each layer inside another is taken to compute as much as that returns.
    computed = [_bytes(call.outputs) * max(1, _layers_in(call.operation)) for call in calls]
    counts = range(1, 2 * math.isqrt(len(calls)) + 2)
    return min(_least_crossing(returned, computed, sum(computed) / count) for count in counts)[-1]


def _least_crossing(
    returned: Sequence[Sequence[tuple[int, int]]], computed: Sequence[int], most: float
) -> tuple[int, int, list[int]]:
    """Divides calls into segments that compute at most so many bytes each, or consist of a single call.

    Args:
        returned: For each call, bytes and last use of the tensors it returns.
        computed: For each call, bytes of all it computes.
        most: Most bytes a segment computes.

    Returns:
        Bytes kept, the number of segments plus one, and their places.
    """
    best = [(0, 0, 0)]  # up to each call: bytes that cross, segments, where the last one begins
    for end in range(1, len(computed) + 1):
        options: list[tuple[int, int, int]] = []
        inside = crossing = 0
        for begin in range(end - 1, -1, -1):
            inside += computed[begin]
            if inside > most and options:
                break
            crossing += sum(size for size, last_use in returned[begin] if last_use >= end)
            options.append((best[begin][0] + crossing, best[begin][1] + 1, begin))
        best.append(min(options))
    places = [len(computed)]
    while places[-1]:
        places.append(best[places[-1]][2])
    places.reverse()
    largest = max(sum(computed[begin:end]) for begin, end in pairwise(places))
    return best[-1][0] + largest, len(places), places


def _bytes(tensors: Iterable[keras.KerasTensor]) -> int:
    """Their size, taking unknown dimensions as 1."""
    return sum(math.prod(size or 1 for size in tensor.shape) * tf.as_dtype(tensor.dtype).size for tensor in tensors)


def _layers_in(operation: Any) -> int:
    """How many layers an operation consists of, without those that hold them."""
    inner = operation._flatten_layers() if isinstance(operation, keras.Layer) else ()
    return sum(not (layer._layers or isinstance(layer, keras.layers.InputLayer)) for layer in inner)


def _functions(segments: Sequence[Sequence[Any]], graph: Functional) -> list[keras.Function]:
    functions = []
    for index, calls in enumerate(segments):
        made = {id(tensor): tensor for call in calls for tensor in call.outputs}
        used = {id(tensor): tensor for call in calls for tensor in call.input_tensors}
        later = {id(tensor) for segment in segments[index + 1 :] for call in segment for tensor in call.input_tensors}
        later |= {id(tensor) for tensor in graph.outputs}
        functions.append(
            keras.Function(
                [tensor for key, tensor in used.items() if key not in made],
                [tensor for key, tensor in made.items() if key in later],
                name=calls[-1].operation.name,
            )
        )
    return functions
