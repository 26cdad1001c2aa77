"""The calls of the layers inside a built model, and the shapes that each gets, without running any."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras

Shape = tuple[int | None, ...]
_LAYERS = keras.layers
_ATTENTION = _LAYERS.MultiHeadAttention | _LAYERS.GroupQueryAttention


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a layer within a model.

    Attributes:
        layer: The layer.
        shapes: Its inputs' shapes.
        times: How often it runs so, as a recurrent cell does; None where the number of steps is unknown.
    """

    layer: keras.Layer
    shapes: tuple[Shape, ...]
    times: int | None


def calls(layer: keras.Layer, batch_size: int, shapes: Sequence[Shape] = (), times: int | None = 1) -> Iterator[Call]:
    """Yields each call of a built layer and of those inside it, without running any.

    In a Functional graph a layer is called once for each of its nodes. Elsewhere it counts once, with the shapes that
    it was built for; the layers inside attention count with those of its call. The first dimension of each shape is
    taken to be the batch.
    """
    yield Call(layer, tuple((batch_size, *shape[1:]) for shape in shapes), times)
    steps = shapes[0][1] if shapes and isinstance(layer, _LAYERS.RNN | _LAYERS.TimeDistributed) else 1
    inner_times = times * steps if times is not None and steps is not None else None
    for inner, inner_shapes in _inner(layer, shapes):
        yield from calls(inner, batch_size, inner_shapes, inner_times)


def _inner(layer: keras.Layer, shapes: Sequence[Shape]) -> Iterator[tuple[keras.Layer, list[Shape]]]:
    graph = getattr(getattr(layer, "_functional", layer), "_nodes_by_depth", None)
    if graph:
        for node in (node for depth in sorted(graph, reverse=True) for node in graph[depth]):
            if isinstance(node.operation, keras.Layer):
                yield node.operation, _given_shapes(node)
        return
    for inner in layer._flatten_layers(include_self=False, recursive=False):
        if isinstance(layer, _ATTENTION):
            yield inner, _shapes_in_attention(layer, inner, shapes)
        else:
            yield inner, built_shapes(inner)


def _given_shapes(node: Any) -> list[Shape]:
    """The shapes that a layer is called with in a Functional graph; of several by name, in the order of its build."""
    layer = node.operation
    names = [name.removesuffix("_shape") for name in layer._build_shapes_dict or ()]
    if len(names) < 2:
        return [tuple(tensor.shape) for tensor in node.input_tensors]
    given = layer._call_signature.bind(*node.arguments.args, **node.arguments.kwargs).arguments
    tensors = [given.get(name) for name in names]
    known = all(isinstance(tensor, keras.KerasTensor) for tensor in tensors)
    return [tuple(tensor.shape) for tensor in tensors] if known else built_shapes(layer)


def _shapes_in_attention(layer: Any, inner: keras.Layer, shapes: Sequence[Shape]) -> list[Shape]:
    """Those of a projection: it was built for the first call's lengths, and the one of the output for None."""
    query, value, key = (*shapes, shapes[1])[:3]
    if inner is layer._output_dense:
        return [(*query[:-1], *built_shapes(inner)[0][-2:])]
    projected = {layer._query_dense: query, layer._value_dense: value, layer._key_dense: key}
    return [projected[inner]] if inner in projected else built_shapes(inner)


def built_shapes(layer: keras.Layer) -> list[Shape]:
    """The shapes that a layer was built for."""
    given = [shape for shape in (layer._build_shapes_dict or {}).values() if isinstance(shape, Sequence)]
    nested = [shape for shape in given if shape and isinstance(shape[0], Sequence)]
    return [tuple(shape) for shape in (nested[0] if nested else given)]
