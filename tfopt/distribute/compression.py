"""16-bit gradients between replicas: half the traffic, at the cost of rounding."""

import functools
import inspect
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from tfopt.errors import UnsupportedError, unknown_name
from tfopt.model.layers import require_model
from tfopt.repairs.optimizers import CLIPPING, clip_sum
from tfopt.repairs.repair import in_several_replicas

DTYPES = ("bfloat16", "float16")
_NAME = "_all_reduce_sum_gradients"


def compress_gradients(model: keras.Model, dtype: str = "bfloat16") -> keras.Model:
    """Makes a compiled model's optimizer sum the replicas' gradients in 16 bits instead of 32.

    Use it if steps wait for the network: it halves the traffic. It changes the result, since each gradient is rounded
    (in bfloat16 to 8 bits of mantissa) before it is summed. `docs/distribution.md` says how far a training drifts;
    compare yours with and without. Clipping and the update stay in 32 bits.

    Args:
        model: A model compiled in the strategy's scope. Compiling it with another optimizer ends the compression.
        dtype: "bfloat16" (the default), or "float16", which is more precise but overflows above 65504.

    Returns:
        The same model.

    Raises:
        TypeError: If `model` is not a keras.Model.
        ValueError: If there is no such dtype, or the model is not compiled with an optimizer.
        tfopt.errors.UnsupportedError: If its optimizer has its own all-reduce.

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
            f"Expected an optimizer that sums gradients as Keras' own do. Found {type(optimizer).__name__}, which has "
            "its own all-reduce. Compress there, or use one of keras.optimizers."
        )
    CLIPPING.install()
    # In the instance's __dict__, out of sight of Keras' attribute tracking.
    optimizer.__dict__[_NAME] = functools.partial(_sum_gradients, tf.dtypes.as_dtype(dtype), optimizer, stock)
    model.make_train_function(force=True)
    return model


def _sum_gradients(dtype: tf.DType, optimizer: Any, stock: Any, grads_and_vars: Iterable[tuple[Any, Any]]) -> Any:
    """Sums as the optimizer does, but in 16 bits, then clips in 32."""
    if not in_several_replicas():
        return stock(optimizer, grads_and_vars)
    short = [(None if grad is None else tf.cast(grad, dtype), variable) for grad, variable in grads_and_vars]
    summed = inspect.unwrap(stock)(optimizer, short)
    return clip_sum(optimizer, [(None if g is None else tf.cast(g, v.dtype), v) for g, v in summed])
