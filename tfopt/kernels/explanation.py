"""Explains which layers of a model run through a kernel, and why others do not."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import keras

from tfopt.kernels import attention_layers, batch_norm, chunked_loss
from tfopt.kernels.replacing import LayerPath
from tfopt.model.layers import require_model
from tfopt.text import Shown


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Explanation(Shown):
    """Which layers of a model run through a kernel, and what keeps the others on Keras' path."""

    layers: tuple[LayerPath, ...]
    """One row per layer that could run through a kernel."""

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {"layers": [layer.to_dict() for layer in self.layers]}

    def __str__(self) -> str:
        return "\n".join(map(str, self.layers)) or "The model has no layer for which there is a kernel."


def explain(model: keras.Model) -> Explanation:
    """Says which layers of a model run through a kernel, and what keeps the others on Keras' path.

    Use it after the first step of `fit`: shapes and masks are known only once a step is traced. Until then it names
    what rules out a kernel for any batch. It reports the last trace, and traces nothing itself.

    Args:
        model: A model, with or without kernels.

    Returns:
        One row per layer that could run through a kernel, including layers inside other layers and models.

    Raises:
        TypeError: If `model` is not a Keras model.

    Example:
        >>> print(tfopt.kernels.explain(model))
        decoder/attention: training flash attention; inference plain (a batch of no fixed size)
    """
    require_model(model)
    kernels = (attention_layers.explain_layer, batch_norm.explain_layer, chunked_loss.explain_layer)
    rows = (explain_layer(layer, model.jit_compile) for layer in _in_order(model, set()) for explain_layer in kernels)
    return Explanation(layers=tuple(row for row in rows if row))


def _in_order(layer: keras.Layer, seen: set[int]) -> Iterator[keras.Layer]:
    """Yields a layer and all layers inside it once each; Keras' own walk reverses the order of nested layers."""
    if id(layer) not in seen:
        seen.add(id(layer))
        yield layer
        for part in layer._flatten_layers(include_self=False, recursive=False):
            yield from _in_order(part, seen)
