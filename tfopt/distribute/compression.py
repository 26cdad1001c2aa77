"""Gradients sent between replicas in 16 bits: half the bytes, and a slightly other training."""

import functools
import inspect
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from tfopt.errors import UnsupportedError, unknown_name
from tfopt.model.require import require_model
from tfopt.repairs.clipping import CLIPPING, clip_sum
from tfopt.repairs.replicas import in_several_replicas

DTYPES = ("bfloat16", "float16")
_NAME = "_all_reduce_sum_gradients"


def compress_gradients(model: keras.Model, dtype: str = "bfloat16") -> keras.Model:
    """Lets a compiled model's optimizer sum the gradients of the replicas in 16 bits instead of 32.

    Use it where the network between machines is what a step waits for: half the bytes are sent. It changes the
    result: each gradient is rounded to 8 bits of mantissa (bfloat16) before it is summed. `docs/distribution.md` tells
    how far a training drifts; compare yours with and without. Clipping and the update stay in 32 bits.

    Args:
        model: The model, compiled in the scope of the strategy. `compile` with another optimizer ends it.
        dtype: "bfloat16", or "float16", which is finer and overflows beyond 65504.

    Returns:
        The same model.

    Raises:
        TypeError: `model` is no keras.Model.
        ValueError: There is no such dtype, or the model is not compiled with an optimizer.
        tfopt.errors.UnsupportedError: Its optimizer has an all-reduce of its own.

    Example:
        >>> with strategy.scope():
        ...     model.compile("adamw", "mse")
        >>> tfopt.distribute.compress_gradients(model)
    """
    require_model(model)
    if dtype not in DTYPES:
        raise unknown_name("dtype of 16 bits", dtype, DTYPES)
    optimizer: Any = getattr(model, "optimizer", None)
    if optimizer is None:
        raise ValueError("Expected a compiled model. Received one without an optimizer. Call model.compile first.")
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    stock = getattr(type(optimizer), _NAME, None)
    if stock is None or not inspect.unwrap(stock).__module__.startswith("keras."):
        raise UnsupportedError(
            f"Expected an optimizer that sums its gradients as Keras' do. Found {type(optimizer).__name__}, which has "
            "a way of its own. Compress there, or use one of keras.optimizers."
        )
    # In the optimizer's own dictionary, where Keras' attribute tracking does not see it.
    CLIPPING.install()
    optimizer.__dict__[_NAME] = functools.partial(_summed_in, tf.dtypes.as_dtype(dtype), optimizer, stock)
    model.make_train_function(force=True)
    return model


def _summed_in(dtype: tf.DType, optimizer: Any, stock: Any, grads_and_vars: Iterable[tuple[Any, Any]]) -> Any:
    """As the optimizer's own, with the sum itself in 16 bits; what clips after it does so in 32."""
    if not in_several_replicas():
        return stock(optimizer, grads_and_vars)
    short = [(None if grad is None else tf.cast(grad, dtype), variable) for grad, variable in grads_and_vars]
    summed = inspect.unwrap(stock)(optimizer, short)
    return clip_sum(optimizer, [(None if g is None else tf.cast(g, v.dtype), v) for g, v in summed])
