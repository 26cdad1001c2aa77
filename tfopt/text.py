"""Formats names and figures: lists cut short, tables, lines that fit, and results in a console and a notebook."""

import html
import math
import re
import textwrap
from collections.abc import Sequence

WIDTH = 80
"""Columns of the narrowest usual terminal."""

_COMMAND = r"(?:pip install|python -m|tfopt-bench run) .+"


class Shown:
    """A result whose `str` is meant to be read: its `repr` is one line, and a notebook shows the whole text."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {str(self).partition(chr(10))[0]}>"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def listed(names: Sequence[str], most: int) -> str:
    """Returns names joined by commas; beyond `most`, the first ones and how many more there are.

    Example:
        >>> listed(["a", "b", "c"], 2)
        'a, b and 1 more'
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def aligned(rows: Sequence[Sequence[str]], texts: int) -> list[str]:
    """Returns the lines of a table, indented by two. In one that is too wide, figures stand below their row's texts.

    Args:
        rows: The cells, headings included; all rows have the same length.
        texts: How many leading columns hold text, aligned left; the others are aligned right.

    Example:
        >>> aligned([("stage", "busy"), ("decode", "9 %")], texts=1)
        ['  stage   busy', '  decode   9 %']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if sum(widths) + 2 * len(widths) > WIDTH and texts:
        names = (f"  {', '.join(filter(None, row[:texts]))}" for row in rows)
        figures = (f"  {line}" for line in aligned([row[texts:] for row in rows], texts=0))
        return [line for pair in zip(names, figures, strict=True) for line in pair if line.strip()]
    lines = ("  ".join(f"{cell:{'<' if i < texts else '>'}{widths[i]}}" for i, cell in enumerate(row)) for row in rows)
    return [f"  {line}".rstrip() for line in lines]


def described(rows: Sequence[Sequence[str]], width: int = WIDTH) -> list[str]:
    """Returns the lines of a list, indented by two, whose last column holds sentences, wrapped to the width.

    Example:
        >>> described([("batch", "64", "every batch is full"), ("device", "none", "no GPU")], width=30)
        ['  batch   64    every batch is', '                full', '  device  none  no GPU']
    """
    longest = width * 2 // 5  # a longer cell would leave too little for the sentences beside it
    columns = list(zip(*rows, strict=True))[:-1]
    widths = [max((len(cell) for cell in column if len(cell) <= longest), default=0) for column in columns]
    margin = " " * (2 + sum(widths) + 2 * len(widths))
    lines = []
    for *cells, sentence in rows:
        begin = "".join(["  ", *(f"{cell:<{size}}  " for cell, size in zip(cells, widths, strict=True))])
        if len(begin) > len(margin) or not sentence:
            lines.append(begin.rstrip())
            begin = margin
        lines += _filled(sentence, width, begin, margin)
    return lines


def wrapped(text: str, width: int = WIDTH) -> str:
    """Breaks long lines of prose between words. Indented lines stay as they are.

    A command to paste, at the end of a line and after a colon, stays whole on a line of its own.

    Example:
        >>> print(wrapped("Found no Ray. Run: pip install 'tfopt[ray]'", width=10))
        Found no
        Ray. Run:
        pip install 'tfopt[ray]'
    """
    wrapped_lines: list[str] = []
    for line in re.sub(f": ({_COMMAND})", r":\n\1", text).splitlines():
        whole = not line or line.startswith(" ") or re.match(_COMMAND, line)
        wrapped_lines += [line] if whole else _filled(line, width, "", "  " if line.startswith("- ") else "")
    return "\n".join(wrapped_lines)


def _filled(text: str, width: int, begin: str, margin: str) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=begin, subsequent_indent=margin, break_long_words=False, break_on_hyphens=False
    )


def percent(share: float) -> str:
    """Returns a share, 0 to 1, as a percentage."""
    if not math.isfinite(share):
        return "∞"
    return "<0.01 %" if 0 < share < 0.0001 else f"{100 * share:.3g} %"


def figure(value: float) -> str:
    """Returns a measured number with three significant digits, or all those before the decimal point.

    Example:
        >>> figure(-0.91726), figure(12345.6)
        ('−0.917', '12,346')
    """
    text = f"{value:,.0f}" if 100 <= abs(value) < 1e6 else f"{value:.3g}"
    return text.replace("-", "−", 1) if value < 0 else text


def readable_bytes(size: float) -> str:
    """Returns a size in bytes with a unit that suits it.

    Example:
        >>> readable_bytes(1536)
        '1.5 KiB'
    """
    for unit, limit in (("B", 1), ("KiB", 2**10), ("MiB", 2**20)):
        if size < 1024 * limit:
            return f"{size / limit:,.0f} B" if unit == "B" else f"{size / limit:,.1f} {unit}"
    return f"{size / 2**30:,.1f} GiB"
