"""A training step under two sets of dtype policies, forward and backward, compared layer by layer in one graph."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfopt.errors import summarize_error
from tfopt.model.layers import (
    computing_layers,
    graph_operations,
)
from tfopt.model.state import StatePreserver, same_draws
from tfopt.precision.float8_margins import quantization_recorded
from tfopt.precision.gate.graph import (
    Origin,
    Probability,
    in_float32,
    late_casts,
    may_be_of_16_bits,
    origins,
    sums_of,
)
from tfopt.precision.gate.layer_table import StatePrecision
from tfopt.precision.gate.moments import grid, moments, not_finite, worst_deviation
from tfopt.precision.gate.own_step import (
    Optimizer,
    has_own_step,
    touched_variables,
    without_scaling,
)
from tfopt.precision.gate.training_step import Row, Step, Variant, advanced, custom_step, keras_step
from tfopt.precision.layer_policies import current_policy, under_policies
from tfopt.precision.optimizer_swap import first_scale

_16_BIT = (tf.float16, tf.bfloat16)
# Training halves the loss scale below 1 too, as long as gradients overflow.
_LEAST_SCALE = 2.0**-24
# Operations that draw from their own state, such as those of tf.random.Generator.
_DRAWING = ("Rng", "StatefulUniform", "StatefulStandardNormal", "StatefulTruncatedNormal")
# Whole numbers of that size are 4 apart: what was added in each of as many steps is less than half of that.
STEPS = {"bfloat16": 576, "float16": 4608}
# A state that moves by the same amount there as it does now is a sum. A moving average, whose steps shrink, is not, nor
# is a counter that begins again.
_SAME = 0.1


class NotFiniteError(Exception):
    """Float32 itself gives no finite loss or gradient; holds the first layer whose output is not finite, or None."""


class Measurement(NamedTuple):
    """One batch: the moments of each row of the probe, the grids, and both losses."""

    moments: np.ndarray[Any, Any]
    grids: np.ndarray[Any, Any]
    reference_loss: float
    candidate_loss: float
    scaled: np.ndarray[Any, Any]
    """The moments of the gradients under two loss scales."""
    sums: np.ndarray[Any, Any]
    """The moments of the sums in 16 bits, beside float32 sums of the same."""
    quantized: np.ndarray[Any, Any]
    """The sums of each tensor rounded to float8, as `measured_margins` takes them."""


class Probe:
    """Runs two variants on a batch, from the same weights, without changing a Keras variable.

    Both must have the same layers. Gradients are those of `compute_loss`, as in Keras' own `train_step`, or those that
    a model's own `train_step` hands to its optimizers. The caller switches dropout off: masks differ between dtypes.
    """

    def __init__(self, reference: Variant, candidate: Variant, batch: Any, *, applied: bool):
        self.reference = reference
        self.candidate = candidate
        self.rows: list[Row] = []
        """What the rows of moments are of, by calls in the order in which they end."""
        self.quantized: list[tuple[str, str]] = []
        """Layer and tensor of each tensor that the candidate rounds to float8."""
        self.origins: list[Origin] = []
        """Where the candidate's tensors come from."""
        self.places: dict[int, int] = {}
        """The first row of each of its tensors, by id."""
        self.grids: list[int] = []
        """The rows whose features are compared one by one: 16-bit tensors of the batch, and what becomes integers."""
        self.constants: dict[str, list[float]] = {}
        """The extreme constants that float32 computes each layer's tensors with, by path."""
        self.always_16_bits: list[str] = []
        """The layers that take or return what float32 computes in 16 bits, too, in operations between layers."""
        self.late_casts: list[Probability] = []
        """The softmaxes and the like that the candidate computes in 16 bits to make an output."""
        self.has_16_bit_output = False
        """Whether the candidate outputs float16 or bfloat16."""
        model, paths, policies = candidate
        self.policies = {path: policies.get(layer, current_policy(layer)) for layer, path in paths.items()}
        """The candidate's policy of every layer, by path."""
        self.computing = [self.policies[paths[layer]] for layer in computing_layers(model)]
        """The policies of its layers that compute."""
        self.scaled_rows: list[Row] = []
        """What the rows of moments are of that compare float32 under two loss scales."""
        self.sums: list[tuple[Row, tf.Operation]] = []
        """The sums in 16 bits of which the candidate makes the gradient of a variable."""
        self.states_in_16_bits: list[Row] = []
        """The states whose new values may come from a tensor of 16 bits."""
        self._applied = applied
        self._optimizers: list[Optimizer | None] = []
        self.updates = 0
        """How often a model's own train_step updates weights."""
        self.unscaled: list[str] = []
        """Names of the optimizers that would divide by a loss scale which no loss was multiplied by."""
        self.put_back: tuple[tf.Variable, ...] = ()
        """Variables that a step assigns, so that both variants start from the same ones."""
        self.not_run = ""
        """Why the model's own train_step was not run, if it has one."""
        self._own = has_own_step(reference.model)
        if self._own:
            self._look_at_own_step(batch)
        graph, operations = self._trace(batch)
        if not self._own and any(op.op.startswith(("Assign", *_DRAWING)) for op in operations):
            known = {id(x.value) for one in (reference.model, model) for x in one.variables}
            self.put_back = tuple(variable for variable in graph.variables if id(variable) not in known)
            graph, operations = self._trace(batch)
        self.variables = (*graph.variables, *self.put_back)
        """Every variable the step may touch."""
        random = [op for op in operations if "Random" in op.op or op.op.startswith(_DRAWING)]
        # Normal ones are drawn in float32 and rounded.
        self.draws_differ = any(op.attr["dtype"].type in _16_BIT and not _is_normal(op.op) for op in random)
        """Whether random numbers are drawn that no seed makes equal in both dtypes."""

    def __call__(self, batch: Any, scales: Sequence[float]) -> Measurement:
        """Compares the variants on a batch; the candidate's losses are scaled for the backward pass, then unscaled."""
        found = self._function(batch, tf.constant(scales, tf.float32, [len(scales)]))
        values, grids, scaled, sums, quantized, losses = found
        both = float(losses[0]), float(losses[1])
        return Measurement(values.numpy(), grids.numpy(), *both, scaled.numpy(), sums.numpy(), np.array(quantized))

    def measure(self, batches: Sequence[Any]) -> tuple[list[Measurement], float]:
        """Compares the variants on batches, with the loss scale halved while a gradient overflows, as in training.

        Returns the measurements and the last loss scale, the largest if there are several.

        Raises:
            NotFiniteError: If the loss or a gradient is not finite in float32.
        """
        weights = [row.role == "weight_gradient" for row in self.rows]
        firsts = [self._first_scale(optimizer) for optimizer in self._optimizers]
        scales = [scale or _constant_scale(x) for x, scale in zip(self._optimizers, firsts, strict=True)]
        measured = []
        for batch in batches:
            one = self(batch, scales)
            while (
                any(scale and now > _LEAST_SCALE for scale, now in zip(firsts, scales, strict=True))
                and math.isfinite(one.candidate_loss)
                and worst_deviation([one.moments[weights]]).overflow
            ):
                scales = [now / 2 if scale else now for scale, now in zip(firsts, scales, strict=True)]
                one = self(batch, scales)
            if not math.isfinite(one.reference_loss) or not_finite(one.moments[weights]):
                outputs = [place for place, row in enumerate(self.rows) if row.role == "output"]
                found = (self.rows[place].path for place in outputs if not_finite(one.moments[[place]]))
                raise NotFiniteError(next(found, None))
            measured.append(one)
        return measured, max(scales, default=1.0)

    @property
    def plain(self) -> list[Optimizer | None]:
        """The optimizers that train float16 layers without adapting a loss scale."""
        return [optimizer for optimizer in self._optimizers if self._first_scale(optimizer) is None]

    def _look_at_own_step(self, batch: Any) -> None:
        """Finds out whether the model's own train_step can be run, and which variables it touches."""
        if self.candidate.model is not self.reference.model:
            self.not_run = "float8 is checked on a copy"
        else:
            try:
                with under_policies(self.reference.model, self.reference.policies):
                    self.put_back = touched_variables(self.reference.model, batch)
            except Exception as error:  # noqa: BLE001 - whatever the user's train_step raises outside of fit
                self.not_run = summarize_error(error)
        self._own = not self.not_run

    def _first_scale(self, optimizer: Optimizer | None) -> float | None:
        with tf.init_scope():  # while it traces, too, the scale is read as it is now
            return first_scale(self.reference.model, optimizer, applied=self._applied)

    def _scale(self, optimizer: Optimizer | None, scales: tf.Tensor) -> tf.Tensor:
        """The candidate's loss scale for an optimizer."""
        if all(policy.compute_dtype != "float16" for policy in self.computing):
            return tf.ones([])
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
        return scales[self._optimizers.index(optimizer)]

    def _trace(self, batch: Any) -> tuple[Any, list[Any]]:
        """The graph of the comparison, and its operations."""
        self.constants.clear()
        self.always_16_bits.clear()
        self._function = tf.function(self._compare, autograph=False)
        graph = self._function.get_concrete_function(batch, tf.TensorSpec([None], tf.float32)).graph
        return graph, graph_operations(graph)

    def _keras_steps(self, batch: Any, scales: tf.Tensor) -> tuple[Step, Step]:
        scale = self._scale(self.reference.model.optimizer, scales)
        before = [(variable, tf.identity(variable)) for variable in self.put_back]
        with same_draws():
            reference = keras_step(self.reference, batch, tf.constant(1.0), scale if self._optimizers else None)
        for variable, value in before:
            variable.assign(value)
        with same_draws():
            return reference, keras_step(self.candidate, batch, scale)

    def _own_steps(self, batch: Any, scales: tf.Tensor) -> tuple[Step, Step]:
        reference, _ = custom_step(self.reference, batch, lambda _: tf.ones([]), self.put_back)
        candidate, step = custom_step(self.candidate, batch, lambda one: self._scale(one, scales), self.put_back)
        if self._optimizers:
            scaled, _ = custom_step(self.reference, batch, lambda one: self._scale(one, scales), self.put_back)
            reference = reference._replace(scaled=scaled.tensors)
        adapting = [optimizer for optimizer in self._optimizers if self._first_scale(optimizer)]
        self.updates, self.unscaled = len(step.updates), without_scaling(step, adapting, scales)
        return reference, candidate._replace(loss=step.loss)

    def _compare(
        self, batch: Any, scales: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor, list[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]:
        with quantization_recorded(self.candidate.paths) as quantized:
            reference, candidate = self._own_steps(batch, scales) if self._own else self._keras_steps(batch, scales)
        self.quantized = [(one.path, one.tensor) for one in quantized]
        self.has_16_bit_output = any(output.dtype in _16_BIT for output in candidate.outputs)
        pairs = [
            (row, expected, tensor)
            for (row, which), tensor in candidate.tensors.items()
            if (expected := reference.tensors.get((row, which))) is not None
            and expected.shape.is_compatible_with(tensor.shape)
        ]
        self.rows = [row for row, _, _ in pairs]
        self.states_in_16_bits = [
            row for row, _, tensor in pairs if row.role == "change" and may_be_of_16_bits(tensor.op.inputs[0])
        ]
        scaled = [
            (row, moments(reference.tensors[row, which], tensor))
            for (row, which), tensor in reference.scaled.items()
            if row.role.endswith("gradient") and (row, which) in reference.tensors
        ]
        self.scaled_rows = [row for row, _ in scaled]
        gradients = [(row, tensor) for row, _, tensor in pairs if row.role == "weight_gradient"]
        self.sums = [(row, op) for row, gradient in gradients for op in sums_of(gradient)]
        sums = [moments(in_float32(op), op.outputs[0]) for _, op in self.sums]
        self.late_casts = late_casts(candidate.outputs, candidate.calls)
        for origin in origins(reference.calls):
            path = self.reference.paths[origin.layer]
            self.constants.setdefault(path, []).extend(origin.constants)
            if origin.computes_in_16_bits and (origin.is_input or origin.layer._layers):
                self.always_16_bits.append(path)
        self.places = {id(tensor): place for place, (_, _, tensor) in reversed([*enumerate(pairs)])}
        self.origins = [one for one in origins(candidate.calls) if id(one.tensor) in self.places]
        data = [one for one in self.origins if one.is_data and one.tensor.dtype in _16_BIT]
        # Normalization casts its input by itself; its output has one feature for each of its input.
        inexact = [one.tensor for one in data if one.is_input or isinstance(one.layer, keras.layers.Normalization)]
        ids = [source for one in self.origins if one.makes_integers for source in one.sources]
        self.grids = sorted({self.places[id(tensor)] for tensor in inexact + ids if id(tensor) in self.places})
        # One layer's output is the next one's input: each pair of tensors is compared once.
        distinct = {(id(a), id(b)): (a, b) for _, a, b in pairs}
        compared = {ids: moments(*tensors) for ids, tensors in distinct.items()}
        values = tf.stack([compared[id(a), id(b)] for _, a, b in pairs])
        normalised = {
            self.places[id(one.tensor)]: one.layer.epsilon
            for one in data
            if one.is_input and isinstance(one.layer, keras.layers.BatchNormalization)
        }
        grids = [grid(*pairs[place][1:], normalised.get(place)) for place in self.grids]
        return (
            values,
            tf.stack(grids) if grids else tf.zeros([0, 5]),
            tf.stack([found for _, found in scaled]) if scaled else tf.zeros([0, 11]),
            tf.stack(sums) if sums else tf.zeros([0, 11]),
            [one.sums for one in quantized],
            (reference.loss, candidate.loss),
        )


def _constant_scale(optimizer: Optimizer | None) -> float:
    return float(getattr(optimizer, "loss_scale_factor", None) or 1.0)


def _is_normal(operation: str) -> bool:
    return "Normal" in operation and "Truncated" not in operation


def states_ahead(probe: Probe, batch: Any) -> Iterator[StatePrecision]:
    """The sums among the states that a forward pass assigns in 16 bits, many steps from now; the model is unchanged."""
    rows = [row for row in probe.states_in_16_bits if probe.policies[row.path].compute_dtype in STEPS]
    if not rows:
        return
    states = [_states_of(variant) for variant in (probe.reference, probe.candidate)]
    keys = [key for key in states[0] if key in states[1]]
    asked = {(row.path, row.name): probe.policies[row.path].compute_dtype for row in rows}

    def compare(batch: Any) -> dict[tuple[str, str], list[tf.Tensor]]:
        def after(which: int, values: list[tf.Tensor]) -> list[tf.Tensor]:
            variant = (probe.reference, probe.candidate)[which]
            with same_draws():
                return advanced(variant, batch, [states[which][key] for key in keys], values)

        now = [tf.convert_to_tensor(states[0][key].value) for key in keys]
        step = [new - old if key in asked else None for key, new, old in zip(keys, after(0, now), now, strict=True)]
        then = [
            old if by is None else tf.cast(tf.cast(old + STEPS[asked[key]] * by, asked[key]), old.dtype)
            for key, old, by in zip(keys, now, step, strict=True)
        ]
        both = zip(keys, then, step, after(0, then), after(1, then), strict=True)
        return {
            key: [moments(by, new - old), moments(new - old, other - old), moments(old, old)]
            for key, old, by, new, other in both
            if by is not None
        }

    function = tf.function(compare, autograph=False)
    try:
        touched = function.get_concrete_function(batch).graph.variables
    except Exception:
        if not has_own_step(probe.candidate.model):
            raise
        return  # a GAN, for one, has nothing to call; the comparison sees one step of its states
    with StatePreserver(probe.candidate.model, also=touched).preserved():
        found = function(batch)
    for (path, name), tensors in found.items():
        moved, change, value = (worst_deviation([tensor.numpy()[None]]) for tensor in tensors)
        if moved.error <= _SAME and moved.norm:
            steps = STEPS[asked[path, name]]
            yield StatePrecision(path=path, name=name, change=change, value=value, inherited=0.0, ahead=steps)


def _states_of(variant: Variant) -> dict[tuple[str, str], keras.Variable]:
    return {
        (path, variable.name): variable
        for layer, path in variant.paths.items()
        for variable in layer._non_trainable_variables
    }
