"""Horizontal bars with their values printed beside them.

A row is text in HTML and a bar in SVG. Text inside an SVG neither wraps nor keeps its size when a phone narrows the
chart; beside it, it does both.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from tfopt.errors import unknown_name
from tfopt.page.scale import Scale, fit_scale
from tfopt.page.text import escape

Tone = Literal["baseline", "better", "worse", "unclear"]

# A shape for each tone, so that nobody has to tell them apart by colour.
_MARKS: dict[Tone, str] = {
    "baseline": "M1.5 1.5h7v7h-7z",
    "better": "M5 1 9.5 9h-9z",
    "worse": "M5 9 .5 1h9z",
    "unclear": "M5 1.5a3.5 3.5 0 1 1 0 7a3.5 3.5 0 1 1 0-7z",
}
_LOGARITHMIC_NOTE = "Logarithmic scale: bars start at the reference, and equal distances are equal ratios."


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar of a chart.

    Args:
        label: What was measured.
        value: How long the bar is.
        text: The value as it is printed beside the bar, with its unit.
        low: Lower end of the interval, drawn as a whisker. Given with `high`, or not at all.
        high: Upper end of the interval.
        tone: How to take the value. It sets the bar's colour and the mark beside the value.

    Raises:
        ValueError: A number is not finite, the interval has one end or its ends are swapped, or the tone is unknown.
    """

    label: str
    value: float
    text: str
    low: float | None = None
    high: float | None = None
    tone: Tone = "unclear"

    def __post_init__(self) -> None:
        for name in ("value", "low", "high"):
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
        """The value and the ends of its interval."""
        return [number for number in (self.value, self.low, self.high) if number is not None]


def bar_chart(
    bars: Sequence[Bar],
    *,
    title: str,
    description: str,
    reference: float | None = None,
    reference_label: str = "",
) -> str:
    """Returns horizontal bars as an HTML figure with inline SVG, for `Section(charts=...)`.

    Colours, sizes and fonts come from the page's style sheet. Every number shown is in a text that the caller passed:
    there are no axis ticks. Bars start at zero. Where values spread over more than a factor of 20 around a reference,
    the scale is logarithmic, bars start at the reference, and the chart says so.

    Args:
        bars: From top to bottom.
        title: What is compared, printed above the bars.
        description: How to read the chart, printed below the title.
        reference: Where a thin line crosses all bars, such as 1.0 for ratios to a baseline.
        reference_label: What the line stands for, printed in the key. Defaults to "reference".

    Raises:
        ValueError: There is no bar, the reference is not finite, or there is a label for a reference but no reference.
    """
    if not bars:
        raise ValueError(f"Expected at least one bar for the chart {title!r}. Received: none.")
    _require_finite(f"reference of the chart {title!r}", reference)
    if reference is None and reference_label:
        raise ValueError(f"Expected a reference for reference_label={reference_label!r}. Received: reference=None.")
    scale = fit_scale([number for bar in bars for number in bar.numbers], reference)
    rows = "\n".join(_row(bar, scale, reference) for bar in bars)
    note = f'<p class="note">{_LOGARITHMIC_NOTE}</p>\n' if scale.logarithmic else ""
    return (
        f'<figure class="chart">\n<figcaption><strong>{escape(title)}</strong> '
        f"<span>{escape(description)}</span></figcaption>\n"
        f'<ul class="bars" role="list">\n{rows}\n</ul>\n'
        f"{_key(bars, reference, reference_label)}\n{note}</figure>"
    )


def _require_finite(what: str, number: float | None) -> None:
    if number is not None and not math.isfinite(number):
        raise ValueError(f"Expected a finite number as {what}. Received: {number}. Leave out what was not measured.")


def _row(bar: Bar, scale: Scale, reference: float | None) -> str:
    label, text = escape(bar.label), escape(bar.text)
    return (
        f'<li class="{bar.tone}"><span class="name" title="{label}">{label}</span>'
        f'<span class="value">{_mark(bar.tone)}{text}</span>'
        f'<div class="lane"><svg role="img" width="100%" height="100%">'
        f"<title>{label}: {bar.tone}</title><desc>{text}</desc>"
        f"{_lines(scale, reference)}"
        f'<svg y="50%" overflow="visible">{_rounded_bar(bar, scale)}{_whisker(bar, scale)}</svg>'
        f"</svg></div></li>"
    )


def _lines(scale: Scale, reference: float | None) -> str:
    """The line that bars start at, and the reference, over the height of a row."""
    positions = {} if scale.logarithmic else {"origin": scale.percent(scale.origin)}
    if reference is not None:
        positions["reference"] = scale.percent(reference)
    return "".join(
        f'<line class="{name}" x1="{at:.2f}%" x2="{at:.2f}%" y1="0" y2="100%"/>' for name, at in positions.items()
    )


def _rounded_bar(bar: Bar, scale: Scale) -> str:
    left, right = sorted((scale.percent(scale.origin), scale.percent(bar.value)))
    if scale.logarithmic and right - left < 1:
        # A value at the reference has no length there: a dot says that it was measured.
        return f'<circle class="bar" cx="{scale.percent(bar.value):.2f}%" r="5"/>'
    return f'<rect class="bar" x="{left:.2f}%" width="{right - left:.2f}%" y="-5" height="10" rx="5"/>'


def _whisker(bar: Bar, scale: Scale) -> str:
    if bar.low is None or bar.high is None:
        return ""
    low, high = f"{scale.percent(bar.low):.2f}%", f"{scale.percent(bar.high):.2f}%"
    return (
        f'<g class="whisker"><line x1="{low}" x2="{high}"/>'
        f'<line x1="{low}" x2="{low}" y1="-7" y2="7"/><line x1="{high}" x2="{high}" y1="-7" y2="7"/></g>'
    )


def _mark(tone: Tone) -> str:
    return f'<svg class="mark {tone}" viewBox="0 0 10 10" aria-hidden="true"><path d="{_MARKS[tone]}"/></svg>'


def _key(bars: Sequence[Bar], reference: float | None, reference_label: str) -> str:
    """What the marks and lines of this chart stand for."""
    used = {bar.tone for bar in bars}
    entries = [f"{_mark(tone)}{tone}" for tone in _MARKS if tone in used]
    if any(bar.low is not None for bar in bars):
        entries.append(f"{_sample('whisker', 'M1 5h14M1 1v8M15 1v8')}interval")
    if reference is not None:
        entries.append(f"{_sample('reference', 'M8 0v10')}{escape(reference_label) or 'reference'}")
    return '<p class="key">' + " ".join(f"<span>{entry}</span>" for entry in entries) + "</p>"


def _sample(name: str, path: str) -> str:
    return f'<svg class="sample {name}" viewBox="0 0 16 10" aria-hidden="true"><path d="{path}"/></svg>'
