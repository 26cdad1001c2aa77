"""FLOPs counted as operations run, without a graph: the count that ThroughputLogger's is compared with."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.internals.sources import find

_UNCOUNTED = ("Conv3D", "Cudnn", "XlaDot", "XlaConv")


def counted_flops(run: Callable[[], Any]) -> int:
    """Runs a function eagerly and returns the FLOPs of its matrix products and convolutions, a multiply-add being two.

    Shapes are those of the tensors that were there. Products that reach neither a variable nor what the function
    returns do not count: TensorFlow computes gradients that nobody needs only where it runs eagerly.
    """
    op_callbacks, _ = find("tensorflow.python.framework.op_callbacks:add_op_callback")  # there is no public way
    operations: list[tuple[list[Any], list[Any], int]] = []

    def note(op_type, inputs, attrs, outputs, op_name=None, graph=None):
        pairs = dict(zip(attrs[::2], attrs[1::2], strict=True))
        operations.append((list(inputs), list(outputs), _flops(_text(op_type), inputs, pairs, outputs)))

    tf.config.run_functions_eagerly(True)
    op_callbacks.add_op_callback(note)
    try:
        returned = run()
    finally:
        op_callbacks.remove_op_callback(note)
        tf.config.run_functions_eagerly(False)
    needed = {id(tensor) for tensor in tf.nest.flatten(returned)}
    total = 0
    for inputs, outputs, flops in reversed(operations):
        if not outputs or any(id(output) in needed for output in outputs):
            needed.update(map(id, inputs))
            total += flops
    return total


def _flops(op_type: str, inputs: Any, attrs: dict[Any, Any], outputs: Any) -> int:
    shapes = [tuple(tensor.shape) for tensor in (*inputs, *outputs)]
    if op_type in ("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"):
        transposed = attrs.get("transpose_a") or attrs.get("adj_x")
        return 2 * _size(shapes[-1]) * shapes[0][-2 if transposed else -1]
    if op_type == "Einsum":
        equation = _text(attrs["equation"])
        terms = equation.partition("->")[0].split(",")
        if "." in equation or len(terms) == 1:
            raise NotImplementedError(
                f"Expected an einsum of two or more operands, without an ellipsis. Found {equation!r}."
            )
        sizes = {
            label: size
            for term, shape in zip(terms, shapes, strict=False)
            for label, size in zip(term, shape, strict=True)
        }
        return 2 * _size(sizes.values())
    if op_type in ("Conv2D", "DepthwiseConv2dNative"):
        return _convolution(op_type, shapes[1], shapes[-1])
    if op_type in ("Conv2DBackpropInput", "DepthwiseConv2dNativeBackpropInput"):
        return _convolution(op_type, shapes[1], shapes[2])
    if op_type in ("Conv2DBackpropFilter", "DepthwiseConv2dNativeBackpropFilter"):
        return _convolution(op_type, shapes[-1], shapes[2])
    if op_type.startswith(_UNCOUNTED) or "PartitionedCall" in op_type or op_type == "Conv":
        raise NotImplementedError(f"Expected operations that are counted here. Found {op_type}. Count it in _flops.")
    return 0


def _convolution(op_type: str, kernel: Any, outputs: Any) -> int:
    """Each output is a sum over the window, and over the channels unless each has its own window."""
    depthwise = op_type.startswith("Depthwise")
    return 2 * _size(outputs) * _size(kernel[:2] if depthwise else kernel[:3])


def _text(given: Any) -> str:
    return given.decode() if isinstance(given, bytes) else given


def _size(shape: Any) -> int:
    return int(np.prod(list(shape), dtype="int64"))
