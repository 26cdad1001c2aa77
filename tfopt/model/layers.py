"""The layers of a model: their paths, and each of their calls with its shapes, without running any."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras

Shape = tuple[int | None, ...]
_LAYERS = keras.layers
_ATTENTION = _LAYERS.MultiHeadAttention | _LAYERS.GroupQueryAttention


def layer_paths(model: keras.Model) -> dict[keras.Layer, str]:
    """Maps every layer to its path: names from the model down, without the model's own; the model to its name.

    If a layer in it has the model's name too, the model's path begins with a slash: "/net". Keras' own `layer.path` is
    None before the layer is built, and identical for two layers of nested models.
    """
    inside = model._flatten_layers(include_self=False, recursive=False)
    paths = {model: "/" * any(layer.name == model.name for layer in inside) + model.name}

    def walk(parent: keras.Layer, prefix: str) -> None:
        for layer in parent._flatten_layers(include_self=False, recursive=False):
            if layer not in paths:
                paths[layer] = prefix + layer.name
                walk(layer, paths[layer] + "/")

    walk(model, "")
    return paths


@dataclass(frozen=True, slots=True)
class LayerCall:
    """One call of a layer within a model."""

    layer: keras.Layer
    shapes: tuple[Shape, ...]
    """Shapes of its inputs."""
    times: int | None
    """How often it runs with these shapes, as a recurrent cell does; None if the number of steps is unknown."""

    @property
    def path(self) -> str:
        """Keras' path of the layer, or its name before it is built."""
        return self.layer.path or self.layer.name

    @property
    def dtype(self) -> str:
        """The dtype the layer multiplies in: quantization and a head's own dtype override its policy."""
        layer = self.layer
        return getattr(layer, "reverse_dtype", None) or layer.quantization_mode or layer.compute_dtype


def layer_calls(
    layer: keras.Layer, batch_size: int, shapes: Sequence[Shape] = (), times: int | None = 1
) -> Iterator[LayerCall]:
    """Yields each call of a built layer and of the layers inside it.

    In a Functional graph a layer is called once per node. Elsewhere it counts once, with the shapes it was built for;
    the layers inside attention count with those of its call. The first dimension of each shape is taken as the batch.
    """
    yield LayerCall(layer, tuple((batch_size, *shape[1:]) for shape in shapes), times)
    steps = shapes[0][1] if shapes and isinstance(layer, _LAYERS.RNN | _LAYERS.TimeDistributed) else 1
    inner_times = times * steps if times is not None and steps is not None else None
    for inner, inner_shapes in _inner(layer, shapes):
        yield from layer_calls(inner, batch_size, inner_shapes, inner_times)


def _inner(layer: keras.Layer, shapes: Sequence[Shape]) -> Iterator[tuple[keras.Layer, list[Shape]]]:
    nodes = graph_nodes(layer)
    if nodes:
        for node in nodes:
            if isinstance(node.operation, keras.Layer):
                yield node.operation, _node_shapes(node)
        return
    for inner in layer._flatten_layers(include_self=False, recursive=False):
        if isinstance(layer, _ATTENTION):
            yield inner, _shapes_in_attention(layer, inner, shapes)
        else:
            yield inner, built_shapes(inner)


def graph_nodes(layer: Any) -> list[Any]:
    """The nodes of a Functional or Sequential model's graph, in the order they run; none for other layers."""
    by_depth = getattr(getattr(layer, "_functional", layer), "_nodes_by_depth", None) or {}
    return [node for depth in sorted(by_depth, reverse=True) for node in by_depth[depth]]


def _node_shapes(node: Any) -> list[Shape]:
    """The input shapes of a call in a Functional graph; several named inputs in the order of the layer's build."""
    layer = node.operation
    names = [name.removesuffix("_shape") for name in layer._build_shapes_dict or ()]
    if len(names) < 2:
        return [tuple(tensor.shape) for tensor in node.input_tensors]
    given = layer._call_signature.bind(*node.arguments.args, **node.arguments.kwargs).arguments
    tensors = [given.get(name) for name in names]
    known = all(isinstance(tensor, keras.KerasTensor) for tensor in tensors)
    return [tuple(tensor.shape) for tensor in tensors] if known else built_shapes(layer)


def _shapes_in_attention(layer: Any, inner: keras.Layer, shapes: Sequence[Shape]) -> list[Shape]:
    """Input shapes of a projection, which was built for the first call's lengths (the output's for None)."""
    query, value, key = (*shapes, shapes[1])[:3]
    if inner is layer._output_dense:
        return [(*query[:-1], *built_shapes(inner)[0][-2:])]
    projected = {layer._query_dense: query, layer._value_dense: value, layer._key_dense: key}
    return [projected[inner]] if inner in projected else built_shapes(inner)


def built_shapes(layer: keras.Layer) -> list[Shape]:
    """The input shapes a layer was built for."""
    given = [shape for shape in (layer._build_shapes_dict or {}).values() if isinstance(shape, Sequence)]
    nested = [shape for shape in given if shape and isinstance(shape[0], Sequence)]
    return [tuple(shape) for shape in (nested[0] if nested else given)]


def graph_operations(graph: Any) -> list[Any]:
    """The node definitions of a TensorFlow graph and of every function in it."""
    definition = graph.as_graph_def()
    return [*definition.node, *(node for function in definition.library.function for node in function.node_def)]
