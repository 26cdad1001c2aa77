"""A page of sections with text, charts, tables and folded details, and the HTML it becomes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tfopt.errors import UnsupportedError
from tfopt.page.text import printable


@dataclass(frozen=True, slots=True)
class Table:
    """A table of texts. The first cell of a row is its heading.

    Args:
        headers: One for each column.
        rows: Cells as they are printed.
        align: A letter for each column, "l" for left or "r" for right (numbers). Defaults to left everywhere.
        caption: Printed above the table.

    Raises:
        ValueError: A row or `align` has not one entry for each header.
        TypeError: A cell is not a string. How a number is printed is the caller's to say.

    Example:
        >>> table = Table(["Policy", "Step"], [["float32", "38.2 ms"], ["mixed_bfloat16", "16.5 ms"]], align="lr")
    """

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    align: str = ""
    caption: str = ""

    def __post_init__(self) -> None:
        width = len(self.headers)
        if self.align and (len(self.align) != width or set(self.align) - {"l", "r"}):
            raise ValueError(f"Expected align to be {width} of the letters 'l' and 'r'. Received: {self.align!r}.")
        for number, row in enumerate(self.rows):
            if isinstance(row, str) or len(row) != width:
                raise ValueError(f"Expected {width} cells, one a header, in row {number}. Received: {row!r}.")
        for cell in (cell for row in (self.headers, *self.rows) for cell in row):
            if not isinstance(cell, str):
                raise TypeError(f"Expected a string in each cell of a table. Received: {cell!r}. Format it first.")

    @property
    def alignment(self) -> str:
        """`align`, or its default."""
        return self.align or "l" * len(self.headers)


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a page: text, then charts, tables and details.

    Args:
        title: Its heading.
        text: Paragraphs, with an empty line between two of them.
        charts: What `bar_chart` and `line_chart` returned. They go in as they are: pass no markup from elsewhere.
        tables: Always shown.
        details: Pairs of a summary and what unfolds below it, a table or a text whose lines are kept.

    Raises:
        TypeError: One chart, table or detail was passed instead of a sequence of them.
    """

    title: str
    text: str = ""
    charts: Sequence[str] = ()
    tables: Sequence[Table] = ()
    details: Sequence[tuple[str, Table | str]] = ()

    def __post_init__(self) -> None:
        for name in ("charts", "tables", "details"):
            received = getattr(self, name)
            # A string is a sequence too, of single characters.
            if isinstance(received, str | Table):
                raise TypeError(f"Expected a list for {name}. Received: {received!r}. Put it in a list: {name}=[...].")


@dataclass(frozen=True, slots=True)
class Page:
    """A page to send to a colleague.

    Args:
        title: Its heading, and the title of the browser's tab.
        lead: The finding in a sentence or two; paragraphs as in `Section`.
        sections: From top to bottom. More than three get a table of contents.
        footer: Where it comes from, in small print.
    """

    title: str
    lead: str
    sections: Sequence[Section]
    footer: str = ""


def render(page: Page) -> str:
    """Returns `page` as an HTML document that needs nothing beside itself.

    Raises:
        UnsupportedError: jinja2 is not installed.

    Example:
        >>> html = render(Page("Benchmark", "All goals met.", [Section("Precision", "No overflow.")]))
    """
    return _environment().get_template("page.html.jinja").render(page=page)


def require_renderer() -> None:
    """Does nothing where `render` can be used. Call it before hours of work that end in a page.

    Raises:
        UnsupportedError: jinja2 is not installed.
    """
    _environment()


def _environment() -> Any:
    """The templates beside this file, everything that goes into them escaped."""
    try:
        import jinja2
        from markupsafe import Markup
    except ImportError as cause:
        raise UnsupportedError(
            "Expected jinja2, which writes the HTML page. Found: it is not installed. Run: pip install jinja2"
        ) from cause

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("tfopt.page", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    environment.filters["markup"] = Markup
    environment.filters["paragraphs"] = _paragraphs
    return environment


def _paragraphs(text: str) -> list[str]:
    return [paragraph for paragraph in text.split("\n\n") if paragraph.strip()]
