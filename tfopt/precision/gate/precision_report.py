"""The report of the precision gate: as text, as JSON and as a chart."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tfopt.precision.float8_margins import Float8Margin
from tfopt.precision.gate.gate_chart import chart_of
from tfopt.precision.gate.layer_table import LayerPrecision, as_json
from tfopt.precision.gate.verdict import relative
from tfopt.text import Shown, aligned, listed, percent, wrapped

_HEAD = ("layer", "class", "policy", "error", "own error", "gradients", "overflow", "lost gradient")
_FLOAT8_HEAD = ("layer", "rounded to float8", "format", "scale", "largest", "margin", "saturated", "vanished")
_ROWS = 12


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PrecisionReport(Shown):
    """Whether a model may train under a dtype policy, as `check` found it. Its `str` is a table."""

    policy: str
    """The policy that was checked."""
    problems: tuple[str, ...]
    """Why it does not pass, one sentence each, gravest first; empty if it passes."""
    notes: tuple[str, ...]
    """Caveats about the figures."""
    layers: tuple[LayerPrecision, ...]
    """In the order in which they compute."""
    first_overflow: str | None
    """Path of the first layer whose output is not finite where float32's is."""
    fallback: Mapping[str, str] | None
    """A policy per layer path that passes `check`, for `apply`, with as few layers in float32 as a few rounds found.

    Where train_step forgets to scale the loss, bfloat16 in place of float16, which needs no scale. Empty if `policy`
    itself passes, None if no such mapping was found.
    """
    reference_loss: float
    """Mean loss over the batches in float32."""
    candidate_loss: float
    """Mean loss under the policy."""
    loss_scale: float
    """Factor of the loss in the backward pass; 1 if nothing computes in float16."""
    batches: int
    """How many batches were compared."""
    float8: tuple[Float8Margin, ...] = ()
    """How the inputs, kernel and output gradient of each float8 layer fit into it."""

    @property
    def passed(self) -> bool:
        """Whether the model may train under the policy."""
        return not self.problems

    @property
    def loss_drift(self) -> float:
        """Distance of the loss from float32's, relative to it; infinite if the loss is not finite."""
        return relative(self.candidate_loss, self.reference_loss)

    @property
    def verdict(self) -> str:
        """Whether it passes, in one line."""
        if not self.passed:
            return f"{self.policy} does not pass: {len(self.problems)} problem{'s' * (len(self.problems) > 1)}."
        return f"{self.policy} passes: the loss differs by {percent(self.loss_drift)} from float32's."

    def to_dict(self) -> dict[str, Any]:
        """JSON, with null for numbers that are not finite."""
        verdict = {"passed": self.passed, "verdict": self.verdict, "loss_drift": self.loss_drift}
        return as_json(
            asdict(self)
            | verdict
            | {name: [one.to_dict() for one in getattr(self, name)] for name in ("layers", "float8")}
        )

    def chart(self) -> str:
        """Returns an HTML figure with a bar per layer, for `tfopt.page.Section(charts=...)`."""
        return chart_of(self.to_dict())

    def __str__(self) -> str:
        lines = [self.verdict, *(f"- {problem}" for problem in self.problems)]
        if not self.passed:
            found = [f"{path}: {policy}" for path, policy in (self.fallback or {}).items()]
            instead = listed(found, _ROWS) + " (all in `fallback`)" * (len(found) > _ROWS)
            lines.append(f"Passes instead: {instead or 'only float32, of everything tried.'}")
        lines += [f"Note: {note}" for note in self.notes]
        lines = [wrapped("\n".join(lines))]
        ranked = sorted(self.layers, key=lambda layer: layer.severity, reverse=True)
        lines += aligned([_HEAD, *map(_row, ranked[:_ROWS])], texts=3)
        if len(ranked) > _ROWS:
            lines.append(f"  ({len(ranked) - _ROWS} layers closer to float32 not shown)")
        if self.float8:
            tightest = sorted(self.float8, key=lambda one: (-max(one.clipped or 0, one.vanished or 0), one.margin or 1))
            lines += aligned([_FLOAT8_HEAD, *map(_float8_row, tightest[:_ROWS])], texts=3)
            if len(tightest) > _ROWS:
                lines.append(f"  ({len(tightest) - _ROWS} tensors that fit better into float8 not shown)")
        return "\n".join(lines)


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


def _float8_row(one: Float8Margin) -> tuple[str, ...]:
    return (
        one.path,
        one.tensor,
        one.format,
        f"{one.scale:.3g}",
        f"{one.largest:.3g}",
        "" if one.margin is None else f"{one.margin:.3g}×",
        "" if one.saturated is None else percent(one.saturated),
        "" if one.vanished is None else percent(one.vanished),
    )
