"""Follows channels through a model's graph, and finds what can be cut and what cannot."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

# These two register their rules.
from tfopt.compress.pruning import attention_rules as attention_rules
from tfopt.compress.pruning import joining as joining
from tfopt.compress.pruning.rules import follow
from tfopt.compress.pruning.units import (
    Axis,
    Call,
    Channels,
    Fixed,
    NotUnderstoodError,
    Numbers,
    Owner,
    Tensor,
    Units,
)
from tfopt.compress.versions.rebuilding import Kept, runs_its_graph
from tfopt.errors import UnsupportedError
from tfopt.internals.layers import Functional
from tfopt.model.layers import layer_paths
from tfopt.model.products import graph_nodes


@dataclass(frozen=True, slots=True)
class Graph:
    """What can be cut of a model."""

    axes: Sequence[Axis]
    """Axes of weights, with units by the one that stands for all those tied to it."""
    groups: Sequence[Numbers]
    """Units that the same layers make: a share of each group is cut."""
    made: Mapping[str, Numbers]
    """The units that a layer makes, by the layer's path."""
    left: Mapping[str, str]
    """Why the others cannot be cut, by path."""
    _units: Units
    _roots: Numbers

    def configs(self, cut: Numbers) -> dict[keras.Layer, dict[str, Any]]:
        """Returns what changes in the configs of layers if units are cut."""

        def kept(units: Numbers) -> int:
            return int(np.isin(self._roots[units], cut, invert=True).sum())

        return {layer: config(kept) for layer, config in self._units.sizes.items()}

    def kept(self, cut: Numbers) -> Kept:
        """Returns what is kept of weights if units are cut."""
        return {(id(axis.weight), axis.axis): np.isin(axis.units, cut, invert=True) for axis in self.axes}

    def channels(self, cut: Numbers) -> dict[str, tuple[int, int]]:
        """Returns how many channels or heads each layer keeps if units are cut, and how many it has."""
        counts = {path: (int(np.isin(units, cut, invert=True).sum()), len(units)) for path, units in self.made.items()}
        return {path: count for path, count in counts.items() if path not in self.left}


def graph_of(model: keras.Model) -> Graph:
    """Follows the channels of a built Functional or Sequential model, nested ones included.

    Raises:
        tfopt.errors.UnsupportedError: If the model has no graph, or nothing of it can be cut.
    """
    if not graph_nodes(model) or not runs_its_graph(model):
        raise UnsupportedError(
            f"Expected a Functional or Sequential model, whose graph shows which channels depend on each other. Found "
            f"{model.name!r}, whose class {type(model).__name__} has its own call. Make a Functional model of its "
            "layers."
        )
    walk = _Walk(model)
    walk.through(model, {id(tensor): Fixed(f"the input {tensor.name!r}") for tensor in _graph(model).inputs})
    for name, channels in zip(_graph(model).output_names, walk.outputs(model), strict=True):
        if isinstance(channels, Channels):
            walk.units.pin(channels.units, f"they are the model's output {name!r}")
    graph = _sorted(walk)
    if not graph.groups:
        reasons = "; ".join(f"{path}: {why}" for path, why in graph.left.items())
        raise UnsupportedError(
            f"Expected a model with channels, units or heads that can be cut. Found none in {model.name!r}. {reasons}. "
            "Leave it as it is."
        )
    return graph


class _Walk:
    """Follows the channels from node to node."""

    def __init__(self, model: keras.Model):
        self.units = Units()
        self.paths = layer_paths(model)
        self.unknown: dict[keras.Layer, str] = {}
        """Why layers with kernels are left that no rule is known for."""
        self._found: dict[int, Channels | Fixed] = {}
        """By the id of a symbolic tensor."""

    def through(self, model: keras.Model, inputs: Mapping[int, Channels | Fixed]) -> None:
        self._found |= inputs
        for node in graph_nodes(model):
            if not node.is_input:
                self._follow(node)

    def outputs(self, model: keras.Model) -> list[Channels | Fixed]:
        return [self._found[id(tensor)] for tensor in _graph(model).outputs]

    def _follow(self, node: Any) -> None:
        operation = node.operation
        if graph_nodes(operation) and runs_its_graph(operation):
            inputs, given = _graph(operation).inputs, _without_mask(node)
            if [len(t.shape) for t in inputs] == [len(t.shape) for t in given]:
                entered = zip(inputs, given, strict=True)
                self.through(operation, {id(own): self._enter(own, given) for own, given in entered})
                found = self.outputs(operation)
                self._found |= {id(t): one for t, one in zip(node.output_tensors, found, strict=True)}
                return
        channels = self._of_call(self._call(node))
        self._found |= {id(tensor): channels for tensor in node.output_tensors[:1]}
        self._found |= {id(tensor): Fixed(self._name(operation)) for tensor in node.output_tensors[1:]}

    def _enter(self, own: keras.KerasTensor, given: keras.KerasTensor) -> Channels | Fixed:
        """What comes in through the input of a nested model."""
        layer = own._keras_history.operation
        tensor = Tensor(given.shape, self._found[id(given)])
        return self._of_call(Call(layer, self._name(layer), [tensor], {}, self.units, own.shape))

    def _of_call(self, call: Call) -> Channels | Fixed:
        for mask in keras.tree.flatten(call.arguments.get("mask")):
            if isinstance(mask, Tensor):
                call.keep(mask, "takes them as a mask")
        try:
            if obstacle := _obstacle(call.operation):
                raise NotUnderstoodError(obstacle)
            return follow(call.operation, call)
        except NotUnderstoodError as error:
            why = str(error) or "computes from them what tfopt does not know"
            for tensor in call.inputs:
                call.keep(tensor, why)
            if isinstance(call.operation, keras.Layer) and any(len(w.shape) > 1 for w in call.operation.weights):
                kind = type(call.operation).__name__
                self.unknown[call.operation] = f"it {error}" if str(error) else f"how {kind} computes is not known"
            for owner, units in self.units.made.items():  # by another call, or before the rule gave up
                if owner.layer is call.operation:
                    self.units.pin(units, f"{call.name} {why}")
            return Fixed(call.name)

    def _call(self, node: Any) -> Call:
        def seen(value: Any) -> Any:
            return Tensor(value.shape, self._found[id(value)]) if isinstance(value, keras.KerasTensor) else value

        args, kwargs = keras.tree.map_structure(seen, (node.arguments.args, node.arguments.kwargs))
        return Call(
            operation=node.operation,
            name=self._name(node.operation),
            inputs=[seen(tensor) for tensor in _without_mask(node)],
            arguments=_bound(node.operation, args, kwargs),
            units=self.units,
            output_shape=node.output_tensors[0].shape,
        )

    def _name(self, operation: Any) -> str:
        return f"{self.paths.get(operation, operation.name)!r} ({type(operation).__name__})"


def _sorted(walk: _Walk) -> Graph:
    units, roots, reasons = walk.units, walk.units.roots(), walk.units.reasons()
    makers: dict[int, set[Owner]] = {}
    for owner, made in units.made.items():
        for unit in np.unique(roots[made]).tolist():
            makers.setdefault(unit, set()).add(owner)
    groups: dict[frozenset[Owner], list[int]] = {}
    for unit, owners in makers.items():
        if unit not in reasons:
            groups.setdefault(frozenset(owners), []).append(unit)
    made = {_path(walk, owner): roots[numbers] for owner, numbers in units.made.items()}
    left = {walk.paths[layer]: why for layer, why in walk.unknown.items()}
    for path, numbers in made.items():
        if all(unit in reasons for unit in numbers.tolist()):
            left.setdefault(path, reasons[int(numbers[0])])
    axes = [Axis(axis.weight, axis.axis, roots[axis.units], axis.role) for axis in units.axes.values()]
    return Graph(axes, [np.array(group) for group in groups.values()], made, left, units, roots)


def _path(walk: _Walk, owner: Owner) -> str:
    return walk.paths[owner.layer] + (" (heads)" if owner.kind == "heads" else "")


def _obstacle(operation: Any) -> str:
    """Why the rule for a layer's class does not hold for the layer; empty if it does."""
    if not type(operation).__module__.startswith("keras."):
        return "computes from them what tfopt does not know"
    for layer in operation._flatten_layers() if isinstance(operation, keras.Layer) else ():
        if getattr(layer, "quantization_mode", None):
            return "is quantized"
        if getattr(layer, "lora_enabled", False):
            return "has LoRA weights"
    return ""


def _bound(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name."""
    signature = getattr(operation, "_call_signature", None)
    if signature is not None:
        return dict(signature.bind(*args, **kwargs).arguments)
    return {str(at): value for at, value in enumerate(args)} | dict(kwargs)


def _without_mask(node: Any) -> list[keras.KerasTensor]:
    """The inputs of a call without the mask that Keras passes on from an Embedding or Masking."""
    bound = _bound(node.operation, node.arguments.args, node.arguments.kwargs)
    masks = set(map(id, keras.tree.flatten(bound.get("mask"))))
    return [tensor for tensor in node.input_tensors if id(tensor) not in masks]


def _graph(model: Any) -> Functional:
    return model._functional if isinstance(model, keras.Sequential) else model


def nested_models(model: keras.Model) -> Iterator[keras.Model]:
    """Yields the models of which the graph is followed, the outermost first."""
    yield model
    for node in graph_nodes(model):
        if graph_nodes(node.operation) and runs_its_graph(node.operation):
            yield from nested_models(node.operation)
