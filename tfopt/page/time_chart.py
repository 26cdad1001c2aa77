"""Draws lines over time: one panel per quantity, all on one time axis, with marks for events.

Lines stretch with the page. Text must not, so it is positioned beside them in percent.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

from tfopt.errors import unknown_name
from tfopt.page.document import escape

Kind = Literal["division", "note", "alarm"]

MOST_LINES = 8
# The drawing's own units, fine enough for a wide screen; integers keep the page small.
_WIDTH, _HEIGHT = 2000, 400
_LABEL_PERCENT = 11.0  # height of a label, of the panel's height
_SHAPES: dict[Kind, str] = {"division": "", "note": "M-4-9h8l-4 7z", "alarm": "M0-10 5-5 0 0-5-5z"}

# A duration is shown in the largest unit of which it has at least two.
_UNITS = (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0))
_TIMES = 5  # most steps of the time axis
# Steps that divide a day, an hour and a minute evenly; elsewhere steps are decimal.
_PARTS = {"h": (0.5, 1, 2, 3, 4, 6, 12), "min": (0.5, 1, 2, 5, 10, 15, 20, 30), "s": (1, 2, 5, 10, 15, 20, 30)}


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a panel.

    Raises:
        ValueError: If the sequences differ in length, or a number is not finite.
    """

    label: str
    """What it shows; printed at its end and in the key if a panel has several lines."""
    seconds: Sequence[float]
    """Times of its points, in order."""
    values: Sequence[float | None]
    """Values at these times; None (unknown) breaks the line."""

    def __post_init__(self) -> None:
        _check_columns(f"line {self.label!r}", seconds=self.seconds, values=self.values)


@dataclass(frozen=True, slots=True)
class Shade:
    """The range behind a panel's lines, from the lowest to the highest value at each time.

    Raises:
        ValueError: If the sequences differ in length, a number is not finite, or only one edge is known.
    """

    seconds: Sequence[float]
    """As in `Line`."""
    low: Sequence[float | None]
    """Lowest values; None where unknown."""
    high: Sequence[float | None]
    """Highest values; None where the lowest is."""

    def __post_init__(self) -> None:
        _check_columns("a shade", seconds=self.seconds, low=self.low, high=self.high)
        if any((low is None) != (high is None) for low, high in zip(self.low, self.high, strict=True)):
            raise ValueError("Expected both edges of a shade, or neither, at each time. Found: only one is None.")


@dataclass(frozen=True, slots=True)
class Panel:
    """One quantity.

    Raises:
        ValueError: If there is no line, there are more than 8, or `top` is not above 0.
    """

    title: str
    """The quantity, printed above the lines."""
    unit: str
    """Its unit, printed after the title."""
    lines: Sequence[Line]
    """One per device, up to 8."""
    shade: Shade | None = None
    """Drawn behind the lines."""
    text: str = ""
    """A summary, such as the mean; printed above the lines, on the right."""
    top: float | None = None
    """End of the axis, such as 100 for percent; larger values are drawn at the edge (say so in `text`). None: above the
    largest value."""

    def __post_init__(self) -> None:
        if not 1 <= len(self.lines) <= MOST_LINES:
            raise ValueError(
                f"Expected 1 to {MOST_LINES} lines in panel {self.title!r}. Received: {len(self.lines)}. "
                "Where there are more, draw the median with a shade from the lowest to the highest."
            )
        if self.top is not None and not (math.isfinite(self.top) and self.top > 0):
            raise ValueError(f"Expected top of panel {self.title!r} to be above 0. Received: {self.top}.")


@dataclass(frozen=True, slots=True)
class Marks:
    """Moments of one kind, drawn in every panel.

    Raises:
        ValueError: If a moment is not finite, or the kind is unknown.
    """

    label: str
    """What they are, printed in the key."""
    seconds: Sequence[float]
    """Their times."""
    kind: Kind = "note"
    """How they are drawn: "division", a thin line; "note", a triangle; "alarm", a diamond on a line."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise unknown_name("kind of mark", self.kind, get_args(Kind))
        for number in self.seconds:
            if not math.isfinite(number):
                raise ValueError(f"Expected finite numbers as seconds of {self.label!r}. Received: {number}.")


def line_chart(
    panels: Sequence[Panel], *, title: str, description: str, seconds: float, marks: Sequence[Marks] = ()
) -> str:
    """Returns panels of lines over one time axis as an HTML figure with inline SVG, for `Section(charts=...)`.

    Every axis starts at 0, or lower if a value is negative. All numbers but the ticks come from the caller.

    Args:
        panels: From top to bottom.
        title: What is shown, printed above the panels.
        description: How to read it, printed below the title.
        seconds: End of the time axis, which starts at 0.
        marks: Kinds of moments. A kind without moments is left out of the key.

    Raises:
        ValueError: If there is no panel, or `seconds` is not above 0.
    """
    if not panels:
        raise ValueError(f"Expected at least one panel for the chart {title!r}. Received: none.")
    if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(f"Expected seconds of the chart {title!r} to be above 0. Received: {seconds}.")
    marks = [kind for kind in marks if kind.seconds]
    # A label has the same style in all panels, so that they share one key.
    labels = dict.fromkeys(line.label for panel in panels if len(panel.lines) > 1 for line in panel.lines)
    styles = {label: number % MOST_LINES for number, label in enumerate(labels)}
    key = _key(styles, marks, shade=any(panel.shade for panel in panels))
    drawn = "\n".join(_panel(panel, seconds, marks, styles) for panel in panels)
    labelled = " labelled" if labels else ""
    return (
        f'<figure class="chart timeline{labelled}">\n<figcaption><strong>{escape(title)}</strong> '
        f"<span>{escape(description)}</span></figcaption>\n{key}{drawn}\n</figure>"
    )


def _check_columns(what: str, **columns: Sequence[float | None]) -> None:
    if len({len(column) for column in columns.values()}) != 1:
        lengths = ", ".join(f"{len(column)} {name}" for name, column in columns.items())
        raise ValueError(f"Expected all columns to have the same length in {what}. Received: {lengths}.")
    for name, column in columns.items():
        for number in column:
            if number is not None and not math.isfinite(number):
                raise ValueError(
                    f"Expected finite numbers as {name} of {what}. Received: {number}. Use None for unknown values."
                )


def _key(styles: dict[str, int], marks: Sequence[Marks], *, shade: bool) -> str:
    """The meaning of the lines and marks, once for all panels."""
    items = [
        f"{_sample(f'line line{number}', 'M1 5h22', '0 0 24 10')}{escape(label)}" for label, number in styles.items()
    ]
    if shade:
        items.append(f"{_sample('shade', 'M0 1h16v8h-16z')}lowest to highest")
    for kind in marks:
        line = "M8 0v10" if kind.kind != "note" else ""
        shape = f'<path d="{_SHAPES[kind.kind]}"/>' if _SHAPES[kind.kind] else ""
        items.append(
            f'<svg class="sample {kind.kind}" viewBox="0 0 16 10" aria-hidden="true"><path class="rule" d="{line}"/>'
            f'<g transform="translate(8 10)">{shape}</g></svg>{escape(kind.label)}'
        )
    return '<p class="key">' + " ".join(f"<span>{item}</span>" for item in items) + "</p>\n" if items else ""


def _sample(name: str, path: str, box: str = "0 0 16 10") -> str:
    return f'<svg class="sample {name}" viewBox="{box}" aria-hidden="true"><path class="{name}" d="{path}"/></svg>'


@dataclass(frozen=True, slots=True)
class _Axes:
    """Maps times and values to fractions of the panel's width and height, clamped to its edges."""

    seconds: float
    low: float
    high: float

    def across(self, seconds: float) -> float:
        return min(1.0, max(0.0, seconds / self.seconds))

    def down(self, value: float) -> float:
        # Halved: the difference of two huge values may be infinite.
        place = (self.high / 2 - value / 2) / (self.high / 2 - self.low / 2)
        return min(1.0, max(0.0, place))

    def point(self, seconds: float, value: float) -> str:
        return f"{round(self.across(seconds) * _WIDTH)} {round(self.down(value) * _HEIGHT)}"


def _fit_axes(panel: Panel, seconds: float) -> _Axes:
    columns = [line.values for line in panel.lines]
    if panel.shade is not None:
        columns += [panel.shade.low, panel.shade.high]
    numbers = [number for column in columns for number in column if number is not None]
    low, high = min([0.0, *numbers]), max([0.0, *numbers]) if panel.top is None else panel.top
    if low / 2 == high / 2:
        return _Axes(seconds, 0.0, 1.0)
    if panel.top is None and math.isfinite(high - low):
        step = nice_step(high - low, 4)
        high = math.ceil(high / step - 1e-9) * step  # the highest tick is above all values
    return _Axes(seconds, low, high)


def _panel(panel: Panel, seconds: float, marks: Sequence[Marks], styles: Mapping[str, int]) -> str:
    """A panel as HTML with inline SVG; `styles` numbers the labels' styles."""
    axes = _fit_axes(panel, seconds)
    several = len(panel.lines) > 1
    # A panel's only line gets a separate style: the first device's would suggest that it is that device.
    names = [f"line{styles[line.label]}" if several else "only" for line in panel.lines]
    heading = f"<strong>{escape(panel.title)}</strong> <span>{escape(panel.unit)}</span>"
    summary = escape(f"{panel.unit}; {panel.text}" if panel.text else panel.unit)
    shade = _shade(panel.shade, axes) if panel.shade is not None else ""
    lines = "".join(
        f'<path class="line {name}" d="{_path(line, axes)}"/>' for line, name in zip(panel.lines, names, strict=True)
    )
    return (
        f'<div class="panel"><p class="quantity">{heading}<b>{escape(panel.text)}</b></p>\n'
        f'<svg class="plot" role="img"><title>{escape(panel.title)}</title><desc>{summary}</desc>\n'
        f"{_grid(axes)}{_marks(marks, axes)}\n"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none">{shade}{lines}</svg>\n'
        f"{_end_labels(panel, axes, names) if several else ''}</svg></div>"
    )


def _grid(axes: _Axes) -> str:
    rows = "".join(
        f'<line class="{"origin" if value == 0 else "grid"}" x2="100%" y1="{100 * axes.down(value):.1f}%" '
        f'y2="{100 * axes.down(value):.1f}%"/>'
        f'<text class="tick" x="-8" y="{100 * axes.down(value):.1f}%" dy="0.35em" text-anchor="end">{text}</text>'
        for value, text in ticks(axes.low, axes.high)
    )
    columns = "".join(
        f'<text class="tick" x="{100 * axes.across(at):.1f}%" y="100%" dy="1.5em" '
        f'text-anchor="{_anchor(axes.across(at))}">{text}</text>'
        for at, text in time_ticks(axes.seconds)
    )
    return rows + columns


def _anchor(across: float) -> str:
    return "start" if across == 0 else "end" if across > 0.97 else "middle"


def _marks(marks: Sequence[Marks], axes: _Axes) -> str:
    drawn = []
    for kind in marks:
        for at in kind.seconds:
            line = '<line y2="100%"/>' if kind.kind != "note" else ""
            shape = f'<path d="{_SHAPES[kind.kind]}"/>' if _SHAPES[kind.kind] else ""
            drawn.append(
                f'<svg class="{kind.kind}" x="{100 * axes.across(at):.2f}%" overflow="visible">{line}{shape}</svg>'
            )
    return "".join(drawn)


def _path(line: Line, axes: _Axes) -> str:
    """Draws each run of known values as one stroke, and a single value between gaps as a dot."""
    drawn = []
    for run in _runs(line.seconds, line.values):
        points = [axes.point(seconds, value) for seconds, value in run]
        drawn.append(f"M{points[0]}L" + " ".join(points[1:] or points))
    return "".join(drawn)


def _shade(shade: Shade, axes: _Axes) -> str:
    drawn = []
    runs = zip(_runs(shade.seconds, shade.high), _runs(shade.seconds, shade.low), strict=True)
    for high, low in runs:
        edge = [axes.point(seconds, value) for seconds, value in [*high, *reversed(low)]]
        drawn.append(f"M{edge[0]}L" + " ".join(edge[1:]) + "z")
    return f'<path class="shade" d="{"".join(drawn)}"/>'


def _runs(seconds: Sequence[float], values: Sequence[float | None]) -> Iterator[list[tuple[float, float]]]:
    """Runs of consecutive known values, each with its time."""
    run: list[tuple[float, float]] = []
    for at, value in zip(seconds, values, strict=True):
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


def nice_step(span: float, most: int) -> float:
    """Returns the smallest of 1, 2 and 5 times a power of ten that divides a span into at most `most` parts."""
    exponent = math.floor(math.log10(span / most))
    steps = [float(f"{digit}e{power}") for power in (exponent, exponent + 1) for digit in (1, 2, 5)]
    return next(step for step in steps if span / step <= most * (1 + 1e-9))


def ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Returns round numbers between `low` and `high` with their text, in at most four steps; if none fit, both ends."""
    if not math.isfinite(high - low) or high - low < 1e-300:
        return [(value, f"{value:.3g}") for value in (low, high)]
    step = nice_step(high - low, 4)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [(number * step, number_text(number * step, step)) for number in range(first, last + 1)]


def number_text(value: float, step: float) -> str:
    """Formats a tick with as many decimals as a distance of `step` needs."""
    if step < 1e-4 or abs(value) >= 1e7:
        return f"{value:.3g}".replace("e+0", "e").replace("e-0", "e-").replace("e+", "e").replace("-", "−")
    decimals = max(0, -math.floor(math.log10(step)))
    return f"{value:,.{decimals}f}".replace("-", "−")


def time_ticks(seconds: float) -> list[tuple[float, str]]:
    """Returns round times from 0 to `seconds`, with their text, all in one unit: seconds, minutes, hours or days."""
    unit, size = next(((unit, size) for unit, size in _UNITS if seconds >= 2 * size), _UNITS[-1])
    span = seconds / size
    step = next((part for part in _PARTS.get(unit, ()) if span / part <= _TIMES), nice_step(span, _TIMES))
    if seconds < _TIMES:  # a few seconds in all
        step = nice_step(span, _TIMES)
    count = math.floor(span / step + 1e-9)
    return [(0.0, "0"), *((number * step * size, f"{number * step:g}\u00a0{unit}") for number in range(1, count + 1))]


def duration(seconds: float) -> str:
    """Returns a duration in its two largest units.

    Example:
        >>> duration(11_580)
        '3 h 13 min'
    """
    for (large, size), (small, part) in pairwise(_UNITS):
        whole, rest = divmod(round(seconds / part), round(size / part))
        if whole:
            return f"{whole}\u00a0{large}" + (f" {rest}\u00a0{small}" if rest else "")
    return f"{seconds:.1f}\u00a0s" if seconds < 9.95 else f"{seconds:.0f}\u00a0s"
