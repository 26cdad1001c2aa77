"""What the precision gate found: as a table, as JSON and as a chart."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tfopt.page import Bar, bar_chart
from tfopt.precision.deviation import Deviation
from tfopt.text import aligned

_HEAD = ("layer", "class", "policy", "error", "own error", "gradients", "overflow", "lost gradient")
_ROWS = 12
_BARS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPrecision:
    """How far one layer is from float32, in the worst batch.

    Attributes:
        path: The layer, by names from the model down.
        kind: Its class.
        policy: The dtype policy it was checked under.
        output: What it puts out.
        input: What it takes in, after the cast to its own dtype: what it inherits.
        weight_gradient: The gradients of its weights and of those inside it that are in no other row, as one vector.
        output_gradient: The gradient that comes to it.
        input_gradient: The gradient that it hands on.
        blamed: Whether it is at the root of a problem.

    Each is None where there is nothing to compare: whole numbers, frozen weights, what does not reach the loss.
    """

    path: str
    kind: str
    policy: str
    output: Deviation | None = None
    input: Deviation | None = None
    weight_gradient: Deviation | None = None
    output_gradient: Deviation | None = None
    input_gradient: Deviation | None = None
    blamed: bool = False

    @property
    def own_error(self) -> float:
        """The error of its output beyond the one that it inherits, as for independent errors: √(output² - input²)."""
        output, inherited = (part.error if part else 0.0 for part in (self.output, self.input))
        return math.sqrt(max(0.0, output**2 - inherited**2)) if math.isfinite(output) else math.inf

    @property
    def severity(self) -> tuple[float, ...]:
        """What tables are sorted by: blamed first, then overflow, lost gradient and error."""
        gradient = self.weight_gradient
        overflow = max((part.overflow for part in (self.output, gradient) if part), default=0.0)
        # Traces of underflow are everywhere: below a percent they rank no layer.
        lost = round(gradient.lost, 2) if gradient else 0.0
        return self.blamed, overflow, lost, self.output.error if self.output else 0.0

    def to_dict(self) -> dict[str, Any]:
        """JSON."""
        plain = {name: getattr(self, name) for name in ("path", "kind", "policy", "blamed")}
        parts = ("output", "input", "weight_gradient", "output_gradient", "input_gradient")
        compared = {name: part.to_dict() if (part := getattr(self, name)) else None for name in parts}
        return plain | {"own_error": _finite(self.own_error)} | compared


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionReport:
    """What `check` found.

    Attributes:
        policy: The policy that was checked, in words.
        problems: Why it does not pass, a sentence each, the gravest first; none if it passes.
        notes: What to know about the figures.
        layers: In the order in which they compute.
        first_overflow: The first layer whose output is not finite where float32's is.
        fallback: A policy for each layer, by path, that passes `check` and goes to `apply`, with as few layers back in
            float32 as a few rounds could find. Empty where `policy` itself passes, None where no such map was found.
        reference_loss: The mean loss over the batches in float32.
        candidate_loss: The same under the policy.
        loss_scale: What the loss was multiplied by in the backward pass; 1 where nothing computes in float16.
        batches: How many batches were compared.
    """

    policy: str
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    layers: tuple[LayerPrecision, ...]
    first_overflow: str | None
    fallback: Mapping[str, str] | None
    reference_loss: float
    candidate_loss: float
    loss_scale: float
    batches: int

    @property
    def passed(self) -> bool:
        """Whether the model may be trained under the policy."""
        return not self.problems

    @property
    def loss_drift(self) -> float:
        """How far the loss is from float32's, relative to it; infinite where it is not finite."""
        return relative(self.candidate_loss, self.reference_loss)

    @property
    def verdict(self) -> str:
        """Whether it passes, in a line."""
        if not self.passed:
            return f"{self.policy} does not pass: {len(self.problems)} problem{'s' * (len(self.problems) > 1)}."
        return f"{self.policy} passes: the loss differs by {percent(self.loss_drift)} from float32's."

    def to_dict(self) -> dict[str, Any]:
        """JSON: finite numbers or null."""
        names = ("policy", "passed", "verdict", "first_overflow", "loss_scale", "batches")
        numbers = {name: _finite(getattr(self, name)) for name in ("reference_loss", "candidate_loss", "loss_drift")}
        return (
            {name: getattr(self, name) for name in names}
            | numbers
            | {
                "problems": list(self.problems),
                "notes": list(self.notes),
                "fallback": None if self.fallback is None else dict(self.fallback),
                "layers": [layer.to_dict() for layer in self.layers],
            }
        )

    def chart(self) -> str:
        """Returns a bar a layer as an HTML figure, for `tfopt.page.Section(charts=...)`."""
        return chart_of(self.to_dict())

    def __str__(self) -> str:
        lines = [self.verdict, *(f"- {problem}" for problem in self.problems)]
        if not self.passed:
            lines.append(f"Passes instead: {_mapping(self.fallback)}")
        lines += [f"Note: {note}" for note in self.notes]
        ranked = sorted(self.layers, key=lambda layer: layer.severity, reverse=True)
        lines += aligned([_HEAD, *map(_row, ranked[:_ROWS])], texts=3)
        if len(ranked) > _ROWS:
            lines.append(f"  (layers closer to float32, not shown: {len(ranked) - _ROWS})")
        return "\n".join(lines)


def chart_of(report: Mapping[str, Any]) -> str:
    """Returns the chart of a report that was kept as JSON values, as `PrecisionReport.chart` does.

    Args:
        report: What `PrecisionReport.to_dict` gave.
    """
    layers = [layer for layer in report["layers"] if layer["output"]]
    ranked = sorted(layers, key=lambda layer: (layer["blamed"], _length(layer)), reverse=True)[:_BARS]
    bars = [
        Bar(layer["path"], _length(layer), _text(layer), tone="worse" if layer["blamed"] else "baseline")
        for layer in ranked
    ]
    left_out = f" The {len(ranked)} furthest of {len(layers)} layers." if len(ranked) < len(layers) else ""
    return bar_chart(
        bars,
        title=f"Distance of each layer's output from float32 under {report['policy']}",
        description=f"Norm of the difference over the norm, or the share that overflows. {report['verdict']}{left_out}",
    )


def relative(value: float, reference: float) -> float:
    """The distance of a value from a reference, relative to that; infinite where it is not finite."""
    difference = abs(value - reference)
    if not math.isfinite(difference):
        return math.inf
    return difference / abs(reference) if reference else (math.inf if difference else 0.0)


def percent(share: float) -> str:
    """A share, 0 to 1, as text."""
    if not math.isfinite(share):
        return "∞"
    return "<0.01 %" if 0 < share < 0.0001 else f"{100 * share:.3g} %"


def _length(layer: Mapping[str, Any]) -> float:
    error = layer["output"]["error"]
    return float(max(1.0 if error is None else error, layer["output"]["overflow"]))


def _text(layer: Mapping[str, Any]) -> str:
    overflow = layer["output"]["overflow"]
    return f"{percent(overflow)} overflow" if overflow else percent(_length(layer))


def _row(layer: LayerPrecision) -> tuple[str, ...]:
    output, gradient = layer.output, layer.weight_gradient
    return (
        layer.path + (" !" if layer.blamed else ""),
        layer.kind,
        layer.policy,
        percent(output.error) if output and output.overflow < 1 else "",
        percent(layer.own_error) if output and output.overflow < 1 else "",
        percent(gradient.error) if gradient and gradient.overflow < 1 else "",
        percent(output.overflow) if output else "",
        percent(gradient.lost) if gradient else "",
    )


def _mapping(fallback: Mapping[str, str] | None) -> str:
    if fallback is None:
        return "nothing that was tried, other than float32."
    return ", ".join(f"{path}: {policy}" for path, policy in fallback.items())


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
