"""cuDNN's attention as an operation with a gradient."""

from typing import Any, NoReturn

import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla

from tfopt.errors import UnsupportedError
from tfopt.kernels.cudnn.modules import AttentionSpec, Type, backward_module, forward_module


def flash_attention(
    query: tf.Tensor,
    key: tf.Tensor,
    value: tf.Tensor,
    *,
    scale: float,
    causal: bool = False,
    window: int = 0,
    bias: tf.Tensor | None = None,
    lengths: tuple[tf.Tensor, tf.Tensor] | None = None,
) -> tf.Tensor:
    """Computes attention without ever storing the scores, forward or backward; its gradient has no gradient itself.

    Call it only if `obstacles` yields nothing.

    Args:
        query: (batch, query length, heads, size).
        key: (batch, key length, key heads, size); each head serves a group of the query's.
        value: Like the key.
        scale: Factor on query · key.
        causal: Whether position i attends only to positions 0 to i.
        window: To how many of these a position attends, itself included; 0 for all. Only with `causal`.
        bias: Added to the scores, of the query's dtype: (batch or 1, heads or 1, query length, key length). Only one of
            (1, heads, …) has a gradient; others are taken for constants, such as masks.
        lengths: The numbers of queries and of keys of each example, int32 (batch). The output of what lies behind is 0.

    Returns:
        The output, of the query's shape and dtype.
    """
    spec = attention_spec(query, key, value, scale=scale, causal=causal, window=window, bias=bias, lengths=lengths)
    tensors = (query, key, value) if bias is None else (query, key, value, bias)
    sizes = lengths or ()

    @tf.custom_gradient
    def forward(*operands: tf.Tensor) -> Any:
        output, statistic = call_module(forward_module(spec), (*operands, *sizes), spec.forward_results)
        return output, lambda upstream: backward(*operands[:3], statistic, upstream, *operands[3:], output)

    @tf.custom_gradient
    def backward(*operands: tf.Tensor) -> Any:
        gradients = call_module(backward_module(spec), (*operands, *sizes), spec.backward_results)
        if spec.bias not in (None, (1, spec.heads)):  # for which JAX, too, does not ask cuDNN
            gradients = (*gradients[:3], tf.zeros_like(bias))
        return gradients, _no_second_gradient

    return forward(*tensors)


def attention_spec(
    query: tf.Tensor, key: tf.Tensor, value: tf.Tensor, *, bias: Any = None, lengths: Any = None, **options: Any
) -> AttentionSpec:
    """Returns what `flash_attention` compiles for the same arguments; `options` are `scale`, `causal` and `window`."""
    batch, query_length, heads, _ = query.shape
    return AttentionSpec(
        batch=batch,
        query_length=query_length,
        key_length=key.shape[1],
        heads=heads,
        key_heads=key.shape[2],
        size=value.shape[3],
        dtype=query.dtype.name,
        bias=None if bias is None else (bias.shape[0], bias.shape[1]),
        lengths=lengths is not None,
        **options,
    )


def call_module(module: str, operands: tuple[tf.Tensor, ...], results: tuple[Type, ...]) -> tuple[tf.Tensor, ...]:
    """Runs a module on a GPU, as part of a program that XLA compiles."""
    called = xla.call_module(
        operands,
        version=9,
        module=module,
        Tout=[dtype for _, dtype in results],
        Sout=[shape for shape, _ in results],
        platforms=["CUDA"],
        # On another platform, XLA itself reports that it has no kernel for the call.
        disabled_checks=["platform"],
    )
    return tuple(called)


def _no_second_gradient(*upstreams: tf.Tensor) -> NoReturn:
    raise UnsupportedError(
        "Expected gradients of a loss. Found: a gradient of cuDNN attention's gradient, which cuDNN does not offer. "
        "Remove the kernel first: tfopt.kernels.undo(model); in your own layer, use keras.ops.dot_product_attention."
    )
