"""A model and its layers: checks, paths, which layers compute its outputs, and recordings of their calls."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfopt.errors import UnsupportedError
from tfopt.internals.layers import Functional

_layers = keras.layers
CALL_METHODS = ("call", "quantized_call")
"""What computes a layer: Operation.__call__ calls the second one in a quantized layer."""
# Layers that only move values: their outputs were computed by the layer before.
_MOVERS = (
    _layers.Concatenate,
    _layers.Cropping1D,
    _layers.Cropping2D,
    _layers.Cropping3D,
    _layers.Flatten,
    _layers.Identity,
    _layers.Permute,
    _layers.RepeatVector,
    _layers.Reshape,
    _layers.ZeroPadding1D,
    _layers.ZeroPadding2D,
    _layers.ZeroPadding3D,
)


def require_model(model: Any) -> None:
    """Raises a TypeError if `model` is not a Keras model."""
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"Expected a keras.Model. Received: {model!r} of type {type(model).__name__}. Pass the model itself."
        )


def require_compiled(model: keras.Model) -> keras.Model:
    """Returns the model; raises a TypeError if it is not a Keras model, a ValueError if it is not compiled."""
    require_model(model)
    if not model.compiled:
        raise ValueError(
            f"Expected a compiled model. Received: {model.name!r}, which is not compiled. "
            "Call model.compile(optimizer, loss) first."
        )
    return model


def require_optimizer(model: keras.Model) -> None:
    """Raises what `require_compiled` does, and a ValueError if Keras' own training step would find no optimizer."""
    require_compiled(model)
    own_step = type(model).train_step is not keras.Model.train_step or "train_step" in vars(model)
    if model.optimizer is None and not own_step and (model.trainable_weights or not model.built):
        raise ValueError(
            f"Expected a model with an optimizer. Received: {model.name!r}, compiled with optimizer=None. Compile it "
            "with one."
        )


def is_built(layer: keras.Layer) -> bool:
    """Whether a layer has its weights; a model without a `call`, such as a GAN, if all of its parts have theirs."""
    if layer.built or not isinstance(layer, keras.Model) or type(layer).call is not keras.Model.call:
        return bool(layer.built)
    parts = layer._flatten_layers(include_self=False, recursive=False)
    return bool(parts) and all(map(is_built, parts))


def is_keras_own(layer: keras.Layer) -> bool:
    """Whether a layer's class is Keras' own; a user's subclass may compute anything."""
    return type(layer).__module__.startswith("keras.")


def layer_paths(model: keras.Model) -> dict[keras.Layer, str]:
    """Maps every layer to its path: names from the model down, without the model's own; the model to its name.

    If a layer in it has the model's name too, the model's path begins with a slash: "/net". Keras' own `layer.path` is
    None before the layer is built, and identical for two layers of nested models.
    """
    inside = model._flatten_layers(include_self=False, recursive=False)
    paths = {model: "/" * any(layer.name == model.name for layer in inside) + model.name}

    def walk(parent: keras.Layer, prefix: str) -> None:
        for layer in parent._flatten_layers(include_self=False, recursive=False):
            if layer not in paths:
                paths[layer] = prefix + layer.name
                walk(layer, paths[layer] + "/")

    walk(model, "")
    return paths


def layers_and_graphs(model: keras.Model) -> Iterator[keras.Layer]:
    """All layers in a model, itself included, and the Functional graphs through which Sequential models compute."""
    for layer in model._flatten_layers():
        yield layer
        if isinstance(layer, keras.Sequential) and layer._functional is not None:
            yield layer._functional


def computing_layers(model: keras.Model) -> list[keras.Layer]:
    """Returns the layers whose dtype policy matters because they compute something, the model itself included.

    Inputs, and models that only contain layers, merely carry the global policy of their creation. A model class with
    its own `call` may compute there.
    """
    return [layer for layer in model._flatten_layers() if not _only_holds_layers(layer)]


def _only_holds_layers(layer: keras.Layer) -> bool:
    if isinstance(layer, keras.layers.InputLayer):
        return True
    # By its call, not its class: a subclass may only add a train_step.
    return isinstance(layer, keras.Model) and type(layer).call.__module__.startswith("keras.")


def output_layers(model: keras.Model) -> frozenset[keras.Layer]:
    """Finds the layers that compute a model's outputs, with all layers inside them.

    It follows outputs back through operations (`keras.ops.softmax(x)`, `x + y`), through layers that only move values
    (Reshape, Concatenate …) and into nested models. A subclassed model, or a custom layer that holds others and has no
    weights of its own, is traced on inputs of the shapes it was built with; Keras does not keep their dtypes, so it
    tries float32 and then int32.

    Raises:
        tfopt.errors.UnsupportedError: If a subclassed model has not been called yet or cannot be traced.
    """
    if isinstance(model, keras.Sequential) and not model.built:
        found = set(_makers_of_last(model))
    elif (graph := _graph_of(model)) is not None:
        found = set().union(*(_makers(tensor) for tensor in graph.outputs))
    else:
        # A GAN's networks each make outputs of their own, and the model itself need not have a call.
        parts = [
            part for part in model._flatten_layers(include_self=False, recursive=False) if isinstance(part, keras.Model)
        ]
        own_step = type(model).train_step is not keras.Model.train_step
        found = set().union(*(output_layers(part) for part in parts)) if own_step else set()
        if not found or type(model).call is not keras.Model.call:
            found |= _traced_on_built_shapes(model)
    return frozenset(inner for layer in found for inner in layer._flatten_layers())


def _graph_of(layer: Any) -> Functional | None:
    """The Functional graph of a Functional or Sequential model."""
    if isinstance(layer, keras.Sequential):
        return layer._functional
    return layer if isinstance(layer, Functional) else None


def _makers_of_last(model: keras.Sequential) -> Iterator[keras.Layer]:
    for layer in reversed(model.layers):
        yield layer
        if not isinstance(layer, _MOVERS):
            return


def _makers(tensor: keras.KerasTensor) -> set[keras.Layer]:
    """The layers that computed a symbolic tensor."""
    operation, node_index, tensor_index = tensor._keras_history
    node = operation._inbound_nodes[node_index]
    graph = _graph_of(operation)
    if graph is not None:
        return _makers(graph.outputs[tensor_index])
    if isinstance(operation, keras.Layer):
        if _is_transparent(operation):
            return _traced(operation, node.arguments.args, node.arguments.kwargs)
        if not isinstance(operation, _MOVERS):
            return {operation}
    before = [_makers(x) for x in node.input_tensors]
    return set().union(*before, {operation} if isinstance(operation, keras.Layer) else ())


def _is_transparent(layer: keras.Layer) -> bool:
    """Whether a layer computes only through the layers inside it, like a user's block or subclassed model."""
    if is_keras_own(layer):
        return False
    own_weights = layer._trainable_variables or layer._non_trainable_variables
    return bool(layer._layers) and not own_weights


def _traced_on_built_shapes(model: keras.Model) -> set[keras.Layer]:
    shapes = model._build_shapes_dict or {}
    cause: Exception | None = None
    for dtype in ("float32", "int32") if shapes else ():
        arguments = {
            name.removesuffix("_shape"): keras.tree.map_shape_structure(partial(keras.KerasTensor, dtype=dtype), shape)
            for name, shape in shapes.items()
            if shape is not None
        }
        try:
            if len(arguments) == 1:  # built through build(input_shape), whatever the argument's name
                return _traced(model, tuple(arguments.values()), {})
            return _traced(model, (), arguments)
        except Exception as error:  # noqa: BLE001 - whatever the user's call() raises on inputs of the wrong dtype
            cause = error
    found = "cannot be traced (see the error above)" if cause else "has not been called on data yet"
    raise UnsupportedError(
        f"Expected a model whose output layers can be found, since they stay in float32. Found: {model.name!r} is "
        f"subclassed and {found}. What to do: {'call it on a batch first, or ' if not cause else ''}give a mapping "
        "that names each layer to change by its path or name, and leaves out those that make outputs."
    ) from cause


def _traced(layer: keras.Layer, args: Iterable[Any], kwargs: dict[str, Any]) -> set[keras.Layer]:
    """The layers that computed a layer's result, found in the graph of its call."""
    found: set[keras.Layer] = set()

    def run(args: Any, kwargs: Any) -> None:
        # Assigns no variables and keeps no losses, as when Keras infers shapes.
        with keras.StatelessScope(), _makers_by_id(layer) as made:
            waiting = [x for x in keras.tree.flatten(layer(*args, **kwargs)) if tf.is_tensor(x)]
            seen = {id(x): x for x in waiting}  # keeps the tensors alive, so that ids stay unique
            while waiting:
                tensor = waiting.pop()
                makers = made.get(id(tensor), ())
                found.update(makers)
                if all(isinstance(maker, _MOVERS) for maker in makers):
                    new = {id(x): x for x in tensor.op.inputs if id(x) not in seen}
                    seen |= new
                    waiting += new.values()

    def placeholder(value: Any) -> Any:
        return tf.TensorSpec(value.shape, value.dtype) if isinstance(value, keras.KerasTensor) else value

    args, kwargs = keras.tree.map_structure(placeholder, (tuple(args), dict(kwargs)))
    tf.function(run, autograph=False).get_concrete_function(args, kwargs)
    return found


@contextmanager
def _makers_by_id(outer: keras.Layer) -> Iterator[dict[int, tuple[keras.Layer, ...]]]:
    """Maps the id of each tensor to the layers that made it: the outermost ones that are not transparent."""
    made: dict[int, tuple[keras.Layer, ...]] = {}
    kept: list[Any] = []  # keeps the tensors alive, so that ids stay unique
    inside: list[keras.Layer] = []

    def recorded(layer: keras.Layer, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            inside.append(layer)
            try:
                outputs = method(*args, **kwargs)
            finally:
                inside.pop()
            for tensor in keras.tree.flatten(outputs) if not inside else ():
                # Identity returns the very tensor the layer before it made.
                before = made.get(id(tensor), ()) if isinstance(layer, _MOVERS) else ()
                made[id(tensor)] = (*before, layer)
                kept.append(tensor)
            return outputs

        return call

    layers = [x for x in outer._flatten_layers(include_self=False) if _graph_of(x) is None and not _is_transparent(x)]
    with calls_wrapped([x for x in layers if not isinstance(x, _layers.InputLayer)], recorded):
        yield made


@contextmanager
def calls_wrapped(layers: Iterable[keras.Layer], wrapper: Callable[[keras.Layer, Any], Any]) -> Iterator[None]:
    """Wraps the call methods of distinct layers, bypassing Keras' attribute tracking, and restores them afterwards."""
    before: list[tuple[keras.Layer, Mapping[str, Any]]] = []
    try:
        for layer in layers:
            before.append((layer, {name: layer.__dict__[name] for name in CALL_METHODS if name in layer.__dict__}))
            for name in CALL_METHODS:
                method = getattr(layer, name)
                layer.__dict__[name] = wraps(method)(wrapper(layer, method))
        yield
    finally:
        for layer, own in before:
            for name in CALL_METHODS:
                layer.__dict__.pop(name, None)
            layer.__dict__.update(own)


class LayerError(Exception):
    """A layer of the user's model raised an error, which is the cause of this one."""

    @property
    def layer(self) -> keras.Layer:
        """The layer."""
        return self.args[0]


class RecordedCall(NamedTuple):
    """One call of a layer with its floating-point tensors."""

    layer: keras.Layer
    inputs: list[tf.Tensor]
    outputs: list[tf.Tensor]


@contextmanager
def recorded_calls(model: keras.Model) -> Iterator[list[RecordedCall]]:
    """Records the calls of all layers in a model, in the order in which they end.

    Calls inside a loop or a nested function (an RNN's cell) are left out, since their tensors cannot be read from
    outside; so is a model that only returns the outputs of a layer inside it. A LayerError names the innermost layer
    whose call raises.
    """
    graph = tf.compat.v1.get_default_graph()
    calls: list[RecordedCall] = []
    failed: list[keras.Layer] = []

    def recorded(layer: keras.Layer, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                result = method(*args, **kwargs)
            except Exception:
                failed.append(layer)
                raise
            failed.clear()  # the user's code caught it
            inputs, outputs = floating_tensors((args, kwargs)), floating_tensors(result)
            passes_on = isinstance(layer, keras.Model) and {
                id(tensor) for one in calls for tensor in one.outputs
            }.issuperset(map(id, outputs))
            if tf.compat.v1.get_default_graph() is graph and not passes_on:
                calls.append(RecordedCall(layer, inputs, outputs))
            return result

        return call

    with calls_wrapped(model._flatten_layers(), recorded):
        try:
            yield calls
        except Exception as error:
            if failed:
                raise LayerError(failed[0]) from error
            raise


def layer_without_gradient(loss: tf.Tensor, calls: Iterable[RecordedCall]) -> keras.Layer | None:
    """The layer whose own gradient raises an error, given a loss in a graph; None if there is none."""

    def passes(tensors: list[tf.Tensor]) -> bool:
        try:
            tf.gradients(loss, tensors)  # a tape would go on upstream of the tensors
        except Exception:  # noqa: BLE001 - its layer is being looked for
            return False
        return True

    return next((call.layer for call in calls if passes(call.outputs) and not passes(call.inputs)), None)


def floating_tensors(values: Any) -> list[tf.Tensor]:
    """The dense floating-point tensors in any nested structure."""
    tensors = keras.tree.flatten(values)
    return [tensor for tensor in tensors if isinstance(tensor, tf.Tensor) and tensor.dtype.is_floating]


def graph_operations(graph: Any) -> list[Any]:
    """The node definitions of a TensorFlow graph and of every function in it."""
    definition = graph.as_graph_def()
    return [*definition.node, *(node for function in definition.library.function for node in function.node_def)]
