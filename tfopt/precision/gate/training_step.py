"""A training step of a model under some dtype policies, with the tensors and gradients of each layer, in a graph.

It is Keras' own step, or the model's if it has one.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfopt.errors import UnsupportedError
from tfopt.model.layers import (
    LayerError,
    RecordedCall,
    floating_tensors,
    graph_operations,
    layer_without_gradient,
    output_layers,
    recorded_calls,
)
from tfopt.model.step_calls import forward, outputs_of
from tfopt.precision.gate.own_step import Optimizer, OwnStep, has_own_step, run
from tfopt.precision.layer_policies import under_policies
from tfopt.repairs import recomputation_refused, recomputes
from tfopt.text import listed

_16_BIT = (tf.float16, tf.bfloat16)


class Variant(NamedTuple):
    """A compiled model and the dtype policies its layers compute under."""

    model: keras.Model
    paths: Mapping[keras.Layer, str]
    policies: Mapping[keras.Layer, keras.DTypePolicy]
    """Those of other layers stay."""


class Row(NamedTuple):
    """What a row of moments compares: a tensor of a layer.

    The role is "input", "output", "input_gradient", "output_gradient", "weight_gradient", or of a variable that the
    forward pass assigns "state", its value before, or "change", what is added to it.
    """

    path: str
    role: str
    call: int = 0
    """Which call of the layer; 0 for weight gradients and variables."""
    name: str = ""
    """Of a variable that is assigned."""


# A row, and which of its tensors: a position or the name of a variable.
Tensors = dict[tuple[Row, str], tf.Tensor]


class Step(NamedTuple):
    """What a step computed, with gradients unscaled."""

    loss: tf.Tensor
    outputs: list[tf.Tensor]
    tensors: Tensors
    calls: list[RecordedCall]
    scaled: Mapping[tuple[Row, str], tf.Tensor] = MappingProxyType({})
    """The gradients under another loss scale, unscaled; empty where they cannot differ."""


def keras_step(variant: Variant, batch: Any, scale: tf.Tensor, other_scale: tf.Tensor | None = None) -> Step:
    """Keras' own train_step without its update, in a scope that assigns nothing."""
    model, paths, policies = variant
    variables = model.variables
    values = [tf.convert_to_tensor(variable.value) for variable in variables]
    value_of = {id(variable): value for variable, value in zip(variables, values, strict=True)}
    # Layers' tensors are not watched: training takes no gradients upstream of every trainable weight, and some
    # operations, such as those of Keras' augmentation in bfloat16, have none.
    twice = other_scale is not None
    with under_policies(model, policies), tf.GradientTape(persistent=twice) as tape, recorded_calls(model) as calls:
        tape.watch([value_of[id(variable)] for variable in model.trainable_variables])
        # Both variants start from the same state, seeds included, and neither assigns anything.
        with keras.StatelessScope(zip(variables, values, strict=True), collect_losses=True) as scope:
            try:
                outputs, loss = forward(model, batch)
            except TypeError as error:
                raise _added_loss_error(paths, scope.losses, error) from error
        model._clear_losses()  # they would keep tensors of this graph
        after = {id(one): scope.get_current_value(one) for one in variables}
        loss = tf.cast(loss, tf.float32)
    tensors = _tensors_of_calls(calls, paths)
    by_layer = _weights_by_layer(model.trainable_variables, calls, paths)
    weights = {key: value_of[id(weight)] for key, weight in by_layer.items()}
    try:
        gradients = _gradients(tape, loss, scale, tensors | weights)
    except Exception as error:  # whatever an operation's gradient raises on tensors of this dtype
        layer = layer_without_gradient(loss, calls)
        if layer is None:
            raise
        raise LayerError(layer) from error
    changed = {key: (value_of[key], value) for key, value in after.items() if value is not None}
    found = tensors | gradients | _states(paths, changed)
    # Of a loss per example, the tape takes the sum and Keras shows the mean.
    scaled: Mapping[tuple[Row, str], tf.Tensor] = MappingProxyType({})
    # TensorFlow's own gradients are linear.
    if other_scale is not None and any("_gradient_op_type" in op.attr for op in graph_operations(loss.graph)):
        scaled = _gradients(tape, loss, other_scale, tensors | weights)
    return Step(tf.reduce_mean(loss), floating_tensors(outputs), found, calls, scaled)


def _gradients(tape: tf.GradientTape, loss: tf.Tensor, scale: tf.Tensor, tensors: Tensors) -> Tensors:
    """The gradients of a loss times a scale with respect to some tensors, unscaled."""
    sources = {id(tensor): tensor for tensor in tensors.values()}
    taken = tape.gradient(loss, [*sources.values()], output_gradients=tf.ones_like(loss) * scale)
    unscaled = {
        name: tf.cast(tf.convert_to_tensor(gradient), tf.float32) / scale
        for name, gradient in zip(sources, taken, strict=True)
        if gradient is not None
    }
    return {
        (row._replace(role=f"{row.role}_gradient"), which): unscaled[id(tensor)]
        for (row, which), tensor in tensors.items()
        if id(tensor) in unscaled
    }


def custom_step(
    variant: Variant, batch: Any, scales: Callable[[Optimizer], tf.Tensor], state: Iterable[tf.Variable]
) -> tuple[Step, OwnStep]:
    """The model's own train_step; `state` is every variable it touches, put back afterwards."""
    model, paths, policies = variant
    before = [(variable, tf.identity(variable)) for variable in state]
    with under_policies(model, policies), recorded_calls(model) as calls:
        step = run(model, batch, calls, scales)
    model._clear_losses()  # they would keep tensors of this graph
    old = {id(variable): value for variable, value in before}
    changed = {
        id(one): (old[id(one._value)], tf.identity(one._value))
        for one in model.non_trainable_variables
        if id(one._value) in old
    }
    for variable, value in before:
        variable.assign(value)
    found = _tensors_of_calls(calls, paths)
    places: dict[int, list[tuple[Row, str]]] = {}
    for key, tensor in found.items():
        places.setdefault(id(tensor), []).append(key)
    gradients = {}
    for number, tensor, gradient in step.of_calls:
        for row, which in places[id(tensor)]:
            gradients[row._replace(role=f"{row.role}_gradient"), f"{which} {number}"] = gradient
    variables = [variable for _, pairs in step.updates for variable, _ in pairs]
    keys = {id(variable): key for key, variable in _weights_by_layer(variables, calls, paths).items()}
    for number, (_, pairs) in enumerate(step.updates):
        for variable, gradient in pairs:
            if id(variable) in keys:
                row, which = keys[id(variable)]
                gradients[row._replace(role="weight_gradient"), f"{which} {number}"] = gradient
    making = heads_of(model)
    outputs = [output for call in calls if call.layer in making for output in call.outputs]
    return Step(step.loss, outputs, found | gradients | _states(paths, changed), calls), step


def advanced(
    variant: Variant, batch: Any, variables: Sequence[keras.Variable], values: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """The values of some variables after a forward pass that begins with others and assigns nothing."""
    with under_policies(variant.model, variant.policies):
        with keras.StatelessScope(zip(variables, values, strict=True), collect_losses=True) as scope:
            if has_own_step(variant.model):  # which may need no compiled loss
                outputs_of(variant.model, keras.utils.unpack_x_y_sample_weight(batch)[0])
            else:
                forward(variant.model, batch)
        variant.model._clear_losses()  # they would keep tensors of this graph
    return [scope.get_current_value(variable) for variable in variables]


def build(model: keras.Model, batch: Any) -> None:
    """Builds a model by tracing its step, which raises whatever that raises for a batch it does not take.

    If it recomputes activations, its gradients are traced too, which raises if the second run differs from the first.
    """

    def differentiate(batch: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = forward(model, batch)[1]
        return tape.gradient(loss, [variable.value for variable in model.trainable_variables])

    def own(batch: Any) -> None:
        run(model, batch, [], lambda _: tf.ones([]))

    def trace(function: Any) -> tf.Graph:
        return tf.function(function, autograph=False).get_concrete_function(batch).graph

    def trace_keras_step() -> None:
        if recomputes(trace(lambda batch: forward(model, batch)[1])):
            with recomputation_refused():
                trace(differentiate)

    try:
        if not has_own_step(model):
            trace_keras_step()
            return
        try:
            if recomputes(trace(own)):
                with recomputation_refused():
                    trace(own)
        except UnsupportedError:
            raise
        except Exception as error:
            with suppress(Exception):
                trace_keras_step()
                return
            raise error
    finally:
        model._clear_losses()  # they would keep tensors of that graph


def _added_loss_error(paths: Mapping[keras.Layer, str], losses: Iterable[Any], error: TypeError) -> TypeError:
    """Names the layers that add 16-bit losses, which Keras cannot sum with others; else the error as it is."""
    half = {id(loss) for loss in losses if getattr(loss, "dtype", None) in _16_BIT}
    found = [path for layer, path in paths.items() if not half.isdisjoint(layer._loss_ids)]
    if not found:
        return error
    return TypeError(f"{listed(found, 4)} adds a 16-bit loss, which Keras cannot sum with other losses")


def _tensors_of_calls(calls: list[RecordedCall], paths: Mapping[keras.Layer, str]) -> Tensors:
    found: Tensors = {}
    times: Counter[str] = Counter()
    for call in calls:
        path = paths[call.layer]
        for role, tensors in (("input", call.inputs), ("output", call.outputs)):
            for position, tensor in enumerate(tensors):
                found[Row(path, role, times[path]), str(position)] = tensor
        times[path] += 1
    return found


def _weights_by_layer(
    variables: Iterable[keras.Variable], calls: list[RecordedCall], paths: Mapping[keras.Layer, str]
) -> dict[tuple[Row, str], keras.Variable]:
    """Trainable weights; those of a layer without a recorded call count for the nearest recorded one around it."""
    recorded = {paths[call.layer] for call in calls}
    trainable = {id(variable) for variable in variables}
    found = {}
    for layer, path in paths.items():
        owner = path
        while owner not in recorded and (outer := owner.rpartition("/")[0]):
            owner = outer
        for variable in layer._trainable_variables:
            # Scales of quantized layers are variables that their "gradient" overwrites.
            if id(variable) in trainable and not getattr(variable, "overwrite_with_gradient", False):
                name = f"{path}/{variable.name}"
                found[Row(owner, "weight", name=name), name] = variable
    return found


def heads_of(model: keras.Model) -> frozenset[keras.Layer]:
    """The layers that make the model's outputs; none if they cannot be found."""
    try:
        return output_layers(model)
    except UnsupportedError:
        return frozenset()


def _states(paths: Mapping[keras.Layer, str], values: Mapping[int, tuple[tf.Tensor, tf.Tensor]]) -> Tensors:
    """The variables in floating point that the forward pass assigns: their values before, and what is added.

    `values` holds those before and after it by the id of the variable.
    """
    found: Tensors = {}
    for layer, path in paths.items():
        for variable in layer._non_trainable_variables:
            before, after = values.get(id(variable), (None, None))
            if before is None or after is before or not before.dtype.is_floating:
                continue
            if after.graph is before.graph:  # not assigned inside a loop
                old, new = tf.cast(before, tf.float32), tf.cast(after, tf.float32)
                found[Row(path, "state", name=variable.name), ""] = old
                found[Row(path, "change", name=variable.name), ""] = new - old
    return found
