"""What a run says on standard error while it measures: a bar with the time left, and lines above it."""

import sys
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

import rich.progress
from rich.console import Console, RenderableType

from tfopt.text import wrapped

_UNITS = {"h": 3600, "min": 60}


class Progress:
    """A bar that moves with the time; without a terminal, a line for each case.

    Estimates the time left from how long these cases take on two CPU cores, scaled by how much longer the finished ones
    took here.

    Args:
        seconds: What the run is expected to take.
        at_most: What it may take.
        clock: Seconds, monotonic.
        console: Where it is shown.
    """

    def __init__(
        self,
        seconds: float,
        *,
        at_most: float,
        clock: Callable[[], float] = time.monotonic,
        console: Console | None = None,
    ):
        self._console = console or Console(file=sys.stderr)
        self._clock, self._started = clock, clock()
        self._at_most = at_most
        self._left = seconds  # of cases that are not done, as on two cores
        self._now = 0.0  # of the case under way
        self._began = self._started
        self._done = self._took = 0.0  # seconds of the cases that are done: expected, and taken
        self._title = ""
        self._bar = _Bar(self)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def say(self, line: str) -> None:
        """Prints a line, wrapped to the terminal, above the bar."""
        self._console.print(wrapped(line, self._console.width), markup=False, highlight=False, soft_wrap=True)

    def plan(self, seconds: Iterable[float]) -> float:
        """Notes how long the cases that are left are expected to take, now that they are known. Returns the sum."""
        self._left = sum(seconds)
        return self._left

    def start(self, title: str, seconds: float) -> None:
        """Begins a case; the one before is done."""
        self._end_case()
        self._title, self._now, self._began = title, seconds, self._clock()
        self._bar.describe(title)
        if not self._console.is_terminal:
            self.say(f"{title} … {self.time_left()}")

    def tick(self, variant: str) -> None:
        """Notes that a part of the case is done."""
        self._bar.describe(f"{self._title}: {variant}")

    def _end_case(self) -> None:
        if self._now:
            self._left -= self._now
            self._done += self._now
            self._took += self._clock() - self._began
            self._now = 0.0

    @property
    def pace(self) -> float:
        """How many times as long as expected the cases that are done took."""
        return self._took / self._done if self._done else 1.0

    def seconds_left(self) -> float:
        """Seconds until the end of the run."""
        pace = self.pace
        elapsed, here = self._clock() - self._started, self._clock() - self._began
        left = pace * self._left - min(here, 0.9 * pace * self._now if self._now else here)
        return max(0.0, min(left, self._at_most - elapsed))

    def share(self) -> float:
        """The share of the run that is over, from 0 to 1."""
        elapsed = self._clock() - self._started
        return elapsed / max(elapsed + self.seconds_left(), 1e-9)

    def time_left(self) -> str:
        """The time left, in words. A case that takes longer than expected leaves at least that."""
        late = self._now and self._clock() - self._began > 0.9 * self.pace * self._now
        left = f"{duration(self.seconds_left())} left"
        return left.replace("about", "at least") if late else left


def duration(seconds: float) -> str:
    """A length of time in words, such as "about 4 min"."""
    for unit, size in _UNITS.items():
        if seconds >= 1.5 * size:
            return f"about {seconds / size:.0f} {unit}"
    return f"about {max(5, 5 * round(seconds / 5))} s"


class _Bar(rich.progress.Progress):
    """The bar. It asks how far the run is each time it is drawn, a few times a second."""

    def __init__(self, progress: Progress):
        self._run = progress
        super().__init__(
            rich.progress.BarColumn(bar_width=20),
            rich.progress.TextColumn("{task.fields[left]}"),
            rich.progress.TextColumn("· {task.description}"),
            console=progress._console,
            transient=True,
            refresh_per_second=4,
        )
        self._task = self.add_task("loading TensorFlow", total=1.0, left=progress.time_left())

    def describe(self, text: str) -> None:
        """Says what is under way."""
        self.update(self._task, description=text)

    def get_renderables(self) -> Iterable[RenderableType]:
        """What is drawn."""
        if self.tasks:
            self.update(self._task, completed=self._run.share(), left=self._run.time_left())
        return super().get_renderables()
