"""The results as a table in a terminal."""

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tfopt.bench import words

WIDTH = 120
"""Columns, whatever the terminal, so that a file or a README always gets the same table."""

_TITLE, _TITLE_BESIDE_MEMORY = 36, 28


def render(document: dict[str, Any], width: int = WIDTH) -> str:
    """The table and the sentences around it, as plain text.

    Args:
        document: A results document.
        width: Columns to fill at most.
    """
    console = Console(width=width, color_system=None, force_terminal=False, highlight=False, markup=False)
    with console.capture() as capture:
        console.print(f"tfopt-bench on {words.device(document)}")
        console.print(_table(document))
        console.print(words.lead(document))
        for case in document["cases"]:
            for sentence in words.sentences(case):
                console.print(sentence)
        console.print(
            "ms a step: median [95 % interval]. Speed: the baseline's time over the variant's, turn by turn. "
            f"Status: {document['status']}."
        )
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def _table(document: dict[str, Any]) -> Table:
    with_memory = words.has_memory([variant for case in document["cases"] for variant in case["variants"]])
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=with_memory)
    table.add_column("Variant", no_wrap=True)
    table.add_column("ms a step", justify="right")
    table.add_column("Speed", justify="right")
    if with_memory:
        table.add_column("Peak\nMiB", justify="right")
    table.add_column("Result")
    table.add_column("Verdict")
    longest = _TITLE_BESIDE_MEMORY if with_memory else _TITLE
    for position, case in enumerate(document["cases"]):
        if position:
            table.add_row()
        title, unit = f"{case['suite']}, {case['workload']}:", case["unit"]
        # No row spans columns: a long title would take their width.
        table.add_row(Text(f"{title} {unit}" if len(title) + len(unit) < longest else f"{title}\n{unit}"))
        if case["error"]:
            table.add_row("  failed", "", "", *[""] * with_memory, "", Text(case["error"]))
        for variant in case["variants"]:
            memory = [words.memory(variant)] * with_memory
            cells = (words.step_time(variant), words.speed(variant), *memory, words.check(variant))
            table.add_row(*map(Text, (f"  {words.name(variant)}", *cells, words.verdict(variant))))
    return table
