"""Runs Keras' batch normalization through TensorFlow's fused kernel where XLA does not fuse it."""

import inspect
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfopt.internals.runtime import is_op_determinism_enabled
from tfopt.kernels.cudnn.support import in_xla
from tfopt.kernels.replacing import LayerPath, Traced, layer_path, replace_each, replacement
from tfopt.model.layers import require_model

# The kernel's input types; its statistics are always float32.
_DTYPES = ("float32", "bfloat16", "float16")
_IN_XLA = "XLA fuses it by itself"


def fuse_batch_norm(model: keras.Model) -> int:
    """Runs a model's batch normalization through one fused kernel, where Keras launches a dozen operations.

    Use it before or after `compile` and `fit`, for a model that trains on a GPU without XLA, above all in mixed
    precision. It applies to `BatchNormalization` layers anywhere in the model, and to subclasses that do not override
    the normalization itself. Statistics are float32 whatever the inputs; moving averages follow Keras' formula, with
    the variance over n, not n - 1. Results and gradients differ from Keras' by float32 rounding.

    Layers with `synchronized=True` or `renorm=True` do not change. Calls that the kernel does not support take Keras'
    own path: under XLA, with a mask, in float64, with an axis that is neither the second nor the last, or with more
    than five axes. `explain(model)` names them.

    Saved and cloned models lose it: call it again on the loaded model. `model.export` keeps the kernel, which every
    TensorFlow runs. Functions you have traced yourself do not change.

    Args:
        model: A model, compiled or not.

    Returns:
        How many layers changed: 0 if all have it already.

    Raises:
        TypeError: If `model` is not a Keras model.

    Example:
        >>> tfopt.kernels.fuse_batch_norm(model)
        53
    """
    require_model(model)
    layers = [layer for layer in model._flatten_layers() if _normalizes_as_keras(layer) and not any(_options(layer))]
    return replace_each(model, layers, "call", _FusedBatchNorm)


class _FusedBatchNorm:
    """Replaces one layer's `call`."""

    def __init__(self, layer: keras.layers.BatchNormalization) -> None:
        self._layer = layer
        self._plain = layer.call
        self.traced = Traced()

    def __call__(self, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        learning = bool(training and self._layer.trainable)
        found = tuple(self._obstacles(inputs, mask, learning))
        self.traced.note(training, found)
        if found:
            return self._plain(inputs, training=training, mask=mask)
        return _learn(self._layer, inputs) if learning else _infer(self._layer, inputs)

    def found(self, *, training: bool, jit: bool) -> tuple[str, ...] | None:
        """What keeps this layer from the kernel: as last traced, otherwise for any batch; None if unknown."""
        return self.traced.last(training, (_IN_XLA,) if jit else ())

    def _obstacles(self, inputs: Any, mask: Any, learning: bool) -> Iterator[str]:
        if not isinstance(inputs, tf.Tensor):
            yield f"a {type(inputs).__name__}, where the kernel takes a dense tensor"
            return
        if in_xla():
            yield _IN_XLA
        if mask is not None:
            yield "a mask"
        dtype, compute_dtype = inputs.dtype.name, self._layer.compute_dtype
        if dtype not in _DTYPES:
            yield f"{dtype}, where the kernel takes {', '.join(_DTYPES)}"
        elif dtype != compute_dtype:
            # Keras rounds the result to the layer's dtype, the kernel to that of its inputs.
            yield f"inputs of {dtype} in a layer that computes in {compute_dtype}"
        rank, axis = inputs.shape.rank, self._layer.axis
        if rank is None or not 2 <= rank <= 5:
            yield f"{rank or 'an unknown number of'} axes, where the kernel takes 2 to 5"
        elif axis % rank not in (1, rank - 1):
            yield f"axis {axis}, where the kernel takes the second or the last"
        # The kernel lacks that gradient on a GPU: core/kernels/fused_batch_norm_op.cc in TensorFlow.
        if is_op_determinism_enabled() and not learning:
            yield "op determinism, which the gradient in inference mode does not give"


def _learn(layer: keras.layers.BatchNormalization, inputs: tf.Tensor) -> tf.Tensor:
    """Normalizes with the batch's statistics and updates the moving averages."""
    outputs, mean, variance = _normalize(layer, inputs)
    # The kernel returns the variance over n - 1, but Keras averages that over n, which is 0 for n = 1.
    examples = tf.cast(tf.size(inputs, tf.int64), tf.float32) / layer.moving_mean.shape[0]
    variance = tf.math.multiply_no_nan(variance, 1 - 1 / examples)
    for average, value in ((layer.moving_mean, mean), (layer.moving_variance, variance)):
        before = keras.ops.cast(average, "float32")
        average.assign(before * layer.momentum + value * (1.0 - layer.momentum))
    return outputs


def _infer(layer: keras.layers.BatchNormalization, inputs: tf.Tensor) -> tf.Tensor:
    """Normalizes with the moving averages."""
    averages = (keras.ops.cast(average, "float32") for average in (layer.moving_mean, layer.moving_variance))
    return _normalize(layer, inputs, *averages)[0]


def _normalize(layer: keras.layers.BatchNormalization, inputs: tf.Tensor, *averages: tf.Tensor) -> tuple[Any, ...]:
    """Calls the kernel, with the batch's statistics unless averages are given: outputs, mean, variance over n - 1."""
    rank, channels = inputs.shape.rank, layer.moving_mean.shape[0]
    last = layer.axis % rank == rank - 1
    wide = inputs
    for _ in range(4 - rank):
        wide = tf.expand_dims(wide, -2 if last else -1)
    outputs, mean, variance = tf.compat.v1.nn.fused_batch_norm(
        wide,
        keras.ops.cast(layer.gamma, "float32") if layer.scale else tf.ones([channels]),
        keras.ops.cast(layer.beta, "float32") if layer.center else tf.zeros([channels]),
        *averages,
        epsilon=layer.epsilon,
        data_format=("NDHWC" if last else "NCDHW") if rank == 5 else ("NHWC" if last else "NCHW"),
        is_training=not averages,
    )
    return tf.reshape(outputs, tf.shape(inputs)) if rank < 4 else outputs, mean, variance


def explain_layer(layer: keras.Layer, jit: bool) -> LayerPath | None:
    """Says how a layer normalizes; None for a layer that is not batch normalization."""
    if not isinstance(layer, keras.layers.BatchNormalization):
        return None
    kernel, training, inference = replacement(layer, "call"), None, None
    if isinstance(kernel, _FusedBatchNorm):
        training, inference = kernel.found(training=True, jit=jit), kernel.found(training=False, jit=jit)
    elif _normalizes_as_keras(layer):
        training = inference = tuple(_options(layer)) or ("not requested: fuse_batch_norm(model)",)
    else:
        training = inference = (f"{type(layer).__name__} normalizes by itself",)
    return LayerPath(layer=layer_path(layer), kernel="fused batch norm", training=training, inference=inference)


def _normalizes_as_keras(layer: keras.Layer) -> bool:
    """Whether a layer leaves the normalization to Keras' class, unpatched."""
    kind = keras.layers.BatchNormalization
    return isinstance(layer, kind) and all(
        getattr(type(layer), name) is getattr(kind, name) and name not in vars(layer) for name in ("call", "_moments")
    )


_KNOWN = {
    *("self", "axis", "momentum", "epsilon", "center", "scale", "synchronized", "kwargs"),
    *("renorm", "renorm_clipping", "renorm_momentum"),
    *(f"{name}_initializer" for name in ("beta", "gamma", "moving_mean", "moving_variance")),
    *(f"{name}_{kind}" for name in ("beta", "gamma") for kind in ("regularizer", "constraint")),
}


def _options(layer: keras.layers.BatchNormalization) -> Iterator[str]:
    """Options of a layer that the kernel does not support."""
    for name in ("synchronized", "renorm"):
        if getattr(layer, name, False):  # renorm is of Keras 3.14
            yield f"{name}=True"
    # Options added later, as renorm was, may change the formula.
    unknown = sorted(set(inspect.signature(keras.layers.BatchNormalization).parameters) - _KNOWN)
    if unknown:
        yield f"options of a later Keras ({', '.join(unknown)})"
