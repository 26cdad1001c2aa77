"""A case as a table and as bars, for whatever shows them."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from tfopt.bench import words
from tfopt.page import Bar, Table

_TONES: dict[str, Literal["baseline", "better", "worse"]] = {
    "baseline": "baseline",
    "faster": "better",
    "slower": "worse",
    "changes the result": "worse",
}


class _Column(NamedTuple):
    """`cell` gives a variant's text. Without `always` the column is left out where it is empty."""

    header: str
    align: str
    cell: Callable[[dict[str, Any]], str]
    always: bool = True


_COLUMNS = (
    _Column("Variant", "l", words.name),
    _Column("ms a step", "r", words.step_time),
    _Column("Speed", "r", words.speed),
    _Column("Of the ceiling", "r", words.of_ceiling, always=False),
    _Column("MFU %", "r", words.mfu, always=False),
    _Column("J / 1,000", "r", words.joules, always=False),
    _Column("First step", "r", lambda variant: f"{words.number(variant['step_time']['first_step_seconds'])} s"),
    _Column("Peak MiB", "r", words.memory, always=False),
    _Column("GPU", "l", words.conditions, always=False),
    _Column("Result", "l", words.check),
    _Column("Verdict", "l", words.verdict),
)


def table(case: dict[str, Any]) -> Table:
    """A row for each variant; columns of which nothing is known are left out."""
    variants = case["variants"]
    columns = [column for column in _COLUMNS if column.always or any(column.cell(variant) for variant in variants)]
    rows = [[column.cell(variant) for column in columns] for variant in variants]
    return Table([column.header for column in columns], rows, align="".join(column.align for column in columns))


def bars(case: dict[str, Any]) -> list[Bar]:
    """A bar for each variant, as long as it is fast."""
    found = []
    for variant in case["variants"]:
        comparison = variant["comparison"] or {"ratio": 1.0, "interval": (None, None)}
        low, high = comparison["interval"]
        found.append(
            Bar(
                label=variant["name"],
                value=comparison["ratio"],
                text=words.speed(variant),
                low=low,
                high=high,
                tone="baseline" if variant.get("ceiling") else _TONES.get(variant["verdict"], "unclear"),
            )
        )
    return found
