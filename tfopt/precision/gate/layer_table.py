"""How far each layer is from float32, in one row per layer."""

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import keras

from tfopt.precision.float8_margins import Float8Margin


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """The distance of some tensors from float32, in the worst batch."""

    error: float
    """Norm of the difference over the norm in float32, both over finite values; infinite if only that norm is zero."""
    overflow: float
    """Share of elements, 0 to 1, that are finite in float32 and not in the other dtype."""
    underflow: float
    """Share of the elements that are nonzero in float32 and zero in the other dtype."""
    lost: float
    """Share of the float32 norm, 0 to 1, in the underflowing elements: whether those zeros matter."""
    largest: float
    """Largest magnitude in float32."""
    norm: float
    """Norm in float32."""
    difference: float
    """Norm of the difference."""
    shrunk: float = 0.0
    """How much of the length in float32, 0 to 1, is missing in the other dtype; 0 if it is longer."""

    def to_dict(self) -> dict[str, Any]:
        """JSON, with null for values that are not finite."""
        return as_json(asdict(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPrecision:
    """How far one layer is from float32, in the worst batch.

    A deviation is None where there is nothing to compare: integers, frozen weights, tensors that do not reach the loss.
    """

    path: str
    """Names from the model down to the layer."""
    kind: str
    """Its class."""
    policy: str
    """The dtype policy it was checked under."""
    output: Deviation | None = None
    input: Deviation | None = None
    """After the cast to the layer's own dtype: the error it inherits."""
    weight_gradient: Deviation | None = None
    """Gradients of its weights, and of those inside it that have no row of their own, as one vector."""
    output_gradient: Deviation | None = None
    """The gradient that reaches it."""
    input_gradient: Deviation | None = None
    """The gradient that it passes on."""
    blamed: bool = False
    """Whether it is at the root of a problem."""

    @property
    def own_error(self) -> float:
        """Error of its output beyond the inherited one, for independent errors: √(output² - input²)."""
        output, inherited = (part.error if part else 0.0 for part in (self.output, self.input))
        return math.sqrt(max(0.0, output**2 - inherited**2)) if math.isfinite(output) else math.inf

    @property
    def severity(self) -> tuple[float, ...]:
        """Sort key of tables: blamed first, then overflow, lost gradient and error."""
        gradient = self.weight_gradient
        overflow = max((part.overflow for part in (self.output, gradient) if part), default=0.0)
        # Traces of underflow are everywhere; below one percent they rank no layer.
        lost = round(gradient.lost, 2) if gradient else 0.0
        return self.blamed, overflow, lost, self.output.error if self.output else 0.0

    def to_dict(self) -> dict[str, Any]:
        """JSON."""
        return as_json(asdict(self) | {"own_error": self.own_error})


@dataclass(frozen=True, slots=True)
class AtFirst:
    """What the first comparison of a training found.

    The loss and the gradients of a trained model are small; rounding is large beside them, and harmless.
    """

    loss: float
    """Magnitude of the loss in float32."""
    gradient: float
    """Norm of all weight gradients in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPrecision:
    """How far a tensor is from float32, and those it was computed from."""

    path: str
    """The layer that computes it: the outer one, for what is computed between the layers inside it."""
    error: Deviation
    sources: tuple[Deviation, ...]
    neighbours: tuple[str, ...] = ()
    """If it is computed between layers, those that made its sources and the one that takes it."""

    @property
    def inherited(self) -> float:
        """The largest error of its sources."""
        return max((source.error for source in self.sources), default=0.0)

    @property
    def own_error(self) -> float:
        """Error beyond the inherited one, for independent errors."""
        return math.sqrt(max(0.0, self.error.error**2 - self.inherited**2))


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePrecision:
    """How far the update of a variable by the forward pass is from float32's."""

    path: str
    """Its layer."""
    name: str
    change: Deviation
    value: Deviation
    """Of its value before, the same in both."""
    inherited: float
    """The largest error of what goes into the layer."""
    ahead: int = 0
    """The step of training that it was looked at, if the state moves by the same amount in each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightGradient:
    """The gradient of one variable, and of its layer's output, from which it is computed."""

    path: str
    """Its layer."""
    name: str
    """The variable, after the path of the layer that owns it."""
    gradient: Deviation
    arriving: Deviation | None
    summed: Deviation | None
    """Of the sums in 16 bits that make it, beside sums in float32 of the same; None if there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """What 16 bits leave of the batch's values in a tensor that is computed from them alone."""

    path: str
    """The layer that takes or makes it."""
    blamed: tuple[str, ...]
    """What rounds it."""
    dtype: str
    is_input: bool
    """Whether its layer takes it."""
    hidden: float
    """Rounding error of the worst feature (last axis), relative to its spread over the batch."""
    feature: int
    largest: float
    """The worst feature's largest magnitude."""
    spread: float
    """Its standard deviation over the batch."""
    changed_ids: float
    """Share of the whole numbers in it that change, if they are used as integers; otherwise 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LateCast:
    """Probabilities that are computed in 16 bits and cast afterwards."""

    path: str
    """The layer that computes them."""
    kind: str
    dtype: str
    before: tuple[str, ...]
    """If it is computed between layers, those that made its input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTable:
    """A model under a policy compared with float32, layer by layer; the verdict rests on this alone."""

    calls: tuple[LayerPrecision, ...]
    """A row per call of a layer, in the order in which the calls end, without gradients of weights."""
    layers: tuple[LayerPrecision, ...]
    """A row per layer, with all its calls as one."""
    policies: Mapping[str, keras.DTypePolicy]
    """The policy of every layer by path, including layers without a row."""
    computing: Collection[keras.DTypePolicy]
    """The policies of the layers that compute."""
    heads: tuple[str, ...]
    """Layers that make the model's outputs in 16 bits; the model's own path if an operation does."""
    always_16_bits: tuple[str, ...] = ()
    """Layers that take or return what operations between layers compute in 16 bits whatever the policy."""
    late_casts: tuple[LateCast, ...] = ()
    """Probabilities in 16 bits that become a model output in another dtype."""
    tensors: tuple[TensorPrecision, ...] = ()
    """What goes in and out of the calls, each tensor once."""
    states: tuple[StatePrecision, ...] = ()
    gradients: tuple[WeightGradient, ...] = ()
    scaled: tuple[LayerPrecision, ...] = ()
    """The gradients of calls and weights in float32 with the loss scaled, compared with float32 without."""
    half_weights: tuple[str, ...] = ()
    """Trainable variables of 16 bits among those of float32."""
    normalises: bool = False
    """Whether the optimizers divide a gradient by its own size, so that its length hardly matters."""
    grids: tuple[Grid, ...] = ()
    constants: Mapping[str, Collection[float]] = field(default_factory=dict)
    """The extreme constants each layer computes with, by path."""
    reference_loss: float
    """Mean loss in float32."""
    candidate_loss: float
    """Mean loss under the policy."""
    loss_scale: float = 1.0
    """Factor of the loss in the backward pass."""
    unscaled: tuple[str, ...] = ()
    """Names of the optimizers that would divide by a loss scale which no loss was multiplied by."""
    at_first: AtFirst | None = None
    """None for `check`, which sees one moment only."""
    float8: tuple[Float8Margin, ...] = ()
    """How what is rounded to float8 fits into it."""


def as_json(value: Any) -> Any:
    """Nested values as JSON can hold them: lists for tuples, null for numbers that are not finite."""
    if isinstance(value, dict):
        return {name: as_json(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
