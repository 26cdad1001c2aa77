"""Draws lines over time or epochs: one panel per quantity, all on one axis, with marks for events.

Lines stretch with the page. Text must not, so it is positioned beside them in percent.
"""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from tfopt.page.document import escape
from tfopt.page.panels import MOST_LINES, Kind, Line, Marks, Panel, Shade
from tfopt.page.ticks import epoch_ticks, logarithmic_ticks, nice_step, ticks, time_ticks

# The drawing's own units, fine enough for a wide screen; integers keep the page small.
_WIDTH, _HEIGHT = 2000, 400
_LABEL_PERCENT = 11.0  # height of a label, of the panel's height
_LETTER_REM = 0.46  # width of a letter of a label
_LONGEST_LABEL = 12
# The narrowest panel that leaves room for so many columns on a wide screen; fewer fit on others.
_NARROWEST: dict[int, str] = {1: "100%", 2: "26rem", 3: "19rem"}
# A lowest value below this share of the highest lets an axis begin at 0.
_NEAR_ZERO = 0.4
_SHAPES: dict[Kind, str] = {"division": "", "note": "M-4-9h8l-4 7z", "alarm": "M0-10 5-5 0 0-5-5z"}


def line_chart(
    panels: Sequence[Panel],
    *,
    title: str,
    description: str,
    seconds: float | None = None,
    epochs: tuple[int, int] | None = None,
    marks: Sequence[Marks] = (),
    columns: int = 1,
) -> str:
    """Returns panels of lines over one axis as an HTML figure with inline SVG, for `Section(charts=...)`.

    All numbers but the ticks come from the caller.

    Args:
        panels: From left to right and top to bottom.
        title: What is shown, printed above the panels.
        description: How to read it, printed below the title.
        seconds: End of a time axis, which starts at 0.
        epochs: First and last number on an axis of epochs. Pass this or `seconds`.
        marks: Kinds of moments. A kind without moments is left out of the key.
        columns: How many panels stand side by side on a wide screen: 1, 2 or 3.

    Raises:
        ValueError: If there is no panel, the axis has no length, or `columns` is not 1, 2 or 3.
    """
    if not panels:
        raise ValueError(f"Expected at least one panel for the chart {title!r}. Received: none.")
    if columns not in _NARROWEST:
        raise ValueError(f"Expected 1, 2 or 3 columns in the chart {title!r}. Received: {columns}.")
    across = _across(title, seconds, epochs)
    marks = [kind for kind in marks if kind.at]
    # A label has the same style in all panels.
    labels = dict.fromkeys(line.label for panel in panels if len(panel.lines) > 1 for line in panel.lines)
    styles = {label: number % MOST_LINES for number, label in enumerate(labels)}
    key = _key(marks, shade=any(panel.shade for panel in panels))
    drawn = "\n".join(
        part
        for group, together in groupby(panels, lambda panel: panel.group)
        for part in (_heading(group), *(_panel(panel, across, marks, styles) for panel in together))
    )
    longest = max((min(len(label), _LONGEST_LABEL) for label in labels), default=-1)
    layout = f"--narrowest: {_NARROWEST[columns]}; --right: {1 + _LETTER_REM * longest:.2f}rem"
    return (
        f'<figure class="chart timeline" style="{layout}">\n<figcaption><strong>{escape(title)}</strong> '
        f"<span>{escape(description)}</span></figcaption>\n{key}{drawn}\n</figure>"
    )


@dataclass(frozen=True, slots=True)
class _Across:
    """The axis that all panels share."""

    start: float
    end: float
    ticks: Sequence[tuple[float, str]]

    def __call__(self, at: Any) -> Any:
        """Returns a place, or an array of them, as fractions of the width, clamped to the edges."""
        return np.clip((at - self.start) / (self.end - self.start), 0.0, 1.0)


def _across(title: str, seconds: float | None, epochs: tuple[int, int] | None) -> _Across:
    if (seconds is None) == (epochs is None):
        raise ValueError(f"Expected either seconds or epochs for the chart {title!r}. Received: {seconds}, {epochs}.")
    if epochs is not None:
        if epochs[0] >= epochs[1]:
            raise ValueError(f"Expected at least two epochs for the chart {title!r}. Received: {epochs}.")
        return _Across(*epochs, epoch_ticks(*epochs))
    if seconds is None or not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(f"Expected seconds of the chart {title!r} to be above 0. Received: {seconds}.")
    return _Across(0.0, seconds, time_ticks(seconds))


def _key(marks: Sequence[Marks], *, shade: bool) -> str:
    """The meaning of the shade and the marks, once for all panels; lines are labelled where they end."""
    items = [f"{_sample('shade', 'M0 1h16v8h-16z')}lowest to highest"] if shade else []
    for kind in marks:
        line = "M8 0v10" if kind.kind != "note" else ""
        shape = f'<path d="{_SHAPES[kind.kind]}"/>' if _SHAPES[kind.kind] else ""
        items.append(
            f'<svg class="sample {kind.kind}" viewBox="0 0 16 10" aria-hidden="true"><path class="rule" d="{line}"/>'
            f'<g transform="translate(8 10)">{shape}</g></svg>{escape(kind.label)}'
        )
    return '<p class="key">' + " ".join(f"<span>{item}</span>" for item in items) + "</p>\n" if items else ""


def _heading(group: str) -> str:
    return f'<p class="group">{escape(group)}</p>' if group else ""


def _sample(name: str, path: str) -> str:
    return f'<svg class="sample {name}" viewBox="0 0 16 10" aria-hidden="true"><path class="{name}" d="{path}"/></svg>'


@dataclass(frozen=True, slots=True)
class _Axes:
    """Maps places and values to fractions of the panel's width and height, clamped to its edges."""

    across: _Across
    low: float  # on a logarithmic axis an exponent of ten, as `high`
    high: float
    logarithmic: bool = False

    def down(self, value: Any) -> Any:
        value = np.log10(value) if self.logarithmic else value
        # Halved: the difference of two huge values may be infinite.
        with np.errstate(over="ignore"):
            return np.clip((self.high / 2 - value / 2) / (self.high / 2 - self.low / 2), 0.0, 1.0)

    def points(self, run: Sequence[tuple[float, float]]) -> list[str]:
        at, values = np.array(run).T
        places = np.rint([self.across(at) * _WIDTH, self.down(values) * _HEIGHT]).astype(int)
        return [f"{across} {down}" for across, down in places.T.tolist()]

    def ticks(self) -> list[tuple[float, str]]:
        return (logarithmic_ticks if self.logarithmic else ticks)(self.low, self.high)


def _fit_axes(panel: Panel, across: _Across) -> _Axes:
    columns = [line.values for line in panel.lines]
    if panel.shade is not None:
        columns += [panel.shade.low, panel.shade.high]
    numbers = [number for column in columns for number in column if number is not None]
    if panel.logarithmic and numbers and min(numbers) > 0:
        first, last = math.floor(math.log10(min(numbers))), math.ceil(math.log10(max(numbers)))
        return _Axes(across, first, max(last, first + 1), logarithmic=True)
    low, high = min([0.0, *numbers]), max([0.0, *numbers]) if panel.top is None else panel.top
    if not panel.from_zero and numbers and _NEAR_ZERO * high < min(numbers) < high:
        low = min(numbers)
    if low / 2 == high / 2:
        return _Axes(across, 0.0, 1.0)
    if panel.top is None and math.isfinite(high - low):
        step = nice_step(high - low, 4)
        high = min(math.ceil(high / step - 1e-9) * step, sys.float_info.max)  # the highest tick is above all values
        low = math.floor(low / step + 1e-9) * step if low > 0 else low
    return _Axes(across, low, high)


def _panel(panel: Panel, across: _Across, marks: Sequence[Marks], styles: Mapping[str, int]) -> str:
    """A panel as HTML with inline SVG; `styles` numbers the labels' styles."""
    axes = _fit_axes(panel, across)
    several = len(panel.lines) > 1
    # A line without a style of its own must not look like the first device's.
    names = [f"line{styles[line.label]}" if line.label in styles else "only" for line in panel.lines]
    heading = f"<strong>{escape(panel.title)}</strong> <span>{escape(panel.unit)}</span>"
    summary = escape(f"{panel.unit}; {panel.text}" if panel.text else panel.unit)
    shade = _shade(panel.shade, axes) if panel.shade is not None else ""
    lines = "".join(_line(line, name, axes) for line, name in zip(panel.lines, names, strict=True))
    return (
        f'<div class="panel"><p class="quantity">{heading}<b>{escape(panel.text)}</b></p>\n'
        f'<svg class="plot" role="img"><title>{escape(panel.title)}</title><desc>{summary}</desc>\n'
        f"{_grid(axes, panel.tick_unit)}{_marks(marks, axes)}\n"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none">{shade}{lines}</svg>\n'
        f"{_end_labels(panel, axes, names) if several else ''}</svg></div>"
    )


def _grid(axes: _Axes, unit: str) -> str:
    found = axes.ticks()
    texts = [text for _, text in found]
    texts[-1] += f"\u00a0{escape(unit)}" if unit else ""
    rows = "".join(
        f'<line class="{"origin" if value == 0 and not axes.logarithmic else "grid"}" x2="100%" y1="{down:.1f}%" '
        f'y2="{down:.1f}%"/><text class="tick" x="-8" y="{down:.1f}%" dy="0.35em" text-anchor="end">{text}</text>'
        for (value, _), text, down in zip(found, texts, (100 * axes.down(value) for value, _ in found), strict=True)
    )
    columns = "".join(
        f'<text class="tick" x="{100 * axes.across(at):.1f}%" y="100%" dy="1.5em" '
        f'text-anchor="{_anchor(axes.across(at))}">{text}</text>'
        for at, text in axes.across.ticks
    )
    return rows + columns


def _anchor(across: float) -> str:
    return "start" if across == 0 else "end" if across > 0.97 else "middle"


def _marks(marks: Sequence[Marks], axes: _Axes) -> str:
    drawn = []
    for kind in marks:
        for at in kind.at:
            line = '<line y2="100%"/>' if kind.kind != "note" else ""
            shape = f'<path d="{_SHAPES[kind.kind]}"/>' if _SHAPES[kind.kind] else ""
            drawn.append(
                f'<svg class="{kind.kind}" x="{100 * axes.across(at):.2f}%" overflow="visible">{line}{shape}</svg>'
            )
    return "".join(drawn)


def _line(line: Line, name: str, axes: _Axes) -> str:
    """Draws each run of known values as one stroke, and single values between gaps as dots."""
    runs = [axes.points(run) for run in _runs(line.at, line.values)]
    strokes = "".join(f"M{run[0]}L{' '.join(run[1:])}" for run in runs if len(run) > 1)
    dots = "".join(f"M{run[0]}L{run[0]}" for run in runs if len(run) == 1)
    drawn = f'<path class="line {name}" d="{strokes}"/>'
    return f'{drawn}<path class="line dots {name}" d="{dots}"/>' if dots else drawn


def _shade(shade: Shade, axes: _Axes) -> str:
    drawn = []
    runs = zip(_runs(shade.at, shade.high), _runs(shade.at, shade.low), strict=True)
    for high, low in runs:
        edge = axes.points([*high, *reversed(low)])
        drawn.append(f"M{edge[0]}L" + " ".join(edge[1:]) + "z")
    return f'<path class="shade" d="{"".join(drawn)}"/>'


def _runs(places: Sequence[float], values: Sequence[float | None]) -> Iterator[list[tuple[float, float]]]:
    """Runs of consecutive known values, each with its place."""
    run: list[tuple[float, float]] = []
    for at, value in zip(places, values, strict=True):
        if value is not None:
            run.append((at, value))
        elif run:
            yield run
            run = []
    if run:
        yield run


def _end_labels(panel: Panel, axes: _Axes, names: Sequence[str]) -> str:
    """The lines' labels at the right edge, as close to the lines' ends as space allows."""
    ends: list[tuple[float, str, str]] = []
    for line, name in zip(panel.lines, names, strict=True):
        last = next((value for value in reversed(line.values) if value is not None), None)
        if last is not None:
            ends.append((100 * axes.down(last), line.label, name))
    ends.sort(key=lambda end: end[0])
    drawn = "".join(
        f'<line class="line {name}" x1="3" x2="11" y1="{end:.1f}%" y2="{at:.1f}%"/>'
        f'<text class="tick" x="14" y="{at:.1f}%" dy="0.35em">{escape(label)}</text>'
        for (end, label, name), at in zip(ends, _apart([end for end, _, _ in ends]), strict=True)
    )
    return f'<svg x="100%" overflow="visible">{drawn}</svg>'


def _apart(places: Sequence[float]) -> list[float]:
    """Spreads the labels' sorted positions, and moves them back up where the lowest would leave the panel."""
    moved: list[float] = []
    for place in places:
        moved.append(max(place, moved[-1] + _LABEL_PERCENT) if moved else place)
    limit = 100.0
    for at in reversed(range(len(moved))):
        moved[at] = min(moved[at], limit)
        limit = moved[at] - _LABEL_PERCENT
    return moved
