"""The calls of a model's layers in a training step, with the inputs that they have there."""

from collections.abc import Iterator
from types import FunctionType
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfopt.model.layers import calls_wrapped, floating_tensors, is_keras_own

NOT_OF_THE_STEP = "_tfopt_not_of_the_step"
"""An attribute of losses per example that stand in for the step's own, as to take the derivative of their reduction."""

_PLAIN = (bool, int, float, str, FunctionType)
_OF_EACH = {"name", "build", "quantize"}  # attributes that Keras sets in each layer, besides those of an empty one


def forward(model: keras.Model, batch: Any) -> tuple[Any, tf.Tensor]:
    """The model's outputs and its loss in training, as Keras' `train_step` computes them."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
    outputs = outputs_of(model, x)
    return outputs, model._compute_loss(x=x, y=y, y_pred=outputs, sample_weight=sample_weight, training=True)


def outputs_of(model: keras.Model, x: Any) -> Any:
    """The model's outputs in training."""
    return model(x, training=True) if model._call_has_training_arg else model(x)


def has_gradients(value: Any) -> bool:
    """Whether a value is a dense tensor of a dtype that has gradients."""
    return isinstance(value, tf.Tensor) and (value.dtype.is_floating or value.dtype.is_complex)


class StepCall(NamedTuple):
    """One call of a layer in a recorded step."""

    layer: keras.Layer
    arguments: Any
    """Positional and keyword arguments, with None in place of tensors."""
    places: list[int]
    """Where the tensors are among the flattened arguments."""
    tensors: list[Any]
    has_gradient: list[bool]
    """Which of them training takes a gradient of."""

    def again(self, tensors: list[Any]) -> Any:
        """Calls the layer with other tensors in their place."""
        leaves = keras.tree.flatten(self.arguments)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = keras.tree.pack_sequence_as(self.arguments, leaves)
        return self.layer(*args, **kwargs)


class StepCalls:
    """The calls of a model's layers in one step, made without changing a variable.

    A layer means the outermost one that is not a model; what is inside it counts as part of it. Layers inside a loop
    are left out.

    Args:
        model: A built, compiled model.
        batch: One batch.
    """

    def __init__(self, model: keras.Model, batch: Any):
        self.calls: list[StepCall] = []
        """In the order in which they compute."""
        self.links: list[tuple[keras.Layer | None, keras.Layer, int]] = []
        """Which layer's output, None for the data, each layer takes, and how many elements."""
        self._made: dict[int, keras.Layer] = {}  # by the ids of outputs
        self._flows: dict[int, bool] = {}  # through which of them training takes gradients
        self._trained: set[int] = set()  # ids of the values of trainable weights
        self._inside = False  # a layer, whose inner layers count as part of it
        self._kept: list[Any] = []  # keeps tensors alive, so that ids stay unique
        self._graph: Any = None

        def run(batch: Any) -> Any:
            self._graph = tf.compat.v1.get_default_graph()
            # With values, since Keras would pass None to regularizers.
            values = [(variable, tf.convert_to_tensor(variable.value)) for variable in model.variables]
            self._trained = {id(value) for variable, value in values if variable.trainable}
            scope = keras.StatelessScope(values, collect_losses=True)
            with scope, calls_wrapped(dict.fromkeys(_outermost(model)), self._recorded):
                forward(model, batch)
            return [call.tensors for call in self.calls]

        try:
            values = tf.function(run, autograph=False).get_concrete_function(batch)(batch)
        finally:
            model._clear_losses()  # they would keep tensors of that graph
        same: dict[int, Any] = {}  # a tensor that is taken twice has one value
        self.calls = [
            call._replace(tensors=[same.setdefault(id(x), value) for x, value in zip(call.tensors, own, strict=True)])
            for call, own in zip(self.calls, values, strict=True)
        ]

    def by_layer(self) -> dict[keras.Layer, list[StepCall]]:
        """Returns the calls of each layer."""
        found: dict[keras.Layer, list[StepCall]] = {}
        for call in self.calls:
            found.setdefault(call.layer, []).append(call)
        return found

    def _recorded(self, layer: keras.Layer, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            # A loop's tensors cannot be read outside of it.
            if self._inside or tf.compat.v1.get_default_graph() is not self._graph:
                return method(*args, **kwargs)
            self._add(layer, (args, kwargs))
            self._inside = True
            try:
                result = method(*args, **kwargs)
            finally:
                self._inside = False
            tensors = floating_tensors(result)
            self._kept += tensors
            self._flows |= {id(tensor): self._has_gradient(tensor) for tensor in tensors}
            self._made |= {id(tensor): layer for tensor in tensors}
            return result

        return call

    def _add(self, layer: keras.Layer, arguments: Any) -> None:
        leaves = keras.tree.flatten(arguments)
        places = [place for place, leaf in enumerate(leaves) if tf.is_tensor(leaf)]
        tensors = [leaves[place] for place in places]
        sources = [self._sources(tensor)[0] if has_gradients(tensor) else set() for tensor in tensors]
        gradients = [has_gradients(tensor) and self._has_gradient(tensor) for tensor in tensors]
        empty = keras.tree.map_structure(lambda leaf: None if tf.is_tensor(leaf) else leaf, arguments)
        self.calls.append(StepCall(layer, empty, places, tensors, gradients))
        for tensor, those in zip(tensors, sources, strict=True):
            self.links += [(source, layer, tensor.shape.num_elements() or 0) for source in those]

    def _has_gradient(self, tensor: tf.Tensor) -> bool:
        return self._sources(tensor, ends=("StopGradient", "PreventGradient"))[1]

    def _sources(self, tensor: tf.Tensor, ends: tuple[str, ...] = ()) -> tuple[set[keras.Layer | None], bool]:
        """The layers whose outputs a tensor was computed from by operations alone; None for the data and constants.

        And whether it was computed from trainable weights: the model's own, or those of layers.
        """
        found: set[keras.Layer | None] = set()
        trained = False
        waiting, seen = [tensor], {id(tensor)}
        while waiting:
            one = waiting.pop()
            if id(one) in self._made:
                found.add(self._made[id(one)])
                trained |= self._flows[id(one)]
                continue
            trained |= id(one) in self._trained
            if one.op.type == "Placeholder":
                found.add(None)
            passed = () if one.op.type in ends else one.op.inputs
            before = [x for x in passed if id(x) not in seen and has_gradients(x)]
            self._kept += before
            seen.update(map(id, before))
            waiting += before
        return found or {None}, trained


def kind_of(layer: keras.Layer, calls: list[StepCall]) -> Any:
    """Returns what is equal for calls that compute alike: of the same class, config, weights and inputs."""
    weights = [(weight.shape, weight.trainable) for weight in layer.weights]
    inputs = [[(tensor.shape, tensor.dtype) for tensor in call.tensors] for call in calls]
    how = [(call.arguments, call.places, call.has_gradient) for call in calls]
    return str(([_kind(one) for one in layer._flatten_layers()], weights, inputs, how))


def _kind(layer: keras.Layer) -> Any:
    """Returns what tells layers apart, but for their weights; a user's class need not put everything in its config."""
    if isinstance(layer, keras.Sequential):  # its config has names, and the layers follow
        return type(layer)
    try:
        config = _without_names(layer.get_config() | {"name": None})
    except Exception:  # noqa: BLE001 - a user's class without a config
        return id(layer)
    names = set() if is_keras_own(layer) else vars(layer).keys() - vars(keras.Layer()).keys() - _OF_EACH
    own = [(name, _plain(vars(layer)[name])) for name in sorted(names) if not name.startswith("_self_")]
    return type(layer), config, own


def _plain(value: Any) -> Any:
    """Returns what tells values of a layer's attributes apart; layers inside it and weights are looked at elsewhere."""
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return [(key, _plain(one)) for key, one in value.items()]
    if isinstance(value, keras.Layer | keras.Variable):
        return type(value)
    if isinstance(value, _PLAIN) or value is None:
        return value
    return _without_names(value.get_config()) if hasattr(value, "get_config") else id(value)


def _without_names(config: Any) -> Any:
    """Returns a config without the names of layers in it, unlike those of dtype policies."""
    if isinstance(config, dict):
        named = "trainable" not in config
        return {name: _without_names(value) for name, value in config.items() if named or name != "name"}
    return [_without_names(one) for one in config] if isinstance(config, list | tuple) else config


def _outermost(model: keras.Model) -> Iterator[keras.Layer]:
    for layer in model._flatten_layers(include_self=False, recursive=False):
        if isinstance(layer, keras.Model):
            yield from _outermost(layer)
        elif not isinstance(layer, keras.layers.InputLayer):
            yield layer
