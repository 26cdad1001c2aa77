"""Horizontal bars as an SVG file that stands by itself, for a README: with its own colours, in both schemes."""

from collections.abc import Sequence

from tfopt.page.charts import Bar
from tfopt.page.scale import Scale, fit_scale
from tfopt.page.text import escape

_WIDTH, _ROW, _TOP = 760, 26, 56
_LANE_LEFT, _LANE_WIDTH = 190, 400
_STYLE = """\
text { font: 13px system-ui, sans-serif; fill: #1c242c } .title { font-weight: 600; font-size: 15px }
.muted { fill: #56616c } .line { stroke: #56616c } .whisker { stroke: #1c242c; fill: none }
.baseline { fill: #52647a } .better { fill: #12857b } .worse { fill: #c2500f } .unclear { fill: #a9b1ba }
@media (prefers-color-scheme: dark) {
text { fill: #e4e8ea } .muted { fill: #a0abb5 } .line { stroke: #a0abb5 } .whisker { stroke: #e4e8ea }
.baseline { fill: #8296b0 } .better { fill: #3aa597 } .worse { fill: #e0793b } .unclear { fill: #6d7580 }
}"""


def picture(bars: Sequence[Bar], *, title: str, description: str, reference: float | None = None) -> str:
    """Returns bars as an SVG document; every number is in a text that the caller passed.

    Text is neither wrapped nor cut: labels up to about 25 letters and values up to about 22 have room.

    Args:
        bars: From top to bottom.
        title: What is compared, printed above the bars.
        description: How to read them, printed below the title.
        reference: Where a thin line crosses all bars, such as 1.0 for ratios to a baseline.

    Raises:
        ValueError: There is no bar.
    """
    if not bars:
        raise ValueError(f"Expected at least one bar for the picture {title!r}. Received: none.")
    scale = fit_scale([number for bar in bars for number in bar.numbers], reference)
    height = _TOP + _ROW * len(bars) + 8
    rows = [_row(bar, scale, _TOP + _ROW * number) for number, bar in enumerate(bars)]
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


def _row(bar: Bar, scale: Scale, top: float) -> str:
    middle = top + _ROW / 2
    left, right = sorted((_x(scale, scale.origin), _x(scale, bar.value)))
    whisker = ""
    if bar.low is not None and bar.high is not None:
        low, high = _x(scale, bar.low), _x(scale, bar.high)
        ends = "".join(f"M{x} {middle - 5:g}v10" for x in (low, high))
        whisker = f'<path class="whisker" d="M{low} {middle:g}H{high}{ends}"/>'
    value_at = _LANE_LEFT + _LANE_WIDTH + 12
    return (
        f'<text x="8" y="{middle + 4:g}">{escape(bar.label)}</text>'
        f'<rect class="{bar.tone}" x="{left}" y="{top + 6:g}" width="{right - left:.1f}" height="{_ROW - 12}" rx="3"/>'
        f'{whisker}<text x="{value_at}" y="{middle + 4:g}">{escape(bar.text)}</text>'
    )


def _x(scale: Scale, value: float) -> float:
    return round(_LANE_LEFT + _LANE_WIDTH * scale.percent(value) / 100, 1)
