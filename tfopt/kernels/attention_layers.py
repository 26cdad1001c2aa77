"""Runs Keras' attention layers through cuDNN."""

import inspect
from collections.abc import Iterator
from typing import Any

import keras

from tfopt.kernels.cudnn import flash_attention
from tfopt.kernels.eligibility import obstacles, standing_obstacles
from tfopt.kernels.replacing import LayerPath, Traced, layer_path, replace_each, replacement
from tfopt.model.require import require_model

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
        How many layers changed: 0 if all have it already.

    Raises:
        TypeError: If `model` is not a Keras model.

    Example:
        >>> tfopt.kernels.use_flash_attention(model)
        12
    """
    require_model(model)
    layers = [layer for layer in model._flatten_layers() if _computes_as(_kind(layer), layer)]
    return replace_each(model, layers, "_compute_attention", _FlashAttention)


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
