"""The floating-point operations of a training step on one example, counted from the shapes of a model's layers."""

import collections
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfopt.precision.layer_calls import Shape, calls
from tfopt.precision.matrix_products import products

_LAYERS = keras.layers
# A lookup, and what works by element.
_NO_PRODUCTS = (
    _LAYERS.Embedding,
    _LAYERS.LayerNormalization,
    _LAYERS.RMSNormalization,
    _LAYERS.GroupNormalization,
    _LAYERS.PReLU,
)
# Products of no layer's weights, which nothing counts.
_UNCOUNTED = (_LAYERS.Dot, _LAYERS.MelSpectrogram, _LAYERS.STFTSpectrogram)
_UNCOUNTED_OPERATIONS = {
    *("Dot", "Einsum", "Inner", "Matmul", "Outer", "Tensordot", "Vdot"),
    *("Conv", "ConvTranspose", "DepthwiseConv", "SeparableConv", "DotProductAttention"),
}
# TensorFlow's operations for one matrix product or convolution.
_GRAPH_PRODUCTS = {
    *("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum", "XlaDot", "XlaDotV2"),
    *("Conv2D", "Conv3D", "Conv2DBackpropInput", "Conv3DBackpropInputV2", "DepthwiseConv2dNative"),
    *("XlaConv", "XlaConvV2", "XlaCallModule", "CudnnRNNV3"),
}


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """Operations of a training step on one example, a multiply-add being two.

    Attributes:
        by_dtype: By the dtype that they run in.
        unknown: The paths of layers whose operations are not known, with the reason.
    """

    by_dtype: dict[str, int]
    unknown: tuple[str, ...]

    @property
    def per_example(self) -> int | None:
        """All of them; None where some are unknown, or there are none."""
        return None if self.unknown else sum(self.by_dtype.values()) or None

    @property
    def dtype(self) -> str | None:
        """The one that most run in; None where none is known."""
        return max(self.by_dtype, key=self.by_dtype.__getitem__, default=None)


def model_flops(model: keras.Model) -> ModelFlops:
    """Counts the matrix products and convolutions of a built model; what works by element is not counted.

    A backward pass takes twice the forward pass's operations: for the gradient of the weights and that of the inputs,
    the first layer's too, as is the convention. A layer with frozen weights has only the second, and only where a layer
    that is called before it trains.

    Source: Kaplan et al., "Scaling Laws for Neural Language Models", 2020, section 2.1.
    """
    by_dtype: collections.Counter[str] = collections.Counter()
    unknown: dict[str, str] = {}
    if type(model).train_step is not keras.Model.train_step:
        unknown[model.name] = "a train_step of its own, which may call layers more than once"
    trains_before = False
    for call in calls(model, 1):
        layer, path = call.layer, call.layer.path or call.layer.name
        own = any(weight.trainable for weight in layer._trainable_variables) and layer.trainable
        found = products(layer, call.shapes) if call.shapes else None
        if found is None or getattr(layer, "lora_enabled", False):
            if reason := _unknown(layer, call.shapes):
                unknown[path] = reason
        elif (multiply_adds := found.multiply_adds()) is None or call.times is None:
            unknown[path] = "a length or size of its input is None"
        else:
            # Attention's products have no weights, but multiply what its projections made.
            inner = not layer._trainable_variables and (trains_before or bool(layer.trainable_weights))
            passes = 3 if own or inner else 1 + trains_before
            by_dtype[_dtype(layer)] += 2 * multiply_adds * call.times * passes
        trains_before = trains_before or own
    return ModelFlops(dict(by_dtype), tuple(f"{path} ({reason})" for path, reason in unknown.items()))


def _dtype(layer: keras.Layer) -> str:
    """What a layer multiplies in: quantization and a head's own dtype come before its policy."""
    return getattr(layer, "reverse_dtype", None) or layer.quantization_mode or layer.compute_dtype


def _unknown(layer: keras.Layer, shapes: Sequence[Shape]) -> str | None:
    """Why nobody knows the operations of a layer without counted products; None for one that has none."""
    if getattr(layer, "lora_enabled", False):
        return "LoRA"
    for operation in _operations(layer):
        if type(operation).__name__ in _UNCOUNTED_OPERATIONS:
            return f"keras.ops: {operation.name}"
    if isinstance(layer, _LAYERS.Lambda) or type(layer).call.__module__.partition(".")[0] != "keras":
        return None if _accounts_for_its_graph(layer, shapes) else "products in its own call"
    has_kernel = any(len(weight.shape) > 1 for weight in layer._trainable_variables)
    if isinstance(layer, _UNCOUNTED) or (has_kernel and not isinstance(layer, _NO_PRODUCTS)):
        return type(layer).__name__
    return None


def _operations(layer: Any) -> list[Any]:
    """The operations of a Functional graph that are no layers."""
    graph = getattr(getattr(layer, "_functional", layer), "_nodes_by_depth", None) or {}
    found = [node.operation for nodes in graph.values() for node in nodes]
    return [operation for operation in found if not isinstance(operation, keras.Layer)]


def _accounts_for_its_graph(layer: keras.Layer, shapes: Sequence[Shape]) -> bool:
    """Whether the graph of a layer with a call of its own has no products but those of the layers inside it."""
    counted = 0
    for call in calls(layer, 1, shapes):
        found = products(call.layer, call.shapes) if call.shapes else None
        counted += len(found.terms) if found else 0
    try:
        return _graph_products(layer) == counted
    except Exception:  # noqa: BLE001  a call that needs more than its inputs is not known
        return False


def _graph_products(layer: keras.Layer) -> int:
    """How many matrix products and convolutions TensorFlow's graph of a layer's call has."""

    def call(*inputs: Any) -> Any:
        with keras.StatelessScope():  # so that seeds and losses stay as they are
            return layer(*inputs)

    specs = [_specs(structure) for structure in layer._build_shapes_dict.values()]
    definition = tf.function(call, autograph=False).get_concrete_function(*specs).graph.as_graph_def()
    nodes = [*definition.node, *(node for function in definition.library.function for node in function.node_def)]
    return sum(node.op in _GRAPH_PRODUCTS for node in nodes)


def _specs(shapes: Any) -> Any:
    """Specs for one example of a structure of shapes."""
    if isinstance(shapes, dict):
        return {name: _specs(inner) for name, inner in shapes.items()}
    if shapes and isinstance(shapes[0], list | tuple | dict):
        return [_specs(inner) for inner in shapes]
    return tf.TensorSpec((1, *shapes[1:]), tf.float32)
