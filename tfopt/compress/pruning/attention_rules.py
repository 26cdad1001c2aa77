"""Heads of attention layers: units inside the layer, each with its part of the projections."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from tfopt.compress.pruning.rules import follow
from tfopt.compress.pruning.units import Call, Channels, Fixed, NotUnderstoodError, Numbers, Tensor

_LAYERS = keras.layers


@follow.register(_LAYERS.MultiHeadAttention)
def _multi_head(layer: Any, call: Call) -> Channels | Fixed:
    heads = call.makes(layer.num_heads, "heads")
    made = _projections(layer, call, dict.fromkeys(("query", "key", "value", "gate"), heads))
    if made is None:
        call.resize(lambda kept: {"num_heads": kept(heads)})
        return Fixed(call.name)
    call.resize(lambda kept: {"num_heads": kept(heads), "output_shape": (kept(made),)})
    return Channels(len(call.output_shape) - 1, made)


@follow.register(_LAYERS.GroupQueryAttention)
def _grouped_query(layer: Any, call: Call) -> Channels:
    """A head of keys and values is cut with all the query heads that use it; if it is the only one, they are cut."""
    shared = layer.num_key_value_heads
    units = call.makes(layer.num_query_heads if shared == 1 else shared, "heads")
    queries = np.repeat(units, layer.num_query_heads // len(units))
    keys = call.units.pinned(1, "") if shared == 1 else units
    made = _projections(layer, call, {"query": queries, "gate": queries, "key": keys, "value": keys})
    # It has no output_shape, and makes as many channels as its query has.
    (query, *_) = _query_value_key(call)
    call.units.tie(made, call.along(query, -1))
    call.resize(lambda kept: {"num_query_heads": kept(queries), "num_key_value_heads": kept(keys)})
    return Channels(2, made)


def _projections(layer: Any, call: Call, heads: dict[str, Numbers]) -> Numbers | None:
    """Notes what lies on the axes of the projections; returns the units of the output, None if it has several axes."""
    query, value, key = _query_value_key(call)
    read = {"query": query, "gate": query, "key": key, "value": value}
    for name, units in heads.items():
        dense = getattr(layer, f"_{name}_dense", None)
        if dense is not None:
            call.units.lie_on(dense.kernel, 0, call.along(read[name], -1), "reads")
            call.units.lie_on(dense.kernel, 1, units, "makes")
            if dense.bias is not None:
                call.units.lie_on(dense.bias, 0, units, "makes")
    output = layer._output_dense
    call.units.lie_on(output.kernel, 0, heads["query"], "reads")
    _keep_heads_seen_outside(call, heads["query"])
    if len(output.kernel.shape) != 3:
        return None
    made = call.makes(output.kernel.shape[2])
    call.units.lie_on(output.kernel, 2, made, "makes")
    if output.bias is not None:
        call.units.lie_on(output.bias, 0, made, "makes")
    return made


def _keep_heads_seen_outside(call: Call, heads: Numbers) -> None:
    if call.arguments.get("return_attention_scores"):
        call.units.pin(heads, f"{call.name} returns the scores of each head")
    mask = call.arguments.get("attention_mask")
    shape: Sequence[int | None] = getattr(mask, "shape", ())
    if len(shape) > 3 and shape[1] != 1:
        call.units.pin(heads, f"{call.name} takes a mask for each head")


def _query_value_key(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    query, value, key = (call.arguments.get(name) for name in ("query", "value", "key"))
    key = value if key is None else key
    if not (isinstance(query, Tensor) and isinstance(value, Tensor) and isinstance(key, Tensor)):
        raise NotUnderstoodError
    for name in ("query_mask", "value_mask", "key_mask", "attention_mask"):
        if isinstance(mask := call.arguments.get(name), Tensor):
            call.keep(mask, "takes them as a mask")
    return query, value, key
