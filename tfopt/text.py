"""Formats names and figures: lists cut short, tables, and results as a console and a notebook show them."""

import html
import math
from collections.abc import Sequence


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
    """Returns the lines of a table, indented by two.

    Args:
        rows: The cells, headings included; all rows have the same length.
        texts: How many leading columns hold text, aligned left; the others are aligned right.

    Example:
        >>> aligned([("stage", "busy"), ("decode", "9 %")], texts=1)
        ['  stage   busy', '  decode   9 %']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(f"{cell:{'<' if i < texts else '>'}{widths[i]}}" for i, cell in enumerate(row)) for row in rows)
    return [f"  {line}".rstrip() for line in lines]


def percent(share: float) -> str:
    """Returns a share, 0 to 1, as a percentage."""
    if not math.isfinite(share):
        return "∞"
    return "<0.01 %" if 0 < share < 0.0001 else f"{100 * share:.3g} %"


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
