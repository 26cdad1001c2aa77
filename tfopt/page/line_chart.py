"""Lines over time: one panel a quantity, all on one time axis, with marks of what happened."""

import math
from collections.abc import Sequence

from tfopt.page.lines import MOST_LINES, Marks, Panel
from tfopt.page.panel import SHAPES, draw_panel
from tfopt.page.text import escape


def line_chart(
    panels: Sequence[Panel], *, title: str, description: str, seconds: float, marks: Sequence[Marks] = ()
) -> str:
    """Returns panels of lines over one time axis as an HTML figure with inline SVG, for `Section(charts=...)`.

    Every axis begins at 0, or below where a value does. Besides what the caller passed, only the numbers of the ticks
    are shown.

    Args:
        panels: From top to bottom.
        title: What is shown, printed above the panels.
        description: How to read it, printed below the title.
        seconds: Where the time axis ends; it begins at 0.
        marks: Kinds of moments. One without a moment is left out of the key.

    Raises:
        ValueError: There is no panel, or `seconds` is not above 0.
    """
    if not panels:
        raise ValueError(f"Expected at least one panel for the chart {title!r}. Received: none.")
    if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(f"Expected seconds of the chart {title!r} to be above 0. Received: {seconds}.")
    marks = [kind for kind in marks if kind.seconds]
    # A label has one style in all panels, so that a key once is enough.
    labels = dict.fromkeys(line.label for panel in panels if len(panel.lines) > 1 for line in panel.lines)
    styles = {label: number % MOST_LINES for number, label in enumerate(labels)}
    key = _key(styles, marks, shade=any(panel.shade for panel in panels))
    drawn = "\n".join(draw_panel(panel, seconds, marks, styles) for panel in panels)
    labelled = " labelled" if labels else ""
    return (
        f'<figure class="chart timeline{labelled}">\n<figcaption><strong>{escape(title)}</strong> '
        f"<span>{escape(description)}</span></figcaption>\n{key}{drawn}\n</figure>"
    )


def _key(styles: dict[str, int], marks: Sequence[Marks], *, shade: bool) -> str:
    """What the lines and marks stand for, once for all panels."""
    entries = [
        f"{_sample(f'line line{number}', 'M1 5h22', '0 0 24 10')}{escape(label)}" for label, number in styles.items()
    ]
    if shade:
        entries.append(f"{_sample('shade', 'M0 1h16v8h-16z')}lowest to highest")
    for kind in marks:
        line = "M8 0v10" if kind.kind != "note" else ""
        shape = f'<path d="{SHAPES[kind.kind]}"/>' if SHAPES[kind.kind] else ""
        entries.append(
            f'<svg class="sample {kind.kind}" viewBox="0 0 16 10" aria-hidden="true"><path class="rule" d="{line}"/>'
            f'<g transform="translate(8 10)">{shape}</g></svg>{escape(kind.label)}'
        )
    return '<p class="key">' + " ".join(f"<span>{entry}</span>" for entry in entries) + "</p>\n" if entries else ""


def _sample(name: str, path: str, box: str = "0 0 16 10") -> str:
    return f'<svg class="sample {name}" viewBox="{box}" aria-hidden="true"><path class="{name}" d="{path}"/></svg>'
