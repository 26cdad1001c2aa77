"""How far each layer is from float32, in one row per layer."""

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
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
    """What the first comparison of a training found: the loss and the gradient of a trained model are small.

    Then rounding is large beside them, and harmless.
    """

    loss: float
    """Magnitude of the loss in float32."""
    gradient: float
    """Norm of all weight gradients in float32."""


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
    softmaxes: tuple[str, ...]
    """Softmaxes in 16 bits whose result becomes a model output in another dtype."""
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


def percent(share: float) -> str:
    """Formats a share, 0 to 1."""
    if not math.isfinite(share):
        return "∞"
    return "<0.01 %" if 0 < share < 0.0001 else f"{100 * share:.3g} %"
