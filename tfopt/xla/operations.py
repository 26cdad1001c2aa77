"""The operations of a traced step that XLA has no kernel for, and the layers they are in."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.framework import kernels

from tfopt.xla.obstacles import Obstacle

_PIPELINE = "in the input pipeline (dataset.map)"
# The first pattern that the operation's type matches; what they have in common is that XLA compiles numbers only.
_REMEDIES = (
    ("PyFunc", f"Write it with TensorFlow or keras.ops operations, or run it {_PIPELINE}."),
    ("Print|StringFormat", "Take the print out of the step: a callback can print what `fit` logs."),
    (
        "Bicubic|Lanczos|ResizeArea|ScaleAndTranslate",
        f"Resize bilinearly or by nearest neighbours, or do it {_PIPELINE}.",
    ),
    ("CropAndResize|ImageProjective", f"Transform images {_PIPELINE}, or slice and resize bilinearly."),
    ("Decode|Encode|Parse|ReadFile", f"Read and decode {_PIPELINE}."),
    ("String|Regex|Lookup|Hash", f"Turn text into numbers {_PIPELINE}."),
    ("Cudnn", "Make the layer with use_cudnn=False."),
    ("Summary", "Write summaries from a callback."),
)
_OTHERWISE = f"Do it {_PIPELINE} where it needs no weights, or write it with other operations; or leave XLA off."


@contextmanager
def recorded_scopes() -> Iterator[dict[str, keras.Layer]]:
    """The name scopes that layers open while something is traced, and the layers.

    A scope's name alone does not tell: Keras opens each twice, TensorFlow numbers the second, so that `dense_1` may be
    the first layer `dense` or another one of that name.
    """
    original = keras.layers.Layer._open_name_scope
    layers: dict[str, keras.Layer] = {}

    @contextmanager
    def opened(layer: keras.Layer) -> Iterator[Any]:
        with original(layer) as scope:
            layers[tf.get_current_name_scope()] = layer
            yield scope

    keras.layers.Layer._open_name_scope = opened
    try:
        yield layers
    finally:
        keras.layers.Layer._open_name_scope = original


def unsupported_operations(graph: tf.Graph, scopes: Mapping[str, keras.Layer], device: str) -> tuple[Obstacle, ...]:
    """The operations of a graph, and of the functions it calls, that XLA has no kernel for.

    Args:
        graph: A traced step. Ask XLA for its HLO once before: it registers its kernels at first use.
        scopes: From `recorded_scopes`.
        device: "CPU" or "GPU".
    """
    found: dict[tuple[str, str | None], Obstacle] = {}
    for operation, node, layer in _walk(graph.as_graph_def(), scopes):
        if not _has_kernel(operation, f"XLA_{device}_JIT"):
            found.setdefault((operation, layer), _obstacle(operation, node, layer))
    return tuple(found.values())


def layer_of(node: str, scopes: Mapping[str, keras.Layer]) -> str | None:
    """The path of the innermost layer whose scope a node's name begins with, of its gradient, too."""
    parts = node.removeprefix("gradient_tape/").split("/")
    for length in range(len(parts) - 1, 0, -1):
        layer = scopes.get("/".join(parts[:length]))
        if layer is not None:
            return layer.path or layer.name
    return None


def _obstacle(operation: str, node: str, layer: str | None) -> Obstacle:
    """An operation without a kernel, as an obstacle."""
    where = f"in layer {layer}" if layer else "outside every layer"
    return Obstacle(
        kind="operation",
        found=f"XLA has no kernel for {operation} {where} ({node})",
        remedy=next((remedy for pattern, remedy in _REMEDIES if re.search(pattern, operation)), _OTHERWISE),
        layer=layer,
        operation=operation,
    )


def _walk(definition: Any, scopes: Mapping[str, keras.Layer]) -> Iterator[tuple[str, str, str | None]]:
    """Type, name and layer of every operation; those of a function are in the layer that calls it."""
    functions = {function.signature.name: function for function in definition.library.function}
    callers: dict[str, str | None] = {}
    pending: list[tuple[Any, str | None]] = [(definition.node, None)]
    while pending:
        nodes, caller = pending.pop()
        for node in nodes:
            layer = layer_of(node.name, scopes) or caller
            for name in sorted({node.op, *_named_functions(node)} & functions.keys() - callers.keys()):
                # A function's gradient is called outside every scope.
                forward = functions[name].attr["forward_function_name"].s.decode()
                callers[name] = layer or callers.get(forward)
                pending.append((functions[name].node_def, callers[name]))
            # A placeholder is an argument of the step.
            if node.op not in functions and node.op != "Placeholder":
                yield node.op, node.name, layer


def _named_functions(node: Any) -> Iterator[str]:
    for attribute in node.attr.values():
        for function in (attribute.func, *attribute.list.func):
            yield function.name


def _has_kernel(operation: str, device: str) -> bool:
    return any(kernel.device_type == device for kernel in kernels.get_registered_kernels_for_op(operation).kernel)
