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


def follow(model: keras.Model) -> int:
    """Runs the attention of a model's layers through cuDNN where it can; `undo` takes that back.

    A layer takes part if one of its methods computes softmax of a product of two tensors, masked, scaled or with terms
    added, times a third one.

    Returns:
        How many layers changed.
    """
    found = {layer: methods for layer in model._flatten_layers() if (methods := _methods(layer))}
    for layer, methods in found.items():
        for name, function in methods.items():
            replace(layer, name, _FlashAttention(layer, function))
    if found:
        renew(model)
    return len(found)


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
        training = inference = ("not requested",)
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
