"""A progress bar on standard error, or a line for each case where that is no terminal."""

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar


class Progress:
    """Counts ticks of cases up to a total.

    Args:
        total: Ticks of all cases together.
    """

    def __init__(self, total: int):
        self._console = Console(file=sys.stderr)
        columns = [
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
        ]
        self._bar = Bar(*columns, console=self._console, transient=True, disable=not self._console.is_terminal)
        self._task = self._bar.add_task("starting", total=total)
        self._case = ""
        self._end = 0.0

    def start(self, case: str, ticks: int) -> None:
        """A case begins; what is missing of the one before (it failed) is skipped."""
        self._case = case
        self._bar.update(self._task, completed=self._end, description=case)
        self._end += ticks
        if not self._console.is_terminal:
            self._console.print(f"{case} …", highlight=False)

    def tick(self, variant: str) -> None:
        """A part of the case was done."""
        self._bar.update(self._task, advance=1, description=f"{self._case}: {variant}")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.stop()
