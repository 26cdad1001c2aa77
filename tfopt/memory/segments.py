"""Divides the graph of a Functional model into segments that run again in the backward pass, each from its inputs."""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import keras
import tensorflow as tf
from keras.src.models.functional import Functional
from keras.src.ops.function import Function

from tfopt.memory.rerunning import Part


class SegmentedGraph:
    """Replaces a graph's `_run_through_graph`: runs its segments one by one, the first `count` of them twice."""

    def __init__(self, graph: Functional, segments: Sequence[Function]) -> None:
        self.graph = graph
        self._segments = segments
        # Not the last one, since its gradient comes first.
        self.count = self.most = len(segments) - 1

    def __call__(self, inputs: Any, operation_fn: Callable[..., Any] = lambda x: x, call_fn: Any = None) -> Any:
        """Computes the outputs, as Keras' own method does."""
        tensors = dict(zip(map(id, self.graph.inputs), keras.tree.flatten(inputs), strict=True))
        for index, segment in enumerate(self._segments):

            def run(values: Any, segment: Function = segment) -> Any:
                return segment._run_through_graph(values, operation_fn, call_fn)

            twice = Part(f"the segment up to {segment.name!r}", run, self.graph)
            outputs = (twice if index < self.count else run)([tensors[id(tensor)] for tensor in segment.inputs])
            tensors.update(zip(map(id, segment.outputs), outputs, strict=True))
        outputs = [tensors[id(tensor)] for tensor in self.graph.outputs]
        return keras.tree.pack_sequence_as(self.graph._outputs_struct, outputs)


def divided(graph: Functional) -> SegmentedGraph | None:
    """Returns the graph in the segments that keep the least, or None if that saves nothing.

    Kept is what crosses from one segment to a later one, and what one segment computes while its gradient is computed.
    For n equal layers that makes about √n segments.
    """
    calls = [
        node
        for depth in sorted(graph._nodes_by_depth, reverse=True)
        for node in graph._nodes_by_depth[depth]
        if not node.is_input
    ]
    segments = [calls[begin:end] for begin, end in pairwise(_least_kept(calls, graph))]
    return SegmentedGraph(graph, _functions(segments, graph)) if len(segments) > 1 else None


def _least_kept(calls: Sequence[Any], graph: Functional) -> list[int]:
    """The places that divide the calls best: indices of the first call of each segment, and the end."""
    last_use = {id(tensor): index for index, call in enumerate(calls) for tensor in call.input_tensors}
    kept_anyway = {id(tensor) for tensor in (*graph.inputs, *graph.outputs)}
    returned = [
        [(_bytes([tensor]), last_use.get(id(tensor), -1)) for tensor in call.outputs if id(tensor) not in kept_anyway]
        for call in calls
    ]
    # Each layer inside another is taken to compute as much as that returns.
    computed = [_bytes(call.outputs) * max(1, layers_in(call.operation)) for call in calls]
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


def layers_in(operation: Any) -> int:
    """How many layers an operation consists of, without those that hold them."""
    inner = operation._flatten_layers() if isinstance(operation, keras.Layer) else ()
    return sum(not (layer._layers or isinstance(layer, keras.layers.InputLayer)) for layer in inner)


def _functions(segments: Sequence[Sequence[Any]], graph: Functional) -> list[Function]:
    functions = []
    for index, calls in enumerate(segments):
        made = {id(tensor): tensor for call in calls for tensor in call.outputs}
        used = {id(tensor): tensor for call in calls for tensor in call.input_tensors}
        later = {id(tensor) for segment in segments[index + 1 :] for call in segment for tensor in call.input_tensors}
        later |= {id(tensor) for tensor in graph.outputs}
        functions.append(
            Function(
                [tensor for key, tensor in used.items() if key not in made],
                [tensor for key, tensor in made.items() if key in later],
                name=calls[-1].operation.name,
            )
        )
    return functions
