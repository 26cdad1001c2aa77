"""A page of sections with text, charts, tables and folded details, rendered as HTML."""

import html
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tfopt.errors import UnsupportedError
from tfopt.text import readable_bytes

# Forbidden by XML 1.0 (section 2.2, "Characters"): most control characters, and lone surrogates, which come from file
# names that are not UTF-8 and cannot be written to a file.
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True, slots=True)
class Table:
    """A table of strings. The first cell of a row is its heading.

    Raises:
        ValueError: If a row or `align` does not have one entry per header.
        TypeError: If a cell is not a string; format numbers first.

    Example:
        >>> table = Table(["Policy", "Step"], [["float32", "38.2 ms"], ["mixed_bfloat16", "16.5 ms"]], align="lr")
    """

    headers: Sequence[str]
    """One per column."""
    rows: Sequence[Sequence[str]]
    """Cells as printed."""
    align: str = ""
    """A letter per column, "l" for left or "r" for right (numbers). Default: all left."""
    caption: str = ""
    """Printed above the table."""

    def __post_init__(self) -> None:
        width = len(self.headers)
        if self.align and (len(self.align) != width or set(self.align) - {"l", "r"}):
            raise ValueError(f"Expected align to be {width} of the letters 'l' and 'r'. Received: {self.align!r}.")
        for number, row in enumerate(self.rows):
            if isinstance(row, str) or len(row) != width:
                raise ValueError(f"Expected {width} cells, one per header, in row {number}. Received: {row!r}.")
        for cell in (cell for row in (self.headers, *self.rows) for cell in row):
            if not isinstance(cell, str):
                raise TypeError(f"Expected a string in each cell of a table. Received: {cell!r}. Format it first.")

    @property
    def alignment(self) -> str:
        """`align`, or its default."""
        return self.align or "l" * len(self.headers)


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a page: text, then code, charts, tables and details.

    Raises:
        TypeError: If `charts`, `tables` or `details` is a single item instead of a sequence.
    """

    title: str
    """The heading."""
    text: str = ""
    """Paragraphs, separated by an empty line."""
    charts: Sequence[str] = ()
    """Figures from `bar_chart` and `line_chart`. They are not escaped: pass no markup from elsewhere."""
    tables: Sequence[Table] = ()
    """Tables, always shown."""
    details: Sequence[tuple[str, Table | str]] = ()
    """Pairs of a summary and what unfolds below it: a table, or preformatted text."""
    code: str = ""
    """Preformatted lines below the text, to be copied."""

    def __post_init__(self) -> None:
        for name in ("charts", "tables", "details"):
            received = getattr(self, name)
            # A string is a sequence too, of single characters.
            if isinstance(received, str | Table):
                raise TypeError(f"Expected a list for {name}. Received: {received!r}. Put it in a list: {name}=[...].")


@dataclass(frozen=True, slots=True)
class Page:
    """A page to send to a colleague."""

    title: str
    """The heading, and the title of the browser's tab."""
    lead: str
    """The finding in a sentence or two; paragraphs as in `Section`."""
    sections: Sequence[Section]
    """From top to bottom. More than three get a table of contents."""
    footer: str = ""
    """The page's origin, in small print."""
    figures: Sequence[tuple[str, str, str]] = ()
    """The numbers that matter most, printed large below the lead: each with its name, the number and its unit."""


def printable(text: str) -> str:
    """Replaces the characters that no document may contain."""
    return _FORBIDDEN.sub("\ufffd", text)


def escape(text: str) -> str:
    """Escapes text for HTML and XML, between tags or inside a quoted attribute."""
    return html.escape(printable(text), quote=True)


def entries(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Returns nested values as rows of a table, for people: (dotted name, text), with None as "unknown".

    Example:
        >>> entries({"host": {"cpus": 2.0, "cpu_model": None, "memory_mib": 1536.0}, "gpus": []})
        [('host.cpus', '2'), ('host.cpu_model', 'unknown'), ('host.memory', '1.5 GiB'), ('gpus', 'none')]
    """
    found: list[tuple[str, str]] = []
    for name, value in values.items():
        if isinstance(value, list) and value and all(isinstance(one, Mapping) for one in value):
            value = {str(number): one for number, one in enumerate(value)}
        if isinstance(value, Mapping):
            found += entries(value, f"{prefix}{name}.")
        else:
            found.append((prefix + name.removesuffix("_mib"), _entry(name, value)))
    return found


def _entry(name: str, value: Any) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, float) or (name.endswith("_mib") and isinstance(value, int)):
        return readable_bytes(value * 2**20) if name.endswith("_mib") else f"{value:g}"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else json.dumps(value)


def render(page: Page) -> str:
    """Returns `page` as a self-contained HTML document.

    Raises:
        UnsupportedError: If jinja2 is not installed.
    """
    return _environment().get_template("page.html.jinja").render(page=page)


def require_renderer() -> None:
    """Raises UnsupportedError if `render` cannot work. Call it before hours of work that end in a page."""
    _environment()


def _environment() -> Any:
    """The templates in this folder, with escaping on."""
    try:
        import jinja2
        from markupsafe import Markup
    except ImportError as cause:
        raise UnsupportedError(
            "Expected jinja2, which renders the HTML page. Found: it is not installed. Run: pip install jinja2"
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
    # Long names of metrics may break after an underscore.
    environment.filters["breakable"] = lambda text: Markup.escape(printable(text)).replace("_", Markup("_<wbr>"))
    environment.filters["paragraphs"] = lambda text: [one for one in text.split("\n\n") if one.strip()]
    return environment
