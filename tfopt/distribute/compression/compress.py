"""Makes an optimizer sum the replicas' gradients in fewer bytes."""

import inspect
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from tfopt.distribute.compression.low_rank import LowRank
from tfopt.distribute.compression.rounding import DTYPES, Rounding
from tfopt.distribute.compression.traffic import Compression, Traffic, summed_bytes
from tfopt.errors import UnsupportedError, unknown_name
from tfopt.model.layers import require_model
from tfopt.repairs.optimizers import CLIPPING, clip_sum
from tfopt.repairs.repair import in_several_replicas

_NAME = "_all_reduce_sum_gradients"


def compress_gradients(model: keras.Model, dtype: str | LowRank = "bfloat16") -> keras.Model:
    """Makes a compiled model's optimizer sum the replicas' gradients in fewer bytes.

    Use it if steps wait for the network. It changes the result: in 16 bits (half the traffic) each gradient is rounded
    before it is summed, in bfloat16 to 8 bits of mantissa; `LowRank` sends far less, and sends what it left out later.
    docs/distribution.md says how far training drifts; compare yours with and without it.

    An embedding's gradients, sent as the rows that the batch used, stay as they are, and so do clipping and the update,
    which come after the sum. For what LowRank sends later, each replica keeps a buffer as large as the weights.
    `TrainingCheckpoint` saves it; where it is not restored, it begins at zero.

    Args:
        model: A model compiled in the strategy's scope. Compiling it with another optimizer ends the compression.
        dtype: What to send: "bfloat16" (the default); "float16", which is more precise but overflows above 65504;
            or `LowRank(rank)`, products of thin matrices (PowerSGD).

    Returns:
        The same model. After its first step, `model.optimizer.compression` (of a LossScaleOptimizer,
        `inner_optimizer.compression`) says how many bytes each replica sends.

    Raises:
        TypeError: If `model` is not a keras.Model.
        ValueError: If there is no such dtype, the model is not compiled with an optimizer, or, for LowRank, it is not
            built yet.
        tfopt.errors.UnsupportedError: If its optimizer has its own all-reduce.

    Example:
        >>> with strategy.scope():
        ...     model.compile("adamw", "mse")
        >>> tfopt.distribute.compress_gradients(model)
    """
    require_model(model)
    if not isinstance(dtype, LowRank) and dtype not in DTYPES:
        raise unknown_name("LowRank, or a dtype of 16 bits", dtype, DTYPES)
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
    method = Rounding(dtype) if isinstance(dtype, str) else dtype
    if not isinstance(method, Rounding) and not model.built:
        raise ValueError(
            f"Expected a model with weights, for {method!r}. Received one that is not built. Begin it with "
            "keras.Input, or call model.build(input_shape) first."
        )
    CLIPPING.install()
    # In the instance's __dict__, out of sight of Keras' attribute tracking.
    optimizer.__dict__[_NAME] = _CompressedSum(method, model, optimizer, stock)
    optimizer.__dict__["compression"] = None
    model.make_train_function(force=True)
    return model


class _CompressedSum:
    """Sums as the optimizer does, but in fewer bytes, then clips in the gradients' own dtype."""

    def __init__(self, method: Rounding | LowRank, model: keras.Model, optimizer: Any, stock: Any):
        self._method, self._optimizer, self._stock = method, optimizer, stock
        with optimizer._distribution_strategy.scope():
            # With aggregation NONE each replica assigns its own copy.
            self._kept = {
                optimizer._var_key(weight): [
                    tf.Variable(value, trainable=False) for value in method.begin(_wide(weight.value), seed)
                ]
                for seed, weight in enumerate(model.trainable_variables)
            }

    def __call__(self, grads_and_vars: Iterable[tuple[Any, Any]]) -> Any:
        if not in_several_replicas():
            return self._stock(self._optimizer, grads_and_vars)
        pairs = list(grads_and_vars)
        # An embedding's rows are gathered, and stay as they are.
        dense = [
            at for at, pair in enumerate(pairs) if isinstance(pair[0], tf.Tensor) and self._key(pair) in self._kept
        ]
        others = [pair for at, pair in enumerate(pairs) if at not in dense]
        rest = iter(inspect.unwrap(self._stock)(self._optimizer, others) if _any_gradient(others) else others)
        sums = dict(zip(dense, self._summed([pairs[at] for at in dense]), strict=True))
        return clip_sum(self._optimizer, [sums[at] if at in sums else next(rest) for at in range(len(pairs))])

    def _key(self, pair: tuple[Any, Any]) -> str:
        key: str = self._optimizer._var_key(pair[1])
        return key

    def _summed(self, pairs: list[tuple[tf.Tensor, Any]]) -> list[tuple[tf.Tensor, Any]]:
        gradients = [_wide(tf.ensure_shape(gradient, variable.shape)) for gradient, variable in pairs]
        kept = [self._kept[self._key(pair)] for pair in pairs]
        traffic = Traffic(self._optimizer._iterations.value.device)
        sums = self._method.exchange(gradients, kept, traffic)
        plain = summed_bytes([gradient for gradient, _ in pairs], traffic.replicas)
        self._optimizer.__dict__["compression"] = Compression(traffic.replicas, traffic.sent_bytes, plain)
        return [(tf.cast(total, variable.dtype), variable) for total, (_, variable) in zip(sums, pairs, strict=True)]


def _wide(value: Any) -> tf.Tensor:
    """A tensor in 32 bits at least."""
    value = tf.convert_to_tensor(value)
    return tf.cast(value, tf.float32) if value.dtype in (tf.float16, tf.bfloat16) else value


def _any_gradient(pairs: list[tuple[Any, Any]]) -> bool:
    return any(gradient is not None for gradient, _ in pairs)
