"""Attention through cuDNN where possible, otherwise as Keras computes it: for custom layers, and in Keras' own."""

import inspect
import math
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfopt import checks
from tfopt.kernels.cudnn.calls import flash_attention
from tfopt.kernels.cudnn.support import obstacles, standing_obstacles
from tfopt.kernels.replacing import LayerPath, Traced, layer_path, replace_each, replacement
from tfopt.model.layers import require_model
from tfopt.warn import warn_once


def dot_product_attention(
    query: Any, key: Any, value: Any, *, mask: Any = None, causal: bool = False, scale: float | None = None
) -> tf.Tensor:
    """Computes scaled dot-product attention, through cuDNN where possible.

    Use it in the `call` of your own layer instead of `keras.ops.dot_product_attention`. It uses cuDNN in a step that
    XLA compiles (`jit_compile=True`) for an Ampere or later GPU, in bfloat16 or float16, with fixed shapes (a dataset
    batched with `drop_remainder=True`), sequences of 64 or more, a head size that is a multiple of 8 up to 128, and no
    mask but the causal one. Otherwise it computes as Keras does.

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
    key, value = (_with_heads(tensor, query.shape[2]) for tensor in (key, value))
    if any(obstacles(query, key, value, mask=mask, causal=causal)):
        return keras.ops.dot_product_attention(query, key, value, mask=mask, scale=scale, is_causal=causal)
    scale = 1 / math.sqrt(query.shape[3]) if scale is None else float(scale)
    return flash_attention(query, key, value, causal=causal, scale=scale)


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


# Each class's attributes for the sizes of a key and a value, and for the factor on query · key.
_ATTRIBUTES = {
    keras.layers.MultiHeadAttention: ("key_dim", "value_dim", "_inverse_sqrt_key_dim"),
    keras.layers.GroupQueryAttention: ("head_dim", "head_dim", "_inverse_sqrt_head_dim"),
}
# What Keras passes to `_compute_attention`.
_KNOWN = {"query", "key", "value", "attention_mask", "training", "return_attention_scores", "use_causal_mask"}


def use_flash_attention(model: keras.Model) -> int:
    """Runs a model's attention layers through cuDNN, which never stores the scores, forward or backward.

    Use it before or after `compile` and `fit`, for a model that trains under XLA in mixed precision. It applies to
    `MultiHeadAttention` and `GroupQueryAttention` layers anywhere in the model, and to subclasses that do not override
    the attention itself. Calls that cuDNN does not support, or for which it has not been shown to be correct, take
    Keras' own path: outside XLA, without a GPU, in float32, with a mask other than the causal one, with dropout in
    training, with scores to return, or with a batch of unknown size. `explain(model)` names them.

    Saved and cloned models lose it: call it again on the loaded model. `model.export` writes Keras' path, which runs
    anywhere. Functions you have traced yourself do not change.

    Args:
        model: A model, compiled or not.

    Returns:
        How many layers changed. If that is 0, or none of them can take cuDNN here, as without a GPU, the reason is
        said once (logger `tfopt`).

    Raises:
        TypeError: If `model` is not a Keras model.

    Example:
        >>> tfopt.kernels.use_flash_attention(model)
        12
    """
    require_model(model)
    layers = [layer for layer in model._flatten_layers() if _computes_as(_kind(layer), layer)]
    if not layers:
        _say_why_none_changes(model)
    changed = replace_each(model, layers, "_compute_attention", _FlashAttention)
    kernels = list(filter(None, map(_kernel, layers)))
    obstacles = [kernel.found(training=True, jit=True) for kernel in kernels]
    if obstacles and all(obstacles):
        found = ", ".join(dict.fromkeys(why for each in obstacles for why in each or ()))
        warn_once(
            f"flash attention {found}",
            f"Expected attention that cuDNN can compute. Found: {found}. {model.name!r} trains through Keras' own path "
            "until that changes; tfopt.kernels.explain(model) says more.",
        )
    return changed


def _say_why_none_changes(model: keras.Model) -> None:
    if any(map(_kernel, model._flatten_layers())):
        text = f"Expected attention layers without cuDNN in {model.name!r}. Found that all have it; nothing changed."
    else:
        text = (
            f"Expected a MultiHeadAttention or GroupQueryAttention layer with Keras' own attention in {model.name!r}. "
            "Found none; nothing changed. In a layer of your own, call tfopt.kernels.dot_product_attention."
        )
    warn_once(f"flash attention: {text}", text)


class _FlashAttention:
    """Replaces one layer's `_compute_attention`."""

    def __init__(self, layer: keras.Layer) -> None:
        self._layer = layer
        self._plain = layer._compute_attention
        self._signature = inspect.signature(self._plain)
        *sizes, self._scale = _ATTRIBUTES[_kind(layer)]
        self._sizes = [getattr(layer, name) for name in sizes]
        self.traced = Traced()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self._signature.bind(*args, **kwargs).arguments
        found = tuple(self._obstacles(call))
        self.traced.note(call.get("training"), found)
        if found:
            return self._plain(*args, **kwargs)
        causal = bool(call.get("use_causal_mask"))
        # Read on each call, as Keras does: a user may change the layer's scale.
        scale = getattr(self._layer, self._scale)
        output = flash_attention(call["query"], call["key"], call["value"], causal=causal, scale=scale)
        return output, None

    def found(self, *, training: bool, jit: bool) -> tuple[str, ...] | None:
        """What keeps this layer from cuDNN: as last traced, otherwise for any batch; None if unknown."""
        standing = [] if jit else ["XLA is off"]
        standing += standing_obstacles(self._layer.compute_dtype, *self._sizes)
        if training and self._layer.dropout > 0:
            standing.append("dropout")
        return self.traced.last(training, standing)

    def _obstacles(self, call: dict[str, Any]) -> Iterator[str]:
        mask, causal = call.get("attention_mask"), bool(call.get("use_causal_mask"))
        yield from obstacles(call["query"], call["key"], call["value"], mask=mask, causal=causal)
        if call.get("training") and self._layer.dropout > 0:
            yield "dropout"
        # Keras uses these only in layers with dropout. More than four axes are an obstacle already.
        axes = getattr(self._layer, "_attention_axes", (1,))
        if call["query"].shape.rank == 4 and axes != (1,):
            yield f"attention over axes {axes}"
        # GroupQueryAttention keeps it as an attribute.
        if call.get("return_attention_scores") or getattr(self._layer, "_return_attention_scores", False):
            yield "scores to be returned"
        unknown = [name for name, argument in call.items() if name not in _KNOWN and argument is not None]
        if unknown:
            yield f"an argument of a later Keras ({', '.join(unknown)})"


def explain_layer(layer: keras.Layer, jit: bool) -> LayerPath | None:
    """Says how a layer computes attention; None for a layer that is not attention."""
    kind, kernel = _kind(layer), _kernel(layer)
    if kind is None:
        return None
    if kernel:
        training, inference = kernel.found(training=True, jit=jit), kernel.found(training=False, jit=jit)
    elif _computes_as(kind, layer):
        training = inference = ("not requested: use_flash_attention(model)",)
    else:
        training = inference = (f"{type(layer).__name__} computes attention by itself",)
    return LayerPath(layer=layer_path(layer), kernel="flash attention", training=training, inference=inference)


def _kind(layer: keras.Layer) -> type | None:
    """The Keras class of a layer, or None."""
    return next((kind for kind in _ATTRIBUTES if isinstance(layer, kind)), None)


def _computes_as(kind: type | None, layer: keras.Layer) -> bool:
    """Whether a layer leaves the attention itself to its Keras class."""
    # All but the first compute weights from the scores in layers with dropout.
    names = ("_compute_attention", "_masked_softmax", "_build_attention", "_compute_causal_mask")
    return kind is not None and all(
        getattr(type(layer), name, None) is getattr(kind, name, None) and name not in vars(layer) for name in names
    )


def _kernel(layer: keras.Layer) -> _FlashAttention | None:
    function = replacement(layer, "_compute_attention")
    return function if isinstance(function, _FlashAttention) else None
