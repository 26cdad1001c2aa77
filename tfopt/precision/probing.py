"""A training step under two sets of dtype policies, forward and backward, compared layer by layer in one graph."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfopt.model.layers import graph_operations, layer_paths
from tfopt.precision.deviation import moments
from tfopt.precision.layer_policies import computing
from tfopt.precision.recording import LayerCall, floating, recording
from tfopt.text import listed

_16_BIT = (tf.float16, tf.bfloat16)
# Operations that draw from a state of their own, those of tf.random.Generator among them.
_DRAWING = ("Rng", "StatefulUniform", "StatefulStandardNormal", "StatefulTruncatedNormal")


class Side(NamedTuple):
    """What computes: a compiled model, and the dtype policies of its layers."""

    model: keras.Model
    policies: Mapping[keras.Layer, keras.DTypePolicy]


@dataclass(frozen=True, slots=True)
class Measured:
    """One batch: what `tfopt.precision.deviation.moments` gave for each row of the probe, and both losses."""

    moments: np.ndarray[Any, Any]
    reference_loss: float
    candidate_loss: float


class Row(NamedTuple):
    """What a row of moments compares: a tensor of a layer.

    Its role is "input", "output", "input_gradient", "output_gradient", "weight_gradient", or "answer": a softmax
    against an output of the model that has its shape. Of a layer that is called several times, the first four are
    numbered by calls.
    """

    path: str
    role: str
    call: int = 0


class Probe:
    """Runs both sides on a batch, from the same weights, and changes no variable of Keras.

    Gradients are those of `compute_loss`, as in Keras' own `train_step`. Dropout is for the caller to take out: masks
    differ between dtypes.

    Args:
        reference: The side in float32.
        candidate: The other one, on the same model or on a clone with the same layers.
        batch: Any batch (x, y[, sample_weight]); those to come have its shapes.
    """

    def __init__(self, reference: Side, candidate: Side, batch: Any):
        self._sides = (reference, candidate)
        self._rows: list[Row] = []
        self._output_dtypes: frozenset[tf.DType] = frozenset()
        self._function = tf.function(self._compared, autograph=False)
        self._graph = self._function.get_concrete_function(batch, tf.TensorSpec([], tf.float32)).graph

    def __call__(self, batch: Any, scale: float) -> Measured:
        """Compares both sides on a batch; the candidate's loss is scaled for the backward pass, then gradients back."""
        values, losses = self._function(batch, tf.constant(scale, tf.float32))
        return Measured(values.numpy(), float(losses[0]), float(losses[1]))

    @property
    def rows(self) -> list[Row]:
        """What the rows of moments are of, by calls in the order in which they end."""
        return self._rows

    @property
    def variables(self) -> tuple[tf.Variable, ...]:
        """Every variable that the step may touch."""
        return tuple(self._graph.variables)

    @property
    def has_16_bit_output(self) -> bool:
        """Whether the candidate's model puts out float16 or bfloat16."""
        return not self._output_dtypes.isdisjoint(_16_BIT)

    @property
    def draws_differ(self) -> bool:
        """Whether random numbers are drawn that no seed makes the same in both dtypes."""
        random = [node for node in graph_operations(self._graph) if "Random" in node.op or node.op.startswith(_DRAWING)]
        return any("Stateless" not in node.op or node.attr["dtype"].type in _16_BIT for node in random)

    @property
    def assigns(self) -> bool:
        """Whether a variable is assigned that Keras does not know of, so that the sides start from different states."""
        return any(node.op.startswith("Assign") for node in graph_operations(self._graph))

    def _compared(self, batch: Any, scale: tf.Tensor) -> tuple[tf.Tensor, tuple[tf.Tensor, tf.Tensor]]:
        reference, candidate = (
            _step(*side, batch, by) for side, by in zip(self._sides, (tf.constant(1.0), scale), strict=True)
        )
        self._output_dtypes = frozenset(output.dtype for output in candidate.outputs)
        pairs = [*_pairs(reference.tensors, candidate.tensors), *_answers(candidate)]
        self._rows = [row for row, _, _ in pairs]
        # What one layer puts out the next takes in: the same tensors, compared once.
        each = {(id(a), id(b)): (a, b) for _, a, b in pairs}
        compared = {ids: moments(*tensors) for ids, tensors in each.items()}
        return tf.stack([compared[id(a), id(b)] for _, a, b in pairs]), (reference.loss, candidate.loss)


class _Step(NamedTuple):
    """What a step computed; tensors by row and number, gradients unscaled."""

    loss: tf.Tensor
    outputs: list[tf.Tensor]
    tensors: dict[tuple[Row, str], tf.Tensor]
    softmaxes: list[tuple[str, tf.Tensor]]


def _step(model: keras.Model, policies: Mapping[keras.Layer, keras.DTypePolicy], batch: Any, scale: tf.Tensor) -> _Step:
    variables = model.variables
    values = [tf.convert_to_tensor(variable.value) for variable in variables]
    value_of = {id(variable): value for variable, value in zip(variables, values, strict=True)}
    with computing(model, policies), tf.GradientTape() as tape, recording(model, tape.watch) as calls:
        tape.watch([value_of[id(variable)] for variable in model.trainable_variables])
        # Both sides start from the same state, seeds included, and none assigns anything.
        with keras.StatelessScope(zip(variables, values, strict=True), collect_losses=True) as scope:
            try:
                outputs, loss = forward(model, batch)
            except TypeError as error:
                raise _of_added_losses(model, scope.losses, error) from error
        model._clear_losses()  # it would keep tensors of this graph
        loss = tf.cast(loss, tf.float32)
        scaled = loss * scale
    paths = layer_paths(model)
    tensors = _by_layer(calls, paths) | {
        key: value_of[id(variable)] for key, variable in _weights_by_layer(model, calls, paths).items()
    }
    sources = {id(tensor): tensor for tensor in tensors.values()}
    gradients = {
        name: tf.cast(tf.convert_to_tensor(gradient), tf.float32) / scale
        for name, gradient in zip(sources, tape.gradient(scaled, [*sources.values()]), strict=True)
        if gradient is not None
    }
    kept = {key: tensor for key, tensor in tensors.items() if key[0].role in ("input", "output")}
    for (row, number), tensor in tensors.items():
        if id(tensor) in gradients:
            kept[row._replace(role=f"{row.role}_gradient"), number] = gradients[id(tensor)]
    softmaxes = [(paths[call.layer], output) for call in calls if _is_softmax(call.layer) for output in call.outputs]
    # Of a loss for each example the tape takes the sum, and Keras shows the mean.
    return _Step(tf.reduce_mean(loss), floating(outputs), kept, softmaxes)


def forward(model: keras.Model, batch: Any) -> tuple[Any, tf.Tensor]:
    """The model's outputs and its loss in training, as Keras' `train_step` computes them."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
    outputs = model(x, training=True) if model._call_has_training_arg else model(x)
    return outputs, model._compute_loss(x=x, y=y, y_pred=outputs, sample_weight=sample_weight, training=True)


def _of_added_losses(model: keras.Model, losses: Iterable[Any], error: TypeError) -> TypeError:
    """An error that names the layers whose added losses are in 16 bits, which Keras does not sum with others."""
    half = {id(loss) for loss in losses if getattr(loss, "dtype", None) in _16_BIT}
    found = [path for layer, path in layer_paths(model).items() if not half.isdisjoint(layer._loss_ids)]
    if not found:
        return error
    return TypeError(f"The loss that {listed(found, 4)} adds is in 16 bits, which Keras does not sum with other losses")


def _by_layer(calls: list[LayerCall], paths: Mapping[keras.Layer, str]) -> dict[tuple[Row, str], tf.Tensor]:
    found: dict[tuple[Row, str], tf.Tensor] = {}
    times: Counter[str] = Counter()
    for call in calls:
        path = paths[call.layer]
        for role, tensors in (("input", call.inputs), ("output", call.outputs)):
            for position, tensor in enumerate(tensors):
                found[Row(path, role, times[path]), str(position)] = tensor
        times[path] += 1
    return found


def _weights_by_layer(
    model: keras.Model, calls: list[LayerCall], paths: Mapping[keras.Layer, str]
) -> dict[tuple[Row, str], keras.Variable]:
    """Trainable weights; those of a layer whose calls were not noted count for the nearest one around it."""
    noted = {paths[call.layer] for call in calls}
    trainable = {id(variable) for variable in model.trainable_variables}
    found = {}
    for layer, path in paths.items():
        owner = path
        while owner not in noted and (outer := owner.rpartition("/")[0]):
            owner = outer
        for variable in layer._trainable_variables:
            # Scales of quantized layers are kept in variables that their "gradient" overwrites.
            if id(variable) in trainable and not getattr(variable, "overwrite_with_gradient", False):
                found[Row(owner, "weight"), f"{path}/{variable.name}"] = variable
    return found


def _is_softmax(layer: keras.Layer) -> bool:
    return isinstance(layer, keras.layers.Softmax) or getattr(layer, "activation", None) is keras.activations.softmax


def _pairs(
    reference: Mapping[tuple[Row, str], tf.Tensor], candidate: Mapping[tuple[Row, str], tf.Tensor]
) -> Iterator[tuple[Row, tf.Tensor, tf.Tensor]]:
    for key, tensor in candidate.items():
        if key in reference and reference[key].shape.is_compatible_with(tensor.shape):
            yield key[0], reference[key], tensor


def _answers(step: _Step) -> Iterator[tuple[Row, tf.Tensor, tf.Tensor]]:
    for path, tensor in step.softmaxes:
        for output in step.outputs:
            if tensor.dtype in _16_BIT and tensor.shape.is_compatible_with(output.shape):
                yield Row(path, "answer"), tensor, output
