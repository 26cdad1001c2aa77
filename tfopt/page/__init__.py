"""Charts and a self-contained HTML page, for whoever reports what was measured.

The page opens from disk: no script, no font, no image and nothing from elsewhere. It follows the reader's light or dark
scheme, prints, and reads on a phone. Besides the ticks of a time chart's axes, it shows no number that its caller did
not pass.

Example:
    >>> chart = bar_chart(
    ...     [
    ...         Bar("float32", 1.0, "1.00×", tone="baseline"),
    ...         Bar("mixed_bfloat16", 2.31, "2.31× (2.24–2.37)", low=2.24, high=2.37, tone="better"),
    ...     ],
    ...     title="Speed of a training step",
    ...     description="Against float32, with the 95 % interval.",
    ...     reference=1.0,
    ...     reference_label="as fast as float32",
    ... )
    >>> page = Page("Benchmark", "Mixed precision pays off here.", [Section("Precision", charts=[chart])])
    >>> html = render(page)
"""

from tfopt.page.charts import Bar, bar_chart
from tfopt.page.document import Page, Section, Table, render, require_renderer
from tfopt.page.entries import entries
from tfopt.page.line_chart import line_chart
from tfopt.page.lines import MOST_LINES, Line, Marks, Panel, Shade
from tfopt.page.picture import picture
from tfopt.page.ticks import duration

__all__ = [
    "MOST_LINES",
    "Bar",
    "Line",
    "Marks",
    "Page",
    "Panel",
    "Section",
    "Shade",
    "Table",
    "bar_chart",
    "duration",
    "entries",
    "line_chart",
    "picture",
    "render",
    "require_renderer",
]
