"""The gate's comparison, traced once and repeated while a model trains; and where the state it assigns is heading."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfopt.model.state import StatePreserver, draws_in_float32, same_draws, without_dropout
from tfopt.precision.gate.comparison import in_float32, measure
from tfopt.precision.gate.layer_table import AtFirst
from tfopt.precision.gate.own_step import has_own_step
from tfopt.precision.gate.precision_report import PrecisionReport
from tfopt.precision.gate.probe import Probe
from tfopt.precision.gate.training_step import Variant, advanced
from tfopt.precision.gate.verdict import CLEAN, loss_drift
from tfopt.precision.layer_policies import assign_policies, current_policy
from tfopt.precision.policies import tf32
from tfopt.text import percent

# Forward passes over which assigned state is followed. Rounding that goes up and down averages out; a lost update stays
# lost.
_PASSES = 4
# A state is stuck if this share of its change in float32 is missing, or is too much,
STUCK = 0.5
# and if it would end this far from float32's, relative to its size: an average with a momentum of 0.9 in bfloat16 stops
# within 2 % of its goal, one with 0.99 within 20 %.
ASTRAY = 0.05
# Eight roundings of float32: a change below that is none.
_UNCHANGED = 8 * 2.0**-23


@dataclass(frozen=True, slots=True)
class StateDrift:
    """How a state that a layer assigns, such as a moving average, moves from where it is now."""

    path: str
    """The layer's path and the variable's name."""
    layer: str
    """The layer's path."""
    dtype: str
    """What the layer computes in."""
    change: float
    """Norm of its change in float32 over a few forward passes, relative to its norm."""
    error: float
    """Norm of the difference of both changes, relative to float32's."""
    astray: float
    """How far from float32's it would end if it went on like this, relative to its norm."""

    @property
    def problem(self) -> str | None:
        """What is wrong, in a sentence; None if it moves as in float32."""
        if self.error <= STUCK or self.astray <= ASTRAY:
            return None
        return (
            f"{self.path!r}, which the layer assigns while it trains, changes by {percent(self.change)} in {_PASSES} "
            f"steps in float32; in {self.dtype}, {percent(min(self.error, 1.0))} of that is lost to rounding, and it "
            f"would end {percent(self.astray)} off. Keep {self.layer!r} in float32."
        )


class Repeated(NamedTuple):
    """One comparison."""

    report: PrecisionReport
    """The verdict of the gate, without a fallback."""
    states: tuple[StateDrift, ...]
    loss_drift: float
    """Relative to float32's loss or, if that is larger, to that of the first comparison."""

    @property
    def problems(self) -> tuple[str, ...]:
        """Those of the report, and states that do not move as in float32."""
        return (*self.report.problems, *(state.problem for state in self.states if state.problem))


class RepeatedComparison:
    """Compares a model, under the policies it has, with float32: on one batch, with the weights of the moment.

    Calls raise what `Probe.measure` raises, and leave the model unchanged, bit for bit.

    Args:
        model: Compiled and built.
        batch: As `model.fit` would hand it to the step.

    Raises:
        tfopt.errors.UnsupportedError: If the model cannot compute in float32.
    """

    def __init__(self, model: keras.Model, batch: Any):
        self.model = model
        self._batch = batch
        self._policies = self._present_policies()
        self._assigned = assign_policies(model, {})
        reference = in_float32(model)
        candidate = Variant(model, self._assigned.paths, self._assigned.policies | self._assigned.in_16_bits_today)
        with without_dropout(model), draws_in_float32(), tf32(False):
            self._probe = Probe(reference, candidate, batch, applied=False)
            self._states = _States(reference, candidate, batch, self._probe.put_back)
        self._preserver = StatePreserver(model, also=(*self._probe.variables, *self._states.variables))
        self._first: AtFirst | None = None

    @property
    def is_current(self) -> bool:
        """Whether the model still has the policies that were traced."""
        return self._present_policies() == self._policies

    def __call__(self) -> Repeated:
        """Compares once; a loss drifts relative to that of the first comparison, if it is smaller by now."""
        with tf32(False), self._preserver.preserved():
            found = measure(self._probe, [self._batch], self._assigned, at_first=self._first)
            states = list(self._states.follow(self._batch))
        report = found.report
        if self._first is None:
            norms = [layer.weight_gradient.norm for layer in report.layers if layer.weight_gradient]
            self._first = AtFirst(abs(report.reference_loss), math.hypot(*norms))
        inherited = {layer.path: layer.input.error for layer in report.layers if layer.input}
        own = tuple(state for state in states if inherited.get(state.layer, 0.0) <= CLEAN)
        return Repeated(report, own, loss_drift(report.candidate_loss, report.reference_loss, self._first))

    def _present_policies(self) -> list[tuple[keras.Layer, keras.DTypePolicy]]:
        return [(layer, current_policy(layer)) for layer in self.model._flatten_layers()]


class _States:
    """Follows the variables that a model's layers assign in the forward pass, in float32 and under its policies."""

    def __init__(self, reference: Variant, candidate: Variant, batch: Any, put_back: Sequence[tf.Variable]):
        self._variants = (reference, candidate)
        self._put_back = put_back
        found = {
            id(variable): (path, f"{path}/{variable.name}", variable)
            for layer, path in candidate.paths.items()
            for variable in layer._non_trainable_variables
        }
        self._owners = [*found.values()]
        self._dtypes = {
            path: candidate.policies.get(layer, current_policy(layer)).compute_dtype
            for layer, path in candidate.paths.items()
        }
        self._moving: set[int] = set()
        """The places of those that are assigned, known once it is traced."""
        self._function = tf.function(self._advance, autograph=False)
        self.variables: tuple[tf.Variable, ...] = ()
        """Every variable the forward passes may touch."""
        if self._owners:
            start = self._start()
            try:
                graph = self._function.get_concrete_function(batch, (start, start)).graph
            except Exception:
                if not has_own_step(candidate.model):
                    raise
                self._moving.clear()  # a GAN, for one, has nothing to call; the comparison sees one step of its states
            else:
                self.variables = tuple(graph.variables)

    def follow(self, batch: Any) -> Iterator[StateDrift]:
        """Runs a few forward passes from the present state, in each dtype separately."""
        if not self._moving:
            return
        state = (self._start(), self._start())
        before = [state[0][place].numpy() for place in sorted(self._moving)]
        passes = []
        for _ in range(_PASSES):
            state = self._function(batch, state)
            passes.append([[lane[place].numpy() for place in sorted(self._moving)] for lane in state])
        for at, place in enumerate(sorted(self._moving)):
            path, name, _ = self._owners[place]
            values = np.stack([before[at], *(references[at] for references, _ in passes)]).astype("float64")
            drift = _drift(values, passes[-1][1][at].astype("float64"))
            if drift is not None:
                yield StateDrift(name, path, self._dtypes[path], *drift)

    def _start(self) -> list[tf.Tensor]:
        return [tf.convert_to_tensor(variable.value) for _, _, variable in self._owners]

    def _advance(self, batch: Any, state: tuple[list[tf.Tensor], list[tf.Tensor]]) -> tuple[list[tf.Tensor], ...]:
        before = [(variable, tf.identity(variable)) for variable in self._put_back]
        after = []
        for variant, values in zip(self._variants, state, strict=True):
            for variable, value in before:
                variable.assign(value)
            with same_draws():
                after.append(self._advanced(variant, batch, values))
        return tuple(after)

    def _advanced(self, variant: Variant, batch: Any, values: list[tf.Tensor]) -> list[tf.Tensor]:
        after = advanced(variant, batch, [variable for _, _, variable in self._owners], values)
        self._moving |= {
            place
            for place, (old, new) in enumerate(zip(values, after, strict=True))
            if new is not old and old.dtype.is_floating
        }
        return after


def _drift(reference: "np.ndarray[Any, Any]", end: "np.ndarray[Any, Any]") -> tuple[float, float, float] | None:
    """Change, error and how far astray, from the states in float32, shape (1 + passes, ...), and the other's last one.

    None if float32's hardly moves.
    """
    steps = [float(np.linalg.norm(step)) for step in np.diff(reference, axis=0)]
    change, size = (float(np.linalg.norm(x)) for x in (reference[-1] - reference[0], reference[0]))
    if not math.isfinite(change) or change <= _UNCHANGED * size or not steps[0]:
        return None
    error = float(np.linalg.norm(end - reference[-1])) / change
    # Steps of an average shrink by its momentum; those of a counter do not.
    momentum = min((steps[-1] / steps[0]) ** (1 / (len(steps) - 1)), 1 - 1e-4)
    to_go = steps[0] / (1 - momentum)
    return change / size if size else math.inf, error, error * to_go / (size + to_go)
