"""Runs the attention of a model's layers through cuDNN."""

import inspect
import types
from collections.abc import Iterator
from functools import partial
from typing import Any

import keras
from keras.src.backend.common import global_state

from tfopt.kernels.cudnn.support import standing_obstacles
from tfopt.kernels.followed.following import Following, attends
from tfopt.kernels.replacing import LayerPath, Traced, layer_path, renew, replace, replacements
from tfopt.model.layers import require_model
from tfopt.warn import warn_once


def use_flash_attention(model: keras.Model) -> int:
    """Runs a model's attention layers through cuDNN, which never stores the scores, forward or backward.

    Use it before or after `compile` and `fit`, for a model that trains under XLA in mixed precision. It finds attention
    in Keras' layers, KerasHub's and those of your own: methods that compute softmax of a product of two tensors,
    masked, scaled or with terms added, times a third one. Calls that cuDNN does not support, or for which it has not
    been shown to be correct, take the layer's own path: outside XLA, without a GPU, in float32, with a mask of its own
    for each head, with dropout in training, or with a batch of unknown size. `explain(model)` names them.

    Saved and cloned models lose it: call it again on the loaded model. `model.export` writes the layers' own path,
    which runs anywhere. Functions you have traced yourself do not change.

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
    found = {layer: methods for layer in model._flatten_layers() if (methods := _methods(layer))}
    for layer, methods in found.items():
        for name, function in methods.items():
            replace(layer, name, _FlashAttention(layer, function))
    if found:
        renew(model)
    else:
        _say_why_none_changes(model)
    kernels = [kernel for layer in model._flatten_layers() for kernel in _kernels(layer)]
    obstacles = [kernel.found(training=True, jit=True) for kernel in kernels]
    if obstacles and all(obstacles):
        named = ", ".join(dict.fromkeys(why for each in obstacles for why in each or ()))
        warn_once(
            f"flash attention {named}",
            f"Expected attention that cuDNN can compute. Found: {named}. {model.name!r} trains through its layers' own "
            "path until that changes; tfopt.kernels.explain(model) says more.",
        )
    return len(found)


def _say_why_none_changes(model: keras.Model) -> None:
    if any(_kernels(layer) for layer in model._flatten_layers()):
        text = f"Expected attention layers without cuDNN in {model.name!r}. Found that all have it; nothing changed."
    else:
        text = (
            f"Expected a layer that computes attention in {model.name!r}. Found none; nothing changed. In a layer of "
            "your own, call tfopt.kernels.dot_product_attention."
        )
    warn_once(f"flash attention: {text}", text)


def _methods(layer: keras.Layer) -> dict[str, types.FunctionType]:
    """The methods of a layer that compute attention, of those that are not replaced."""
    kinds = [kind for kind in reversed(type(layer).__mro__) if kind not in keras.Layer.__mro__]
    found = {name: value for kind in kinds for name, value in vars(kind).items() if not name.startswith("__")}
    return {name: value for name, value in found.items() if name not in vars(layer) and attends(value)}


def _kernels(layer: keras.Layer) -> "list[_FlashAttention]":
    return [function for function in replacements(layer).values() if isinstance(function, _FlashAttention)]


class _FlashAttention:
    """Replaces a method of one layer that computes attention."""

    def __init__(self, layer: keras.Layer, function: types.FunctionType) -> None:
        self._layer, self._function = layer, function
        self._signature = inspect.signature(function)
        self.traced = Traced()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self._signature.bind(self._layer, *args, **kwargs).arguments
        # Of the step: some layers pass their method another value.
        context = global_state.get_global_attribute("current_call_ctx")
        training = None if context is None else context.get_value("training")
        training = call.get("training") if training is None else training
        following = Following(partial(self.traced.note, training), tuple(self._further(call)))
        return following.bind(self._function)(self._layer, *args, **kwargs)

    def found(self, *, training: bool, jit: bool) -> tuple[str, ...] | None:
        """What keeps this layer from cuDNN: as last traced, otherwise for any batch; None if unknown."""
        standing = [] if jit else ["XLA is off"]
        standing += standing_obstacles(self._layer.compute_dtype, None, None)
        if training and (getattr(self._layer, "dropout", 0) or 0) > 0:
            standing.append("dropout")
        return self.traced.last(training, standing)

    def _further(self, call: dict[str, Any]) -> Iterator[str]:
        if call.get("return_attention_scores") or getattr(self._layer, "_return_attention_scores", False):
            yield "scores to be returned"


def explain_layer(layer: keras.Layer, jit: bool) -> LayerPath | None:
    """Says how a layer computes attention; None for a layer that is not attention."""
    kernels = _kernels(layer)
    if kernels:
        training, inference = (_merged(kernels, training=training, jit=jit) for training in (True, False))
    elif _methods(layer):
        training = inference = ("not requested: use_flash_attention(model)",)
    elif "attention" in type(layer).__name__.lower() and not any(map(_methods, layer._flatten_layers())):
        training = inference = (f"{type(layer).__name__} computes attention in several methods, or without softmax",)
    else:
        return None
    return LayerPath(layer=layer_path(layer), kernel="flash attention", training=training, inference=inference)


def _merged(kernels: list[_FlashAttention], *, training: bool, jit: bool) -> tuple[str, ...] | None:
    """What keeps a layer from cuDNN: as its methods were last traced, if any computed attention."""
    found = [kernel.traced.last(training, ()) for kernel in kernels]
    if all(each is None for each in found):
        found = [kernel.found(training=training, jit=jit) for kernel in kernels]
    known = [each for each in found if each is not None]
    return tuple(dict.fromkeys(why for each in known for why in each)) if known else None
