"""The page of a model's cost: a roofline chart of its layers, and their table."""

import math
from collections import Counter

from tfopt.compress.model_cost import HEADS, LayerCost, ModelCost, cells, remarks
from tfopt.page import Page, Section, Table, render
from tfopt.page.document import escape
from tfopt.page.ticks import logarithmic_ticks
from tfopt.text import figure, percent

_WIDTH, _HEIGHT = 960, 460
_LEFT, _TOP, _BOTTOM = 70, 24, 44  # of the drawing, around the chart
_NAMED = 6  # layers
_LARGEST = 26  # radius of a layer that takes the whole step
_SOURCE = (
    "The roofline of S. Williams, A. Waterman and D. Patterson, “Roofline: An Insightful Visual Performance Model for "
    "Multicore Architectures” (2009): no layer can be faster than the lower of both ceilings."
)


def page(cost: ModelCost) -> str:
    """Returns the page as HTML."""
    rows = [cells(cost, layer) for layer in cost.costliest]
    table = Table(HEADS, rows, align="ll" + "r" * (len(HEADS) - 2))
    text = "\n\n".join(remarks(cost))
    rest = percent(cost.rest_ms / cost.step_ms)
    figures = [
        ("A training step", figure(cost.step_ms), "ms"),
        ("In no timed layer", rest.removesuffix(" %"), "%"),
        ("Matrix products", figure(cost.flops / 1e9), "GFLOP"),
        ("Parameters", f"{cost.parameters:,}", ""),
    ]
    charts = [chart] if (chart := _chart(cost)) else []
    section = Section("Layers", text, charts=charts, tables=[table])
    return render(Page(f"What {cost.model} costs", cost.verdict, [section], figures=figures, footer=_SOURCE))


def _chart(cost: ModelCost) -> str:
    """Returns the figure; "" if no layer that multiplies was timed."""
    layers = [layer for layer in cost.costliest if layer.flops and layer.ms]
    if not layers:
        return ""
    ceilings = {dtype: rate * 1000 for dtype, rate in cost.matmul_tflops.items()}  # GFLOP/s
    per_intensity = cost.copy_gib_per_second * 2**30 / 1e9
    speeds = [_speed(layer) for layer in layers]
    axes = _Axes(
        [layer.intensity for layer in layers] + [ceiling / per_intensity for ceiling in ceilings.values()],
        [*speeds, *ceilings.values()],
    )
    roofs = "".join(_roof(axes, dtype, ceiling, per_intensity) for dtype, ceiling in ceilings.items())
    points = "".join(_point(axes, cost, layer) for layer in layers)
    alike = Counter((layer.intensity, _speed(layer)) for layer in layers)
    first = {(layer.intensity, _speed(layer)): layer for layer in reversed(layers)}
    named = sorted(first, key=lambda at: layers.index(first[at]))[:_NAMED]
    # By turns above and below their circles, since names of near ones would cover each other.
    names = "".join(_name(axes, first[at], alike[at] - 1, 18 if turn % 2 else -8) for turn, at in enumerate(named))
    left_out = len(cost.layers) - len(layers)
    description = (
        "Up: GFLOP/s that a layer reaches, forward and backward. Right: FLOPs per byte that it must move. The larger a "
        "circle, the more of the step it takes; the further below the line, the further from what the device can do."
    )
    if left_out:
        description += f" {left_out:,} layers without matrix products are in the table alone."
    return (
        f'<figure class="chart"><figcaption><strong>Layers below the roofline of {escape(cost.device)}</strong> '
        f"<span>{escape(description)}</span></figcaption>\n"
        f'<svg role="img" viewBox="0 0 {_WIDTH} {_HEIGHT}" style="width: 100%; font-size: 13px">'
        f"<title>Roofline</title><desc>{escape(cost.verdict)}</desc>{axes.grid()}{roofs}{points}{names}</svg></figure>"
    )


def _speed(layer: LayerCost) -> float:
    """Returns the GFLOP/s of a layer that was timed."""
    return layer.flops / (layer.ms or 1) / 1e6


class _Axes:
    """Places on two logarithmic axes."""

    def __init__(self, across: list[float], up: list[float]):
        self._across, self._up = (
            (math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)) + 1e-9)) for values in (across, up)
        )

    def x(self, value: float) -> float:
        low, high = self._across
        return _LEFT + (_WIDTH - _LEFT - 20) * (math.log10(value) - low) / max(1, high - low)

    def y(self, value: float) -> float:
        low, high = self._up
        return _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * (math.log10(value) - low) / max(1, high - low)

    @property
    def ends(self) -> tuple[float, float]:
        """The least and the most FLOPs per byte."""
        return 10.0 ** self._across[0], 10.0 ** self._across[1]

    @property
    def floor(self) -> float:
        """The least GFLOP/s."""
        return 10.0 ** self._up[0]

    def grid(self) -> str:
        """Returns the lines and numbers of both axes."""
        floor, edge = _HEIGHT - _BOTTOM, _WIDTH - 20
        rows = "".join(
            f'<line class="grid" x1="{_LEFT}" x2="{edge}" y1="{self.y(value):.1f}" y2="{self.y(value):.1f}" '
            f'stroke="var(--rule)"/><text x="{_LEFT - 8}" y="{self.y(value):.1f}" dy="0.35em" text-anchor="end" '
            f'fill="var(--muted)">{text}</text>'
            for value, text in logarithmic_ticks(*self._up)
        )
        columns = "".join(
            f'<text x="{self.x(value):.1f}" y="{floor + 20}" text-anchor="middle" fill="var(--muted)">{text}</text>'
            for value, text in logarithmic_ticks(*self._across)
        )
        return (
            f'{rows}{columns}<text x="{edge}" y="{floor + 38}" text-anchor="end" fill="var(--muted)">FLOP/byte</text>'
        )


def _roof(axes: _Axes, dtype: str, ceiling: float, per_intensity: float) -> str:
    low, high = axes.ends
    start = max(low, axes.floor / per_intensity)  # where the slope enters the chart
    corner = ceiling / per_intensity
    return (
        f'<path d="M{axes.x(start):.1f} {axes.y(start * per_intensity):.1f}'
        f"L{axes.x(corner):.1f} {axes.y(ceiling):.1f}"
        f'L{axes.x(high):.1f} {axes.y(ceiling):.1f}" fill="none" stroke="var(--muted)" stroke-width="1.5"/>'
        f'<text x="{axes.x(high):.1f}" y="{axes.y(ceiling) - 6:.1f}" text-anchor="end" fill="var(--muted)">'
        f"{escape(dtype)}, {figure(ceiling)} GFLOP/s</text>"
    )


def _point(axes: _Axes, cost: ModelCost, layer: LayerCost) -> str:
    says = f"{layer.path}: {figure(layer.ms or 0)} ms, {percent(cost.share(layer))} of the step"
    says += f", {layer.bound_by}" if layer.bound_by else ""
    radius = max(3.0, _LARGEST * math.sqrt(cost.share(layer)))
    color = "--line0" if layer.bound_by == "products" else "--line1" if layer.bound_by == "memory" else "--unclear"
    return (
        f'<circle cx="{axes.x(layer.intensity):.1f}" cy="{axes.y(_speed(layer)):.1f}" r="{radius:.1f}" '
        f'fill="var({color})" fill-opacity="0.45" stroke="var({color})"><title>{escape(says)}</title></circle>'
    )


def _name(axes: _Axes, layer: LayerCost, alike: int, down: int) -> str:
    more = f" and {alike} alike" if alike else ""
    x, y = axes.x(layer.intensity) + 10, axes.y(_speed(layer)) + down
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="var(--ink)">{escape(layer.path + more)}</text>'
