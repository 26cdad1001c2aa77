"""Horizontal bars with their values printed beside them, as an HTML figure or an SVG file.

In HTML a row is text and a bar in SVG: text inside an SVG neither wraps nor keeps its size when a phone narrows the
chart.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from tfopt.errors import unknown_name
from tfopt.page.document import escape

Tone = Literal["baseline", "better", "worse", "unclear", "plain"]

# A shape for each tone, for readers who cannot tell the colours apart.
_MARKS: dict[Tone, str] = {
    "baseline": "M1.5 1.5h7v7h-7z",
    "better": "M5 1 9.5 9h-9z",
    "worse": "M5 9 .5 1h9z",
    "plain": "M5 .5 9.5 5 5 9.5.5 5z",
    "unclear": "M5 1.5a3.5 3.5 0 1 1 0 7a3.5 3.5 0 1 1 0-7z",
}

# The SVG file's layout, in its own units.
_WIDTH, _ROW_HEIGHT, _TOP = 760, 26, 56
_LANE_LEFT, _LANE_WIDTH = 190, 400
_STYLE = """\
text { font: 13px system-ui, sans-serif; fill: #1c242c } .title { font-weight: 600; font-size: 15px }
.muted { fill: #56616c } .line { stroke: #56616c } .whisker { stroke: #1c242c; fill: none }
.baseline, .plain { fill: #52647a } .better { fill: #12857b } .worse { fill: #c2500f } .unclear { fill: #a9b1ba }
@media (prefers-color-scheme: dark) {
text { fill: #e4e8ea } .muted { fill: #a0abb5 } .line { stroke: #a0abb5 } .whisker { stroke: #e4e8ea }
.baseline, .plain { fill: #8296b0 } .better { fill: #3aa597 } .worse { fill: #e0793b } .unclear { fill: #6d7580 }
}"""


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar of a chart.

    Raises:
        ValueError: If a number is not finite, the interval lacks an end or is reversed, or the tone is unknown.
    """

    label: str
    """What was measured."""
    value: float
    """Length of the bar."""
    text: str
    """The value printed beside the bar, with its unit."""
    low: float | None = None
    """Lower end of the interval, drawn as a whisker. Pass both ends or neither."""
    high: float | None = None
    """Upper end of the interval."""
    tone: Tone = "unclear"
    """How to judge the value; sets the bar's colour and the mark beside the value."""
    meaning: str = ""
    """What the tone means here, for the chart's key. Default: the tone's name."""
    start: float = 0.0
    """Where the bar begins, and its interval is counted from: in a waterfall, where the bar above ends."""

    def __post_init__(self) -> None:
        for name in ("value", "low", "high", "start"):
            _require_finite(f"{name} of bar {self.label!r}", getattr(self, name))
        if (self.low is None) != (self.high is None):
            raise ValueError(
                f"Expected both ends of the interval of bar {self.label!r}, or neither. "
                f"Received: low={self.low}, high={self.high}."
            )
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(
                f"Expected low <= high for bar {self.label!r}. Received: low={self.low}, high={self.high}."
            )
        if self.tone not in _MARKS:
            raise unknown_name("tone", self.tone, get_args(Tone))

    @property
    def numbers(self) -> list[float]:
        """Where the bar begins and ends, and the ends of its interval."""
        found = [self.start + number for number in (self.value, self.low, self.high) if number is not None]
        return [self.start, *found]


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps values to percent of a chart's width. Zero is always on it, so that the longer bar is the greater one."""

    low: float
    """The left edge, at most 0."""
    high: float
    """The right edge, at least 0 and above `low`."""

    def percent(self, value: float) -> float:
        """Returns the distance of `value` from the left edge, from 0 to 100."""
        # Scaled, so that the difference of two huge values stays finite.
        largest = max(abs(self.low), abs(self.high))
        low, high, at = self.low / largest, self.high / largest, value / largest
        return min(100.0, max(0.0, 100 * (at - low) / (high - low)))


def fit_scale(values: Iterable[float], reference: float | None) -> Scale:
    """Returns the scale that holds zero, all of `values` and the reference."""
    held = [0.0, *values, *([] if reference is None else [reference])]
    low, high = min(held), max(held)
    return Scale(low, high if high > low else low + 1.0)


def bar_chart(
    bars: Sequence[Bar],
    *,
    title: str,
    description: str,
    reference: float | None = None,
    reference_label: str = "",
) -> str:
    """Returns horizontal bars as an HTML figure with inline SVG, for `Section(charts=...)`.

    Colours, sizes and fonts come from the page's style sheet. There are no axis ticks; all numbers come from the
    caller. Bars start at zero, or at their `start`.

    Args:
        bars: From top to bottom.
        title: What is compared, printed above the bars.
        description: How to read the chart, printed below the title.
        reference: Value of a thin line across all bars, such as 1.0 for ratios to a baseline.
        reference_label: What the line means, printed in the key. Default: "reference".

    Raises:
        ValueError: If there is no bar, the reference is not finite, or a label comes without a reference.
    """
    if not bars:
        raise ValueError(f"Expected at least one bar for the chart {title!r}. Received: none.")
    _require_finite(f"reference of the chart {title!r}", reference)
    if reference is None and reference_label:
        raise ValueError(f"Expected a reference for reference_label={reference_label!r}. Received: reference=None.")
    scale = fit_scale([number for bar in bars for number in bar.numbers], reference)
    rows = "\n".join(_html_row(bar, scale, reference) for bar in bars)
    return (
        f'<figure class="chart">\n<figcaption><strong>{escape(title)}</strong> '
        f"<span>{escape(description)}</span></figcaption>\n"
        f'<ul class="bars" role="list">\n{rows}\n</ul>\n'
        f"{_key(bars, reference, reference_label)}\n</figure>"
    )


def picture(bars: Sequence[Bar], *, title: str, description: str, reference: float | None = None) -> str:
    """Returns bars as an SVG document for a README, with its own colours for light and dark schemes.

    The arguments are those of `bar_chart`. Text is neither wrapped nor cut: labels of about 25 letters and values of
    about 22 fit.

    Raises:
        ValueError: If there is no bar.
    """
    if not bars:
        raise ValueError(f"Expected at least one bar for the picture {title!r}. Received: none.")
    scale = fit_scale([number for bar in bars for number in bar.numbers], reference)
    height = _TOP + _ROW_HEIGHT * len(bars) + 8
    rows = [_svg_row(bar, scale, _TOP + _ROW_HEIGHT * number) for number, bar in enumerate(bars)]
    if reference is not None:
        at = _x(scale, reference)
        rows.append(f'<line class="line" x1="{at}" x2="{at}" y1="{_TOP - 4}" y2="{height - 8}"/>')
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>\n{_STYLE}\n</style>",
            f'<text class="title" x="8" y="20">{escape(title)}</text>',
            f'<text class="muted" x="8" y="40">{escape(description)}</text>',
            *rows,
            "</svg>\n",
        ]
    )


def _require_finite(what: str, number: float | None) -> None:
    if number is not None and not math.isfinite(number):
        raise ValueError(f"Expected a finite number as {what}. Received: {number}. Leave out what was not measured.")


def _html_row(bar: Bar, scale: Scale, reference: float | None) -> str:
    label, text = escape(bar.label), escape(bar.text)
    return (
        f'<li class="{bar.tone}"><span class="name" title="{label}">{label}</span>'
        f'<span class="value">{_mark(bar.tone)}{text}</span>'
        f'<div class="lane"><svg role="img" width="100%" height="100%">'
        f"<title>{label}: {_meaning(bar)}</title><desc>{text}</desc>"
        f"{_lines(scale, reference)}"
        f'<svg y="50%" overflow="visible">{_rounded_bar(bar, scale)}{_whisker(bar, scale)}</svg>'
        f"</svg></div></li>"
    )


def _lines(scale: Scale, reference: float | None) -> str:
    """The line that bars start at, and the reference, over the height of a row."""
    positions = {"origin": scale.percent(0.0)}
    if reference is not None:
        positions["reference"] = scale.percent(reference)
    return "".join(
        f'<line class="{name}" x1="{at:.2f}%" x2="{at:.2f}%" y1="0" y2="100%"/>' for name, at in positions.items()
    )


def _rounded_bar(bar: Bar, scale: Scale) -> str:
    left, right = sorted((scale.percent(bar.start), scale.percent(bar.start + bar.value)))
    return f'<rect class="bar" x="{left:.2f}%" width="{right - left:.2f}%" y="-5" height="10" rx="5"/>'


def _whisker(bar: Bar, scale: Scale) -> str:
    if bar.low is None or bar.high is None:
        return ""
    low, high = (f"{scale.percent(bar.start + end):.2f}%" for end in (bar.low, bar.high))
    return (
        f'<g class="whisker"><line x1="{low}" x2="{high}"/>'
        f'<line x1="{low}" x2="{low}" y1="-7" y2="7"/><line x1="{high}" x2="{high}" y1="-7" y2="7"/></g>'
    )


def _mark(tone: Tone) -> str:
    return f'<svg class="mark {tone}" viewBox="0 0 10 10" aria-hidden="true"><path d="{_MARKS[tone]}"/></svg>'


def _meaning(bar: Bar) -> str:
    return escape(bar.meaning or bar.tone)


def _key(bars: Sequence[Bar], reference: float | None, reference_label: str) -> str:
    """The meaning of this chart's marks and lines."""
    order = list(_MARKS)
    used = dict.fromkeys((bar.tone, _meaning(bar)) for bar in sorted(bars, key=lambda bar: order.index(bar.tone)))
    items = [f"{_mark(tone)}{meaning}" for tone, meaning in used]
    if any(bar.low is not None for bar in bars):
        items.append(f"{_sample('whisker', 'M1 5h14M1 1v8M15 1v8')}interval")
    if reference is not None:
        items.append(f"{_sample('reference', 'M8 0v10')}{escape(reference_label) or 'reference'}")
    return '<p class="key">' + " ".join(f"<span>{item}</span>" for item in items) + "</p>"


def _sample(name: str, path: str) -> str:
    return f'<svg class="sample {name}" viewBox="0 0 16 10" aria-hidden="true"><path d="{path}"/></svg>'


def _svg_row(bar: Bar, scale: Scale, top: float) -> str:
    middle = top + _ROW_HEIGHT / 2
    left, right = sorted((_x(scale, bar.start), _x(scale, bar.start + bar.value)))
    whisker = ""
    if bar.low is not None and bar.high is not None:
        low, high = (_x(scale, bar.start + end) for end in (bar.low, bar.high))
        ends = "".join(f"M{x} {middle - 5:g}v10" for x in (low, high))
        whisker = f'<path class="whisker" d="M{low} {middle:g}H{high}{ends}"/>'
    bar_height = _ROW_HEIGHT - 12
    return (
        f'<text x="8" y="{middle + 4:g}">{escape(bar.label)}</text>'
        f'<rect class="{bar.tone}" x="{left}" y="{top + 6:g}" width="{right - left:.1f}" height="{bar_height}" rx="3"/>'
        f'{whisker}<text x="{_LANE_LEFT + _LANE_WIDTH + 12}" y="{middle + 4:g}">{escape(bar.text)}</text>'
    )


def _x(scale: Scale, value: float) -> float:
    return round(_LANE_LEFT + _LANE_WIDTH * scale.percent(value) / 100, 1)
