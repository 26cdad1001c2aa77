"""Runs the attention of a model's layers through cuDNN."""

import inspect
import types
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfopt.internals.scopes import call_context
from tfopt.kernels.attention.following import Following, attends
from tfopt.kernels.cudnn.support import standing_obstacles
from tfopt.kernels.replacing import LayerPath, Traced, layer_path, renew, replace, replacements
from tfopt.model.layers import require_model
from tfopt.warn import warn_once


def use_flash_attention(model: keras.Model) -> int:
    """Runs a model's attention layers through cuDNN, which never stores the scores, forward or backward.

    Use it before or after `compile` and `fit`, for a model that trains under XLA in mixed precision. It applies to
    layers of any class in which one method computes attention with `keras.ops`: two calls of `einsum` or `matmul` with
    a softmax between them, or one of `dot_product_attention`. Those are `MultiHeadAttention`, `GroupQueryAttention`,
    the layers of KerasHub's language models, and your own. Masks that are the same for all heads, biases that are the
    same for all examples, sliding windows and grouped key heads are supported.

    Calls that cuDNN does not support, or that it computes wrongly on this machine (each form is tried before it is
    used), take the layer's own path: outside XLA, without a GPU, in float32, with dropout in training, with scores to
    return, or with a batch of unknown size. `explain(model)` names them.

    Saved and cloned models lose it: call it again on the loaded model. `model.export` writes the layers' own path,
    which runs anywhere. Functions you have traced yourself do not change.

    Args:
        model: A model, compiled or not.

    Returns:
        How many layers changed. If that is 0, or none of them can use cuDNN here, as without a GPU, the reason is
        logged once (logger `tfopt`).

    Raises:
        TypeError: If `model` is not a Keras model.

    Example:
        >>> tfopt.kernels.use_flash_attention(model)
        12
    """
    require_model(model)
    found = {layer: methods for layer in model._flatten_layers() if (methods := _methods(layer))}
    if not found:
        _say_why_none_changes(model)
    for layer, methods in found.items():
        for name, function in methods.items():
            replace(layer, name, _FlashAttention(layer, function))
    if found:
        renew(model)
    attending = [kernels for layer in model._flatten_layers() if (kernels := _kernels(layer))]
    obstacles = [_merged(kernels, training=True, jit=True) for kernels in attending]
    if obstacles and all(obstacles):
        reasons = ", ".join(dict.fromkeys(why for each in obstacles for why in each or ()))
        warn_once(
            f"flash attention {reasons}",
            f"Expected attention that cuDNN can compute. Found: {reasons}. {model.name!r} trains through its layers' "
            "own path until that changes; tfopt.kernels.explain(model) says more.",
        )
    return len(found)


def _say_why_none_changes(model: keras.Model) -> None:
    if any(map(_kernels, model._flatten_layers())):
        text = f"Expected attention layers without cuDNN in {model.name!r}. Found that all have it; nothing changed."
    else:
        text = (
            f"Expected a layer with a method that computes attention by keras.ops in {model.name!r}. Found none; "
            "nothing changed. In a layer of your own, call tfopt.kernels.dot_product_attention."
        )
    warn_once(f"flash attention: {text}", text)


def _methods(layer: keras.Layer) -> dict[str, types.FunctionType]:
    """The methods of a layer that compute attention, of those that are not replaced."""
    kinds = [kind for kind in reversed(type(layer).__mro__) if kind not in keras.Layer.__mro__]
    found = {name: value for kind in kinds for name, value in vars(kind).items() if not name.startswith("__")}
    return {name: value for name, value in found.items() if name not in vars(layer) and attends(value)}


def _kernels(layer: keras.Layer) -> "list[_FlashAttention]":
    return [function for function in replacements(layer).values() if isinstance(function, _FlashAttention)]


_UNRECOGNIZED = ("no softmax of a product that is multiplied with a third tensor",)


class _FlashAttention:
    """Replaces a method of one layer that computes attention."""

    def __init__(self, layer: keras.Layer, function: types.FunctionType) -> None:
        self._layer, self._function = layer, function
        self._signature = inspect.signature(function)
        self.traced = Traced()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self._signature.bind(self._layer, *args, **kwargs).arguments
        # Of the step: some layers pass their method another value.
        context = call_context()
        training = None if context is None else context.get_value("training")
        training = call.get("training") if training is None else training
        noted = []

        def note(found: tuple[str, ...]) -> None:
            noted.append(found)
            self.traced.note(training, found)

        following = Following(note, tuple(self._further(call)))
        result = following.bind(self._function)(self._layer, *args, **kwargs)
        if not noted and not tf.executing_eagerly():
            self.traced.note(training, _UNRECOGNIZED)
        return result

    def found(self, *, training: bool, jit: bool) -> tuple[str, ...] | None:
        """What keeps this layer from cuDNN: as last traced, otherwise for any batch; None if unknown."""
        standing = [] if jit else ["XLA is off"]
        standing += standing_obstacles(self._layer.compute_dtype)
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
    elif _is_called_attention(layer) and not any(_attends(part) for part in layer._flatten_layers(include_self=False)):
        training = inference = (f"{type(layer).__name__} computes attention in a way that is not recognized",)
    else:
        return None
    return LayerPath(layer=layer_path(layer), kernel="flash attention", training=training, inference=inference)


def _attends(layer: keras.Layer) -> bool:
    return bool(_kernels(layer) or _methods(layer))


def _is_called_attention(layer: keras.Layer) -> bool:
    return any("attention" in kind.__name__.lower() for kind in type(layer).__mro__)


def _merged(kernels: list[_FlashAttention], *, training: bool, jit: bool) -> tuple[str, ...] | None:
    """What keeps a layer from cuDNN: as its methods were last traced, if any computed attention."""
    found = [kernel.traced.last(training, ()) for kernel in kernels]
    found = [each for each in found if each != _UNRECOGNIZED] or found  # methods with another task
    if all(each is None for each in found):
        found = [kernel.found(training=training, jit=jit) for kernel in kernels]
    known = [each for each in found if each is not None]
    return tuple(dict.fromkeys(why for each in known for why in each)) if known else None
