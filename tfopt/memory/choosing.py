"""Chooses what a model computes again: blocks that repeat, segments of its graph, or the layers that were named."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import keras
from keras.src.models.functional import Functional

from tfopt.memory.segments import SegmentedGraph, divided, layers_in
from tfopt.model.layers import is_keras_own, layer_paths
from tfopt.text import listed

Chosen: TypeAlias = keras.Layer | SegmentedGraph
"""A layer that is computed again, or a graph whose segments are."""


def automatic(model: keras.Model) -> list[Chosen]:
    """Returns a model's repeating blocks, or its graph in segments.

    Raises:
        ValueError: If it has neither.
    """
    chosen = _found(model)
    if not chosen:
        raise ValueError(
            "Expected a model in which blocks repeat, or a graph that segments can divide. Received: "
            f"{model.name!r}, which has neither. Pass the names of the layers to compute again as `layers`."
        )
    return chosen


def _found(parent: keras.Layer) -> list[Chosen]:
    """Blocks inside a layer, at any depth, or the segments of its graph if they take in more of it."""
    graph = _graph_of(parent)
    inside = list(filter(_may_repeat, parent._flatten_layers(include_self=False, recursive=False)))
    blocks = _feeding_each_other(inside, graph) if graph else _of_one_kind(inside)
    nested = {layer: _found(layer) for layer in inside if layer not in blocks}
    covered = [*blocks, *(layer for layer, found in nested.items() if found)]
    if graph and 2 * sum(map(layers_in, covered)) < layers_in(parent):
        segmented = divided(graph)
        return [] if segmented is None else [segmented]
    return [*blocks, *(part for found in nested.values() for part in found)]


def _graph_of(layer: keras.Layer) -> Functional | None:
    """The graph that a Functional or Sequential model runs."""
    if isinstance(layer, keras.Sequential):
        return layer._functional if type(layer).call is keras.Sequential.call else None
    return layer if isinstance(layer, Functional) and type(layer).call is Functional.call else None


def _may_repeat(layer: keras.Layer) -> bool:
    """Whether a layer may be a block. Those of Keras that hold others, such as attention, are parts of one."""
    return bool(layer._layers) and (isinstance(layer, keras.Model) or not is_keras_own(layer))


def _of_one_kind(layers: Sequence[keras.Layer]) -> list[keras.Layer]:
    kinds = list(map(_kind, layers))
    return [layer for layer, kind in zip(layers, kinds, strict=True) if kinds.count(kind) > 1]


def _feeding_each_other(layers: Sequence[keras.Layer], graph: Functional) -> list[keras.Layer]:
    """Those of one kind of which one gets what another returns, or a layer what it returned itself."""
    chained: set[keras.Layer] = set()
    for node in (node for nodes in graph._nodes_by_depth.values() for node in nodes):
        for tensor in node.input_tensors:
            before, after = tensor._keras_history.operation, node.operation
            if before in layers and after in layers and _kind(before) == _kind(after):
                chained |= {before, after}
    return [layer for layer in layers if layer in chained]


def _kind(layer: keras.Layer) -> tuple[type, ...]:
    """The class; for a plain Sequential or Functional model, also the classes of its layers."""
    inner = layer._flatten_layers(include_self=False) if is_keras_own(layer) else ()
    return (type(layer), *map(type, inner))


def named(model: keras.Model, layers: Any) -> list[Chosen]:
    """Returns the layers that were given by name, by path or themselves.

    Raises:
        TypeError, ValueError: As `tfopt.memory.recompute`.
    """
    if isinstance(layers, str | keras.Layer) or not isinstance(layers, Iterable):
        raise TypeError(
            f"Expected layers to be 'auto' or a list of names, paths or layers. Received: {layers!r}. Put a single one "
            "into a list."
        )
    paths = layer_paths(model)
    del paths[model]
    chosen = list(dict.fromkeys(_only(given, paths, model) for given in layers))
    if not chosen:
        raise ValueError("Expected layers to name at least one layer. Received: none. Take them back with undo(model).")
    for outer in chosen:
        inner = [layer for layer in outer._flatten_layers(include_self=False) if layer in chosen]
        if inner:
            raise ValueError(
                f"Expected layers none of which lies inside another. Received: {paths[inner[0]]!r} and "
                f"{paths[outer]!r}. Leave one out."
            )
    return [*chosen]


def _only(given: Any, paths: Mapping[keras.Layer, str], model: keras.Model) -> keras.Layer:
    """The one layer that was meant."""
    if not isinstance(given, str | keras.Layer):
        raise TypeError(f"Expected names, paths or layers. Received: {given!r}. Pass layer.name or the layer itself.")
    found = [layer for layer, path in paths.items() if given is layer or given == path]
    found = found or [layer for layer in paths if layer.name == given]
    if len(found) > 1:
        raise ValueError(
            f"Expected names that one layer has. Received: {given!r}, the name of "
            f"{listed([paths[layer] for layer in found], 3)}. Pass a path."
        )
    if not found or isinstance(found[0], keras.layers.InputLayer):
        near = difflib.get_close_matches(given, paths.values(), n=1) if isinstance(given, str) else []
        hint = f"Did you mean {near[0]!r}?" if near else "model.summary(expand_nested=True) lists them."
        raise ValueError(f"Expected layers that {model.name!r} computes. Received: {given!r}, which is none. {hint}")
    return found[0]
