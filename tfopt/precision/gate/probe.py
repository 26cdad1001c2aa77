"""A training step under two sets of dtype policies, forward and backward, compared layer by layer in one graph."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfopt.errors import UnsupportedError, summarize_error
from tfopt.model.layers import (
    LayerError,
    RecordedCall,
    computing_layers,
    floating_tensors,
    graph_operations,
    layer_without_gradient,
    output_layers,
    recorded_calls,
)
from tfopt.precision.float8_margins import quantization_recorded
from tfopt.precision.gate.graph import Origin, Probability, late_casts, origins
from tfopt.precision.gate.layer_table import Deviation
from tfopt.precision.gate.own_step import Optimizer, OwnStep, has_own_step, run, touched_variables, without_scaling
from tfopt.precision.layer_policies import current_policy, under_policies
from tfopt.precision.optimizer_swap import first_scale
from tfopt.repairs import recomputation_refused, recomputes
from tfopt.text import listed

_16_BIT = (tf.float16, tf.bfloat16)
# Training halves the loss scale below 1 too, as long as gradients overflow.
_LEAST_SCALE = 2.0**-24
# Fewer values of a feature say nothing about its spread.
_LEAST_ROWS = 8
# Spread over magnitude of a feature that is constant but for float32's rounding.
_CONSTANT = 1e-5
# Operations that draw from their own state, such as those of tf.random.Generator.
_DRAWING = ("Rng", "StatefulUniform", "StatefulStandardNormal", "StatefulTruncatedNormal")


class Variant(NamedTuple):
    """A compiled model and the dtype policies its layers compute under."""

    model: keras.Model
    paths: Mapping[keras.Layer, str]
    policies: Mapping[keras.Layer, keras.DTypePolicy]
    """Those of other layers stay."""


class NotFiniteError(Exception):
    """Float32 itself gives no finite loss or gradient; holds the first layer whose output is not finite, or None."""


class Measurement(NamedTuple):
    """One batch: the moments of each row of the probe, the grids, and both losses."""

    moments: np.ndarray[Any, Any]
    grids: np.ndarray[Any, Any]
    reference_loss: float
    candidate_loss: float
    quantized: np.ndarray[Any, Any]
    """The sums of each tensor rounded to float8, as `measured_margins` takes them."""


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
        self._applied = applied
        self._optimizers: list[Optimizer | None] = []
        self.updates = 0
        """How often a model's own train_step updates weights."""
        self.unscaled: list[str] = []
        """Names of the optimizers that would divide by a loss scale which no loss was multiplied by."""
        self._state: tuple[tf.Variable, ...] = ()
        self.not_run = ""
        """Why the model's own train_step was not run, if it has one."""
        self._own = has_own_step(reference.model)
        if self._own:
            self._look_at_own_step(batch)
        self._function = tf.function(self._compare, autograph=False)
        graph = self._function.get_concrete_function(batch, tf.TensorSpec([None], tf.float32)).graph
        self.variables = (*graph.variables, *self._state)
        """Every variable the step may touch."""
        operations = graph_operations(graph)
        random = [op for op in operations if "Random" in op.op or op.op.startswith(_DRAWING)]
        # A model's own step draws from tf.random with seeds, and all variables are put back between its two runs.
        stateful = [op for op in random if "Stateless" not in op.op and not self._own]
        self.draws_differ = bool(stateful) or any(op.attr["dtype"].type in _16_BIT for op in random)
        """Whether random numbers are drawn that no seed makes equal in both dtypes."""
        self.assigns = not self._own and any(op.op.startswith("Assign") for op in operations)
        """Whether a variable unknown to Keras is assigned, so that the variants start from different states."""

    def __call__(self, batch: Any, scales: Sequence[float]) -> Measurement:
        """Compares the variants on a batch; the candidate's losses are scaled for the backward pass, then unscaled."""
        values, grids, quantized, losses = self._function(batch, tf.constant(scales, tf.float32, [len(scales)]))
        return Measurement(values.numpy(), grids.numpy(), float(losses[0]), float(losses[1]), np.array(quantized))

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
                    self._state = touched_variables(self.reference.model, batch)
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

    def _keras_steps(self, batch: Any, scales: tf.Tensor) -> tuple["_Step", "_Step"]:
        scale = self._scale(self.reference.model.optimizer, scales)
        return _step(self.reference, batch, tf.constant(1.0)), _step(self.candidate, batch, scale)

    def _own_steps(self, batch: Any, scales: tf.Tensor) -> tuple["_Step", "_Step"]:
        reference, _ = _own_step(self.reference, batch, lambda _: tf.ones([]), self._state)
        candidate, step = _own_step(self.candidate, batch, lambda one: self._scale(one, scales), self._state)
        adapting = [optimizer for optimizer in self._optimizers if self._first_scale(optimizer)]
        self.updates, self.unscaled = len(step.updates), without_scaling(step, adapting, scales)
        return reference, candidate

    def _compare(
        self, batch: Any, scales: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]:
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
        grids = [grid(*pairs[place][1:]) for place in self.grids]
        return (
            values,
            tf.stack(grids) if grids else tf.zeros([0, 5]),
            [one.sums for one in quantized],
            (reference.loss, candidate.loss),
        )


# A row, and which of its tensors: a position or the name of a variable.
_Tensors = dict[tuple[Row, str], tf.Tensor]


class _Step(NamedTuple):
    """What a step computed, with gradients unscaled."""

    loss: tf.Tensor
    outputs: list[tf.Tensor]
    tensors: _Tensors
    calls: list[RecordedCall]


def _step(variant: Variant, batch: Any, scale: tf.Tensor) -> _Step:
    model, paths, policies = variant
    variables = model.variables
    values = [tf.convert_to_tensor(variable.value) for variable in variables]
    value_of = {id(variable): value for variable, value in zip(variables, values, strict=True)}
    # Layers' tensors are not watched: training takes no gradients upstream of every trainable weight, and some
    # operations, such as those of Keras' augmentation in bfloat16, have none.
    with under_policies(model, policies), tf.GradientTape() as tape, recorded_calls(model) as calls:
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
        scaled = loss * scale
    tensors = _tensors_of_calls(calls, paths)
    by_layer = _weights_by_layer(model.trainable_variables, calls, paths)
    weights = {key: value_of[id(weight)] for key, weight in by_layer.items()}
    sources = {id(tensor): tensor for tensor in (tensors | weights).values()}
    try:
        taken = tape.gradient(scaled, [*sources.values()])
    except Exception as error:  # whatever an operation's gradient raises on tensors of this dtype
        layer = layer_without_gradient(scaled, calls)
        if layer is None:
            raise
        raise LayerError(layer) from error
    gradients = {
        name: tf.cast(tf.convert_to_tensor(gradient), tf.float32) / scale
        for name, gradient in zip(sources, taken, strict=True)
        if gradient is not None
    }
    found = tensors | {
        (row._replace(role=f"{row.role}_gradient"), which): gradients[id(tensor)]
        for (row, which), tensor in (tensors | weights).items()
        if id(tensor) in gradients
    }
    # Of a loss per example, the tape takes the sum and Keras shows the mean.
    changed = {key: (value_of[key], value) for key, value in after.items() if value is not None}
    return _Step(tf.reduce_mean(loss), floating_tensors(outputs), found | _states(paths, changed), calls)


def _own_step(
    variant: Variant, batch: Any, scales: Callable[[Optimizer], tf.Tensor], state: Iterable[tf.Variable]
) -> tuple[_Step, OwnStep]:
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
    return _Step(step.loss, outputs, found | gradients | _states(paths, changed), calls), step


def build(model: keras.Model, batch: Any) -> None:
    """Builds a model by tracing its step, which raises whatever that raises for a batch it does not take.

    If it recomputes activations, its gradients are traced too, which raises if a second run computes something else.
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


def forward(model: keras.Model, batch: Any) -> tuple[Any, tf.Tensor]:
    """The model's outputs and its loss in training, as Keras' `train_step` computes them."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
    outputs = model(x, training=True) if model._call_has_training_arg else model(x)
    return outputs, model._compute_loss(x=x, y=y, y_pred=outputs, sample_weight=sample_weight, training=True)


def _added_loss_error(paths: Mapping[keras.Layer, str], losses: Iterable[Any], error: TypeError) -> TypeError:
    """Names the layers that add 16-bit losses, which Keras cannot sum with others; else the error as it is."""
    half = {id(loss) for loss in losses if getattr(loss, "dtype", None) in _16_BIT}
    found = [path for layer, path in paths.items() if not half.isdisjoint(layer._loss_ids)]
    if not found:
        return error
    return TypeError(f"{listed(found, 4)} adds a 16-bit loss, which Keras cannot sum with other losses")


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
                found[Row(owner, "weight"), f"{path}/{variable.name}"] = variable
    return found


def _constant_scale(optimizer: Optimizer | None) -> float:
    return float(getattr(optimizer, "loss_scale_factor", None) or 1.0)


def heads_of(model: keras.Model) -> frozenset[keras.Layer]:
    """The layers that make the model's outputs; none if they cannot be found."""
    try:
        return output_layers(model)
    except UnsupportedError:
        return frozenset()


def _states(paths: Mapping[keras.Layer, str], values: Mapping[int, tuple[tf.Tensor, tf.Tensor]]) -> _Tensors:
    """The variables in floating point that the forward pass assigns: their values before, and what is added.

    `values` holds those before and after it by the id of the variable.
    """
    found: _Tensors = {}
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


@tf.function(
    input_signature=[tf.TensorSpec([None], tf.float32)] * 2,
    autograph=False,
    experimental_attributes={"_noinline": True},  # inlined for every tensor, it took longer to optimise than to run
)
def _moments(reference: tf.Tensor, candidate: tf.Tensor) -> tf.Tensor:
    known = tf.math.is_finite(reference)
    both = known & tf.math.is_finite(candidate)
    zero = tf.zeros_like(reference)
    reference = tf.where(known, reference, zero)
    # Squares of large or tiny values leave float32's range, so the sums are in units of the largest value.
    largest = tf.maximum(tf.reduce_max(tf.abs(reference)), 0.0)  # the maximum of an empty tensor is -inf
    unit = tf.maximum(tf.reduce_max(tf.where(both, tf.abs(candidate), zero)), largest)
    difference = tf.where(both, tf.math.divide_no_nan(candidate, unit) - tf.math.divide_no_nan(reference, unit), zero)
    squares = tf.math.divide_no_nan(reference, unit) ** 2
    vanished = both & (candidate == 0) & (reference != 0)
    counts = (known, known & ~both, reference != 0, vanished)
    sums = (squares, difference**2, tf.where(vanished, squares, zero))
    return tf.stack(
        [
            tf.cast(tf.size(known) - tf.math.count_nonzero(known, dtype=tf.int32), tf.float32),
            *(tf.math.count_nonzero(count, dtype=tf.float32) for count in counts),
            *(tf.reduce_sum(part) for part in sums),
            unit,
            largest,
        ]
    )


def moments(reference: Any, candidate: Any) -> tf.Tensor:
    """What `worst_deviation` needs of a tensor in two dtypes, shape (10,), so that no tensor leaves the graph."""
    flat = [tf.reshape(tf.cast(tf.convert_to_tensor(value), tf.float32), [-1]) for value in (reference, candidate)]
    return _moments(*flat)


def grid(reference: tf.Tensor, candidate: tf.Tensor) -> tf.Tensor:
    """Compares the features (last axis) of a tensor of the batch: which one rounding hides most.

    Returns, of that feature, the rounding error over its spread, both as standard deviations over the batch, its
    number, its largest magnitude and its spread; and the share of elements that change if all are whole numbers.
    """
    width = reference.shape[-1] if reference.shape.rank and reference.shape.rank > 1 else 1
    values, found = (tf.reshape(tf.cast(x, tf.float32), [-1, width or 1]) for x in (reference, candidate))
    known = tf.math.is_finite(values)
    values = tf.where(known, values, 0.0)
    off = tf.where(known, found - values, 0.0)
    spread = tf.math.reduce_std(values, axis=0)
    # A feature that hardly varies beside the others, such as the background of an image, tells little.
    tells = (spread >= 0.1 * tf.sqrt(tf.reduce_mean(spread**2))) & (tf.shape(values)[0] >= _LEAST_ROWS)
    tells &= spread > _CONSTANT * tf.reduce_max(tf.abs(values), axis=0)
    error = tf.sqrt(tf.reduce_mean(tf.where(tf.math.is_finite(off), off, np.inf) ** 2, axis=0))
    ratio = tf.where(tells, error / spread, 0.0)
    worst = tf.argmax(ratio)
    changed = tf.reduce_mean(tf.cast(off != 0, tf.float32))
    parts = [ratio[worst], tf.cast(worst, tf.float32), tf.reduce_max(tf.abs(values[:, worst])), spread[worst]]
    return tf.stack([*parts, tf.where(tf.reduce_all(values == tf.round(values)), changed, 0.0)])


def worst_deviation(batches: Iterable[np.ndarray[Any, Any]]) -> Deviation:
    """The deviation of some tensors taken together, from their moments in each batch, shape (tensors, 10)."""
    each = [_of_batch(batch.astype("float64")) for batch in batches]
    # Python's max() ignores a NaN or not, depending on its place.
    return Deviation(**{name: float(np.max([part[name] for part in each])) for name in each[0]})


def not_finite(moments: np.ndarray[Any, Any]) -> bool:
    """Whether float32 itself has NaN or infinity, from moments of shape (tensors, 10)."""
    return bool(moments[:, 0].any())


def _of_batch(moments: np.ndarray[Any, Any]) -> dict[str, float]:
    _, known, overflowed, nonzero, vanished, *sums, unit, largest = moments.T
    total, difference, lost = (float(np.sum(part * unit**2)) for part in sums)
    return {
        "error": _ratio(math.sqrt(difference), math.sqrt(total)),
        "overflow": _ratio(overflowed.sum(), known.sum()),
        "underflow": _ratio(vanished.sum(), nonzero.sum()),
        "lost": _ratio(math.sqrt(lost), math.sqrt(total)),
        "largest": float(largest.max(initial=0.0)),
        "norm": math.sqrt(total),
        "difference": math.sqrt(difference),
    }


def _ratio(part: float, whole: float) -> float:
    if not part:
        return 0.0
    return float(part / whole) if whole else math.inf
