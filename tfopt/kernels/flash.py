"""cuDNN's attention, forward and backward, as operations of TensorFlow."""

from typing import Any, NoReturn

import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla

from tfopt.errors import UnsupportedError
from tfopt.kernels.stablehlo import AttentionSpec, Type, backward_module, forward_module


def flash_attention(query: tf.Tensor, key: tf.Tensor, value: tf.Tensor, *, causal: bool, scale: float) -> tf.Tensor:
    """Attention that never keeps the scores: neither in the forward pass nor for the backward pass.

    It checks nothing: whoever calls it has found no obstacle (`tfopt.kernels.obstacles`).

    Args:
        query: (batch, query length, heads, size), bfloat16 or float16, all four fixed.
        key: (batch, key length, heads, size), of the same type.
        value: As the key.
        causal: Whether a position attends to itself and those before it alone.
        scale: Factor on query · key.

    Returns:
        The output, of the query's shape and type.

    Raises:
        tfopt.errors.UnsupportedError: A gradient of its gradient is asked for.
    """
    batch, query_length, heads, size = query.shape
    spec = AttentionSpec(
        batch=batch,
        query_length=query_length,
        key_length=key.shape[1],
        heads=heads,
        size=size,
        dtype=query.dtype.name,
        causal=causal,
        scale=scale,
    )

    @tf.custom_gradient
    def forward(*operands: tf.Tensor) -> Any:
        output, statistic = call_module(forward_module(spec), operands, spec.forward_results)
        return output, lambda upstream: backward(*operands, statistic, upstream, output)

    @tf.custom_gradient
    def backward(*operands: tf.Tensor) -> Any:
        return call_module(backward_module(spec), operands, spec.backward_results), _no_second_gradient

    return forward(query, key, value)


def call_module(module: str, operands: tuple[tf.Tensor, ...], results: tuple[Type, ...]) -> tuple[tf.Tensor, ...]:
    """Runs a module on a GPU, as part of what XLA compiles."""
    called = xla.call_module(
        operands,
        version=9,
        module=module,
        Tout=[dtype for _, dtype in results],
        Sout=[shape for shape, _ in results],
        platforms=["CUDA"],
        # As it was run on a GPU; elsewhere XLA finds no kernel for the call and says so.
        disabled_checks=["platform"],
    )
    return tuple(called)


def _no_second_gradient(*upstreams: tf.Tensor) -> NoReturn:
    raise UnsupportedError(
        "Expected gradients of a loss. Found a gradient of cuDNN attention's gradient, which cuDNN does not have. "
        "Take the kernel back first: tfopt.kernels.undo(model); in your own layer, keras.ops.dot_product_attention."
    )
