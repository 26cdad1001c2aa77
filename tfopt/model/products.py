"""The calls of a model's layers and the matrix products in them, read from shapes without running anything."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import singledispatch
from typing import Any

import keras

Shape = tuple[int | None, ...]
_LAYERS = keras.layers
_ATTENTION = _LAYERS.MultiHeadAttention | _LAYERS.GroupQueryAttention
# Layers whose weights, of two dimensions or more, are looked up or multiplied element-wise.
_NO_KERNEL = _LAYERS.Embedding | _LAYERS.LayerNormalization | _LAYERS.RMSNormalization | _LAYERS.PReLU


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
        """The dtype the layer multiplies in: quantization and a head's own dtype override its policy.

        Keras casts no embeddings to the compute dtype, so a reversible one multiplies in that of its variable unless
        it has a `reverse_dtype`.
        """
        layer = self.layer
        reversible = isinstance(layer, _LAYERS.ReversibleEmbedding)
        return layer.quantization_mode or (
            layer.reverse_dtype or layer.variable_dtype if reversible else layer.compute_dtype
        )


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


@dataclass(frozen=True, slots=True)
class Dimension:
    """A dimension of a matrix product."""

    name: str
    """Its role in the layer, such as "inputs"."""
    size: int | None
    """None if the shapes leave it open."""
    step: int = 1
    """The least it can grow by: one more example adds a row for each of its positions."""

    def padded(self, multiple: int) -> int:
        """The next size divisible by `multiple`; the size must be known."""
        multiple = math.lcm(self.step, multiple)
        return -(-(self.size or 0) // multiple) * multiple


@dataclass(frozen=True, slots=True)
class Products:
    """The matrix products of one call of a layer, as often as it runs."""

    dimensions: tuple[Dimension, ...]
    """Dimensions that should be multiples for Tensor Cores; empty if no part of the work is a matrix product."""
    terms: tuple[tuple[str | int | None, ...], ...]
    """For each product, the factors of its multiply-adds: numbers, names of dimensions, None for an unknown size."""

    @property
    def multiply_adds(self) -> int | None:
        """Multiply-adds of the forward pass, None if a size is unknown. The backward pass takes twice as many."""
        sizes = {dimension.name: dimension.size for dimension in self.dimensions}
        factors = [[_size(factor, sizes) for factor in term] for term in self.terms]
        known = [[factor for factor in term if factor is not None] for term in factors]
        return sum(map(math.prod, known)) if known == factors else None

    def at_least(self, name: str = "", size: int = 0) -> int:
        """Multiply-adds with each unknown size taken as one and the named dimension, if any, as `size`."""
        sizes = {dimension.name: dimension.size for dimension in self.dimensions} | {name: size}
        return sum(math.prod(_size(factor, sizes) or 1 for factor in term) for term in self.terms)


def has_kernel(layer: keras.Layer) -> bool:
    """Whether a layer has weights that it may multiply matrices with."""
    return not isinstance(layer, _NO_KERNEL) and any(len(weight.shape) > 1 for weight in layer._trainable_variables)


def matrix_products(call: LayerCall) -> Products | None:
    """The matrix products of a layer's call, without those of layers inside it; None if it is not known to have any."""
    found = _products(call.layer, call.shapes) if call.shapes else None
    return found and replace(found, terms=tuple((call.times, *term) for term in found.terms))


@singledispatch
def _products(layer: keras.Layer, shapes: Sequence[Shape]) -> Products | None:
    return None


@_products.register(_LAYERS.Dense)
def _dense(layer: Any, shapes: Sequence[Shape]) -> Products:
    return _product(shapes[0], layer.units)


@_products.register(_LAYERS.EinsumDense)
def _einsum_dense(layer: Any, shapes: Sequence[Shape]) -> Products | None:
    inputs, kernel, output = layer.equation.replace("->", ",").split(",")
    if not set(inputs) & set(kernel) - set(output) or not set(kernel) & set(output) - set(inputs):
        return None  # nothing is summed, or only a vector comes out
    size: dict[str, int | None] = dict(zip(kernel, layer._kernel.shape, strict=True))
    rows = _rows([length for letter, length in _lettered(inputs, shapes[0]) if letter not in kernel])
    summed = _axes("inputs", [size[letter] for letter in kernel if letter in inputs and letter not in output])
    outputs = _axes("outputs", [size[letter] for letter in kernel if letter not in inputs])
    apart = [size[letter] for letter in kernel if letter in inputs and letter in output]  # a kernel for each
    return Products((rows, summed, outputs), ((rows.name, summed.name, outputs.name, *apart),))


@_products.register(_LAYERS.ReversibleEmbedding)
def _reversible_embedding(layer: Any, shapes: Sequence[Shape]) -> Products | None:
    if len(shapes[0]) <= len(built_shapes(layer)[0]):
        return None  # called on tokens: a gather
    return _product(shapes[0], layer.input_dim)


def _convolution(layer: Any, shapes: Sequence[Shape]) -> Products:
    channels = _channels(layer, shapes[0])
    groups = getattr(layer, "groups", 1)
    # A transposed convolution multiplies at each position of its input.
    transposed = isinstance(layer, _LAYERS.Conv1DTranspose | _LAYERS.Conv2DTranspose | _LAYERS.Conv3DTranspose)
    where = shapes[0] if transposed else layer.compute_output_shape(shapes[0])
    work = (*_positions(layer, where), *layer.kernel_size)
    if channels is not None and groups == channels > 1:
        return Products((), ((*work, layer.filters),))
    of = " a group" if groups > 1 else ""
    inner = Dimension(f"input channels{of}", channels and channels // groups)
    outer = Dimension(f"output channels{of}", layer.filters // groups)
    return Products((inner, outer), ((groups, *work, inner.name, outer.name),))


for _kind in ("Conv1D", "Conv2D", "Conv3D", "Conv1DTranspose", "Conv2DTranspose", "Conv3DTranspose"):
    _products.register(getattr(_LAYERS, _kind), _convolution)


@_products.register(_LAYERS.DepthwiseConv1D)
@_products.register(_LAYERS.DepthwiseConv2D)
def _depthwise(layer: Any, shapes: Sequence[Shape]) -> Products:
    where = _positions(layer, layer.compute_output_shape(shapes[0]))
    return Products((), ((*where, *layer.kernel_size, _channels(layer, shapes[0]), layer.depth_multiplier),))


@_products.register(_LAYERS.SeparableConv1D)
@_products.register(_LAYERS.SeparableConv2D)
def _separable(layer: Any, shapes: Sequence[Shape]) -> Products:
    channels = _channels(layer, shapes[0])
    inner = Dimension("input channels", channels and channels * layer.depth_multiplier)
    outer = Dimension("output channels", layer.filters)
    where = _positions(layer, layer.compute_output_shape(shapes[0]))
    return Products((inner, outer), ((*where, *layer.kernel_size, inner.name), (*where, inner.name, outer.name)))


@_products.register(_LAYERS.MultiHeadAttention)
def _attention(layer: Any, shapes: Sequence[Shape]) -> Products:
    axes = layer._attention_axes
    others = [size for axis, size in enumerate(shapes[0][:-1]) if axis not in axes]
    lengths = [_product_of([shape[axis] for axis in axes]) for shape in shapes[:2]]
    return _scores(lengths, layer.key_dim, layer.value_dim, (*others, layer.num_heads))


@_products.register(_LAYERS.GroupQueryAttention)
def _grouped_attention(layer: Any, shapes: Sequence[Shape]) -> Products:
    lengths = [shape[1] for shape in shapes[:2]]
    return _scores(lengths, layer.head_dim, layer.head_dim, (shapes[0][0], layer.num_query_heads))


@_products.register(_LAYERS.Attention)
def _dot_attention(layer: Any, shapes: Sequence[Shape]) -> Products:
    return _scores([shape[1] for shape in shapes[:2]], shapes[0][-1], shapes[1][-1], (shapes[0][0],))


def _scores(lengths: list[int | None], key: int | None, value: int | None, outer: Shape) -> Products:
    """Queries by keys, and scores by values."""
    query, keys = (
        Dimension(name, length) for name, length in zip(("query length", "key length"), lengths, strict=True)
    )
    sizes = (
        [Dimension("head size", key)] if key == value else [Dimension("key size", key), Dimension("value size", value)]
    )
    terms = tuple((*outer, query.name, keys.name, size.name) for size in (sizes[0], sizes[-1]))
    return Products((query, keys, *sizes), terms)


def _cell(layer: Any, shapes: Sequence[Shape]) -> Products:
    gates = {_LAYERS.LSTMCell: 4, _LAYERS.GRUCell: 3, _LAYERS.SimpleRNNCell: 1}
    count = next(number for kind, number in gates.items() if isinstance(layer, kind))
    batch, inputs = Dimension("batch", shapes[0][0]), Dimension("inputs", shapes[0][-1])
    units = Dimension("units", layer.units)
    fed, recurrent = (count, "batch", "inputs", "units"), (count, "batch", "units", "units")
    return Products((batch, inputs, units), (fed, recurrent))


for _kind in ("LSTMCell", "GRUCell", "SimpleRNNCell"):
    _products.register(getattr(_LAYERS, _kind), _cell)


def _product(shape: Shape, units: int) -> Products:
    rows, inputs, outputs = _rows(shape[:-1]), Dimension("inputs", shape[-1]), Dimension("outputs", units)
    return Products((rows, inputs, outputs), ((rows.name, inputs.name, outputs.name),))


def _rows(shape: Sequence[int | None]) -> Dimension:
    """The batch times the positions of a sequence or image."""
    positions = _product_of(shape[1:])
    name = "batch" if positions == 1 else "batch × positions"
    return Dimension(name, _product_of(shape), positions or 1)


def _axes(name: str, sizes: Sequence[int | None]) -> Dimension:
    """Axes that enter a product as one, such as heads and head size; only the last is free to grow."""
    if len(sizes) < 2:
        return Dimension(name, _product_of(sizes))
    return Dimension(f"{name} ({' × '.join(map(str, sizes))})", _product_of(sizes), _product_of(sizes[:-1]) or 1)


def _lettered(letters: str, shape: Shape) -> list[tuple[str, int | None]]:
    """The axes of an einsum's operand, those of an ellipsis numbered."""
    before, dots, after = letters.partition("...")
    between = [str(axis) for axis in range(len(shape) - len(before) - len(after))] if dots else []
    return list(zip([*before, *between, *after], shape, strict=True))


def _channels(layer: Any, shape: Shape) -> int | None:
    return shape[1 if layer.data_format == "channels_first" else -1]


def _positions(layer: Any, shape: Shape) -> Shape:
    """The batch and the positions of an image or a sequence, without its channels."""
    return (shape[0], *shape[2:]) if layer.data_format == "channels_first" else tuple(shape[:-1])


def _product_of(sizes: Sequence[int | None]) -> int | None:
    """None if any size is unknown."""
    known = [size for size in sizes if size is not None]
    return math.prod(known) if len(known) == len(sizes) else None


def _size(factor: str | int | None, sizes: Mapping[str, int | None]) -> int | None:
    return sizes[factor] if isinstance(factor, str) else factor
