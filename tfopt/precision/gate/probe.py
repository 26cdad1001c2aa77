"""A training step under two sets of dtype policies, forward and backward, compared layer by layer in one graph."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfopt.model.layers import graph_operations, layer_paths
from tfopt.model.outputs import calls_wrapped
from tfopt.precision.gate.layer_table import moments
from tfopt.precision.layer_policies import under_policies
from tfopt.text import listed

_16_BIT = (tf.float16, tf.bfloat16)
# Operations that draw from their own state, such as those of tf.random.Generator.
_DRAWING = ("Rng", "StatefulUniform", "StatefulStandardNormal", "StatefulTruncatedNormal")


class Variant(NamedTuple):
    """A compiled model and the dtype policies its layers compute under."""

    model: keras.Model
    policies: Mapping[keras.Layer, keras.DTypePolicy]


class Measurement(NamedTuple):
    """One batch: the moments of each row of the probe, and both losses."""

    moments: np.ndarray[Any, Any]
    reference_loss: float
    candidate_loss: float


class Row(NamedTuple):
    """What a row of moments compares: a tensor of a layer.

    The role is "input", "output", "input_gradient", "output_gradient", "weight_gradient", or "answer": a softmax
    against a model output of its shape.
    """

    path: str
    role: str
    call: int = 0
    """Which call of the layer, for all but weight gradients and answers."""


class Probe:
    """Runs two variants on a batch, from the same weights, without changing a Keras variable.

    Both must have the same layers. Gradients are those of `compute_loss`, as in Keras' own `train_step`. The caller
    switches dropout off, since masks differ between dtypes.
    """

    def __init__(self, reference: Variant, candidate: Variant, batch: Any):
        self._variants = (reference, candidate)
        self.rows: list[Row] = []
        """What the rows of moments are of, by calls in the order in which they end."""
        self.has_16_bit_output = False
        """Whether the candidate outputs float16 or bfloat16."""
        self._function = tf.function(self._compare, autograph=False)
        self._graph = self._function.get_concrete_function(batch, tf.TensorSpec([], tf.float32)).graph

    def __call__(self, batch: Any, scale: float) -> Measurement:
        """Compares the variants on a batch; the candidate's loss is scaled in the backward pass, then unscaled."""
        values, losses = self._function(batch, tf.constant(scale, tf.float32))
        return Measurement(values.numpy(), float(losses[0]), float(losses[1]))

    @property
    def variables(self) -> tuple[tf.Variable, ...]:
        """Every variable the step may touch."""
        return tuple(self._graph.variables)

    @property
    def draws_differ(self) -> bool:
        """Whether random numbers are drawn that no seed makes equal in both dtypes."""
        random = [op for op in graph_operations(self._graph) if "Random" in op.op or op.op.startswith(_DRAWING)]
        return any("Stateless" not in op.op or op.attr["dtype"].type in _16_BIT for op in random)

    @property
    def assigns(self) -> bool:
        """Whether a variable unknown to Keras is assigned, so that the variants start from different states."""
        return any(op.op.startswith("Assign") for op in graph_operations(self._graph))

    def _compare(self, batch: Any, scale: tf.Tensor) -> tuple[tf.Tensor, tuple[tf.Tensor, tf.Tensor]]:
        reference, candidate = (
            _step(variant, batch, by) for variant, by in zip(self._variants, (tf.constant(1.0), scale), strict=True)
        )
        self.has_16_bit_output = any(output.dtype in _16_BIT for output in candidate.outputs)
        pairs = [
            (row, expected, tensor)
            for (row, which), tensor in candidate.tensors.items()
            if (expected := reference.tensors.get((row, which))) is not None
            and expected.shape.is_compatible_with(tensor.shape)
        ]
        pairs += [
            (Row(path, "answer"), softmax, output)
            for path, softmax in candidate.softmaxes
            for output in candidate.outputs
            if softmax.dtype in _16_BIT and softmax.shape.is_compatible_with(output.shape)
        ]
        self.rows = [row for row, _, _ in pairs]
        # One layer's output is the next one's input: each pair of tensors is compared once.
        distinct = {(id(a), id(b)): (a, b) for _, a, b in pairs}
        compared = {ids: moments(*tensors) for ids, tensors in distinct.items()}
        return tf.stack([compared[id(a), id(b)] for _, a, b in pairs]), (reference.loss, candidate.loss)


# A row, and which of its tensors: a position or the name of a variable.
_Tensors = dict[tuple[Row, str], tf.Tensor]


class _Step(NamedTuple):
    """What a step computed, with gradients unscaled."""

    loss: tf.Tensor
    outputs: list[tf.Tensor]
    tensors: _Tensors
    softmaxes: list[tuple[str, tf.Tensor]]


def _step(variant: Variant, batch: Any, scale: tf.Tensor) -> _Step:
    model = variant.model
    variables = model.variables
    values = [tf.convert_to_tensor(variable.value) for variable in variables]
    value_of = {id(variable): value for variable, value in zip(variables, values, strict=True)}
    with under_policies(*variant), tf.GradientTape() as tape, recorded_calls(model, tape.watch) as calls:
        tape.watch([value_of[id(variable)] for variable in model.trainable_variables])
        # Both variants start from the same state, seeds included, and neither assigns anything.
        with keras.StatelessScope(zip(variables, values, strict=True), collect_losses=True) as scope:
            try:
                outputs, loss = forward(model, batch)
            except TypeError as error:
                raise _added_loss_error(model, scope.losses, error) from error
        model._clear_losses()  # they would keep tensors of this graph
        loss = tf.cast(loss, tf.float32)
        scaled = loss * scale
    paths = layer_paths(model)
    tensors = _tensors_of_calls(calls, paths)
    weights = {key: value_of[id(weight)] for key, weight in _weights_by_layer(model, calls, paths).items()}
    sources = {id(tensor): tensor for tensor in (tensors | weights).values()}
    gradients = {
        name: tf.cast(tf.convert_to_tensor(gradient), tf.float32) / scale
        for name, gradient in zip(sources, tape.gradient(scaled, [*sources.values()]), strict=True)
        if gradient is not None
    }
    found = tensors | {
        (row._replace(role=f"{row.role}_gradient"), which): gradients[id(tensor)]
        for (row, which), tensor in (tensors | weights).items()
        if id(tensor) in gradients
    }
    softmaxes = [(paths[call.layer], output) for call in calls if _is_softmax(call.layer) for output in call.outputs]
    # Of a loss per example, the tape takes the sum and Keras shows the mean.
    return _Step(tf.reduce_mean(loss), _floating(outputs), found, softmaxes)


def forward(model: keras.Model, batch: Any) -> tuple[Any, tf.Tensor]:
    """The model's outputs and its loss in training, as Keras' `train_step` computes them."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
    outputs = model(x, training=True) if model._call_has_training_arg else model(x)
    return outputs, model._compute_loss(x=x, y=y, y_pred=outputs, sample_weight=sample_weight, training=True)


def _added_loss_error(model: keras.Model, losses: Iterable[Any], error: TypeError) -> TypeError:
    """Names the layers that add 16-bit losses, which Keras cannot sum with others; else the error as it is."""
    half = {id(loss) for loss in losses if getattr(loss, "dtype", None) in _16_BIT}
    found = [path for layer, path in layer_paths(model).items() if not half.isdisjoint(layer._loss_ids)]
    if not found:
        return error
    return TypeError(f"{listed(found, 4)} adds a 16-bit loss, which Keras cannot sum with other losses")


class RecordedCall(NamedTuple):
    """One call of a layer with its floating-point tensors."""

    layer: keras.Layer
    inputs: list[tf.Tensor]
    outputs: list[tf.Tensor]


@contextmanager
def recorded_calls(model: keras.Model, watch: Callable[[list[tf.Tensor]], None]) -> Iterator[list[RecordedCall]]:
    """Records the calls of all layers in a model, in the order in which they end, and lets a tape watch their tensors.

    Calls inside a loop or a nested function (an RNN's cell) are left out, since their tensors cannot be read from
    outside; so is a model that only returns the outputs of a layer inside it.
    """
    graph = tf.compat.v1.get_default_graph()
    calls: list[RecordedCall] = []

    def recorded(layer: keras.Layer, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            inputs, outputs = _floating((args, kwargs)), _floating(result)
            passes_on = isinstance(layer, keras.Model) and {
                id(tensor) for one in calls for tensor in one.outputs
            }.issuperset(map(id, outputs))
            if tf.compat.v1.get_default_graph() is graph and not passes_on:
                watch(inputs + outputs)
                calls.append(RecordedCall(layer, inputs, outputs))
            return result

        return call

    with calls_wrapped(model._flatten_layers(), recorded):
        yield calls


def _floating(values: Any) -> list[tf.Tensor]:
    """The dense floating-point tensors in any nested structure."""
    tensors = keras.tree.flatten(values)
    return [tensor for tensor in tensors if isinstance(tensor, tf.Tensor) and tensor.dtype.is_floating]


def _tensors_of_calls(calls: list[RecordedCall], paths: Mapping[keras.Layer, str]) -> _Tensors:
    found: _Tensors = {}
    times: Counter[str] = Counter()
    for call in calls:
        path = paths[call.layer]
        for role, tensors in (("input", call.inputs), ("output", call.outputs)):
            for position, tensor in enumerate(tensors):
                found[Row(path, role, times[path]), str(position)] = tensor
        times[path] += 1
    return found


def _weights_by_layer(
    model: keras.Model, calls: list[RecordedCall], paths: Mapping[keras.Layer, str]
) -> dict[tuple[Row, str], keras.Variable]:
    """Trainable weights; those of a layer without a recorded call count for the nearest recorded one around it."""
    recorded = {paths[call.layer] for call in calls}
    trainable = {id(variable) for variable in model.trainable_variables}
    found = {}
    for layer, path in paths.items():
        owner = path
        while owner not in recorded and (outer := owner.rpartition("/")[0]):
            owner = outer
        for variable in layer._trainable_variables:
            # Scales of quantized layers are variables that their "gradient" overwrites.
            if id(variable) in trainable and not getattr(variable, "overwrite_with_gradient", False):
                found[Row(owner, "weight"), f"{path}/{variable.name}"] = variable
    return found


def _is_softmax(layer: keras.Layer) -> bool:
    return isinstance(layer, keras.layers.Softmax) or getattr(layer, "activation", None) is keras.activations.softmax
