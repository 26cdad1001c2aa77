"""Attention through cuDNN where possible, otherwise as Keras computes it: for custom layers."""

import math
from typing import Any

import keras
import tensorflow as tf

from tfopt import checks
from tfopt.kernels.attention.call import AttentionCall
from tfopt.kernels.attention.masks import of_rank


def dot_product_attention(
    query: Any, key: Any, value: Any, *, mask: Any = None, causal: bool = False, scale: float | None = None
) -> tf.Tensor:
    """Computes scaled dot-product attention, through cuDNN where possible.

    Use it in the `call` of your own layer instead of `keras.ops.dot_product_attention`. It uses cuDNN in a step that
    XLA compiles (`jit_compile=True`) for an Ampere or later GPU, in bfloat16 or float16, with fixed shapes (a dataset
    batched with `drop_remainder=True`), sequences of 64 or more, a head size that is a multiple of 8 up to 128, and a
    mask that is alike for all heads. Otherwise it computes as Keras does.

    cuDNN's gradient has no gradient itself. If you save your own function with `jit_compile=True` on a GPU, it contains
    the kernel and runs only on GPUs.

    Args:
        query: (batch, query length, heads, size).
        key: (batch, key length, heads, size). With fewer heads than the query, each serves a group of its heads.
        value: Like the key; outside cuDNN its heads may have another size.
        mask: Boolean, broadcastable to (batch, heads, query length, key length); True means attend.
        causal: Whether position i attends only to positions 0 to i.
        scale: Factor on query · key. Default: 1 / √size.

    Returns:
        The output, (batch, query length, heads, size of the value).

    Raises:
        TypeError: If a tensor is symbolic, `query`, `key` or `value` does not hold floats, `mask` does not hold
            booleans, `causal` is not a bool, or `scale` is not a number.
        ValueError: If the shapes do not match, or `scale` is not finite.

    Example:
        >>> query = keras.random.normal((2, 128, 4, 64))
        >>> tfopt.kernels.dot_product_attention(query, query, query, causal=True).shape
        TensorShape([2, 128, 4, 64])
    """
    if any(isinstance(tensor, keras.KerasTensor) for tensor in (query, key, value, mask)):
        raise TypeError(
            "Expected tensors. Received: a symbolic tensor of a functional model. Call it in the call() of a layer."
        )
    _check_options(causal, scale)
    query, key, value = map(tf.convert_to_tensor, (query, key, value))
    if not all(tensor.dtype.is_floating for tensor in (query, key, value)):
        names = ", ".join(tensor.dtype.name for tensor in (query, key, value))
        raise TypeError(f"Expected query, key and value to hold floats. Received: {names}. Cast them.")
    _check_shapes(query.shape, key.shape, value.shape)
    if mask is not None:
        mask = tf.convert_to_tensor(mask)
        _check_mask(mask, tf.TensorShape([query.shape[0], query.shape[2], query.shape[1], key.shape[1]]))
    call = AttentionCall(
        query=query,
        key=key,
        value=value,
        scale=1 / math.sqrt(query.shape[3] or 1) if scale is None else float(scale),
        causal=causal,
        masks=() if mask is None else (of_rank(mask, 4),),
    )
    output, _ = call.attempt()
    if output is not None:
        return output
    key, value = (_with_heads(tensor, query.shape[2]) for tensor in (key, value))
    return keras.ops.dot_product_attention(query, key, value, mask=mask, scale=scale, is_causal=causal)


def _check_options(causal: Any, scale: Any) -> None:
    if not isinstance(causal, bool):
        raise TypeError(f"Expected causal to be a bool. Received: {causal!r}. Pass a tensor as mask.")
    if scale is not None:
        checks.number("scale", scale, "Omit it for 1 / √size; with a tensor, scale the query.")


def _check_mask(mask: tf.Tensor, scores: tf.TensorShape) -> None:
    if mask.dtype != tf.bool:
        raise TypeError(
            f"Expected a boolean mask, True where attended to. Received: one of {mask.dtype.name}. Convert it, with "
            "mask > 0 for example."
        )
    try:
        fits = tf.broadcast_static_shape(mask.shape, scores).is_compatible_with(scores)
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            "Expected a mask that broadcasts to (batch, heads, query length, key length), here "
            f"{scores}. Received: one of shape {mask.shape}. Give it an axis of heads, as mask[:, None]."
        )


def _check_shapes(query: tf.TensorShape, key: tf.TensorShape, value: tf.TensorShape) -> None:
    fits = query.rank == key.rank == value.rank == 4 and (
        key[:3].is_compatible_with(value[:3])
        and query[0:1].is_compatible_with(key[0:1])
        and query[3:].is_compatible_with(key[3:])
        and (None in (query[2], key[2]) or (key[2] and query[2] % key[2] == 0))
    )
    if not fits:
        raise ValueError(
            "Expected query, key and value of shape (batch, length, heads, size): one batch, one length of key and "
            "value, one size of query and key, and heads of the query a multiple of those of key and value. "
            f"Received: {query}, {key} and {value}. Transpose them if the heads come before the length."
        )


def _with_heads(tensor: tf.Tensor, heads: int | None) -> tf.Tensor:
    """Repeats each head for its group of the query's heads."""
    own = tensor.shape[2]
    return tensor if own == heads or None in (own, heads) else tf.repeat(tensor, heads // own, axis=2)
