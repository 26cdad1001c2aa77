"""FLOPs of a training step on one example, counted from the shapes of a model's layers."""

import collections
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfopt.model.layers import graph_operations
from tfopt.model.products import LayerCall, graph_nodes, has_kernel, layer_calls, matrix_products

_LAYERS = keras.layers
# Products that `matrix_products` does not count.
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
    """FLOPs of a training step on one example; a multiply-add counts as two."""

    by_dtype: dict[str, int]
    unknown: tuple[str, ...]
    """Paths of layers whose FLOPs are unknown, each with the reason."""

    @property
    def per_example(self) -> int | None:
        """The total; None if some are unknown or there are none."""
        return None if self.unknown else sum(self.by_dtype.values()) or None

    @property
    def dtype(self) -> str | None:
        """The dtype of most FLOPs; None if none are known."""
        return max(self.by_dtype, key=self.by_dtype.__getitem__, default=None)


def model_flops(model: keras.Model) -> ModelFlops:
    """Counts the matrix products and convolutions of a built model; element-wise work is not counted.

    The backward pass takes twice the operations of the forward pass, for the gradients of the weights and of the
    inputs, by convention those of the first layer too. A frozen layer has only the latter, and only if a layer called
    before it trains.

    Source: Kaplan et al., "Scaling Laws for Neural Language Models", 2020, section 2.1.
    """
    by_dtype: collections.Counter[str] = collections.Counter()
    unknown: dict[str, str] = {}
    if type(model).train_step is not keras.Model.train_step:
        unknown[model.name] = "a train_step of its own, which may call layers more than once"
    trains_before = False
    for call in layer_calls(model, 1):
        layer = call.layer
        own = any(weight.trainable for weight in layer._trainable_variables) and layer.trainable
        found = matrix_products(call)
        if found is None or getattr(layer, "lora_enabled", False):
            if reason := _unknown(call):
                unknown[call.path] = reason
        elif found.multiply_adds is None:
            unknown[call.path] = "a length or size of its input is None"
        else:
            # Attention's products have no weights, but multiply what its projections made.
            inner = not layer._trainable_variables and (trains_before or bool(layer.trainable_weights))
            passes = 3 if own or inner else 1 + trains_before
            by_dtype[call.dtype] += 2 * found.multiply_adds * passes
        trains_before = trains_before or own
    return ModelFlops(dict(by_dtype), tuple(f"{path} ({reason})" for path, reason in unknown.items()))


def _unknown(call: LayerCall) -> str | None:
    """Why the FLOPs of a layer without counted products are unknown; None if it has none."""
    layer: Any = call.layer
    if getattr(layer, "lora_enabled", False):
        return "LoRA"
    for operation in (node.operation for node in graph_nodes(layer)):
        if not isinstance(operation, keras.Layer) and type(operation).__name__ in _UNCOUNTED_OPERATIONS:
            return f"keras.ops: {operation.name}"
    if isinstance(layer, _LAYERS.Lambda) or type(layer).call.__module__.partition(".")[0] != "keras":
        return None if _counts_all_products(call) else "products in its own call"
    return type(layer).__name__ if isinstance(layer, _UNCOUNTED) or has_kernel(layer) else None


def _counts_all_products(call: LayerCall) -> bool:
    """Whether the graph of a custom layer has no products but those of the layers inside it."""
    found = [matrix_products(inner) for inner in layer_calls(call.layer, 1, call.shapes)]
    counted = sum(len(products.terms) for products in found if products)
    try:
        return _products_in_graph(call.layer) == counted
    except Exception:  # noqa: BLE001  a call that needs more than its inputs stays unknown
        return False


def _products_in_graph(layer: keras.Layer) -> int:
    """How many matrix products and convolutions TensorFlow's graph of a layer's call has."""

    def call(*inputs: Any) -> Any:
        with keras.StatelessScope():  # so that seeds and losses stay unchanged
            return layer(*inputs)

    def one_example(shape: Sequence[int | None]) -> tf.TensorSpec:
        return tf.TensorSpec((1, *shape[1:]), tf.float32)

    specs = [keras.tree.map_shape_structure(one_example, shapes) for shapes in layer._build_shapes_dict.values()]
    graph = tf.function(call, autograph=False).get_concrete_function(*specs).graph
    return sum(node.op in _GRAPH_PRODUCTS for node in graph_operations(graph))
