"""What a chart of lines over time is made of: panels with lines, and marks of what happened."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from tfopt.errors import unknown_name

Kind = Literal["division", "note", "alarm"]

MOST_LINES = 8


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a panel.

    Args:
        label: What it stands for, printed at its end and in the key where a panel has several lines.
        seconds: Where its points stand on the time axis, in order.
        values: How high; None where the value is unknown, which breaks the line.

    Raises:
        ValueError: The sequences have unlike lengths, or a number is not finite.
    """

    label: str
    seconds: Sequence[float]
    values: Sequence[float | None]

    def __post_init__(self) -> None:
        _check_columns(f"line {self.label!r}", seconds=self.seconds, values=self.values)


@dataclass(frozen=True, slots=True)
class Shade:
    """What a panel's lines leave out: from the lowest to the highest value at a time.

    Args:
        seconds: As in `Line`.
        low: The lowest value; None where it is unknown.
        high: The highest; None where the lowest is.

    Raises:
        ValueError: The sequences have unlike lengths, a number is not finite, or only one edge is known.
    """

    seconds: Sequence[float]
    low: Sequence[float | None]
    high: Sequence[float | None]

    def __post_init__(self) -> None:
        _check_columns("a shade", seconds=self.seconds, low=self.low, high=self.high)
        if any((low is None) != (high is None) for low, high in zip(self.low, self.high, strict=True)):
            raise ValueError("Expected both edges of a shade, or neither. Found: one of them is None at a time.")


@dataclass(frozen=True, slots=True)
class Panel:
    """One quantity.

    Args:
        title: The quantity, printed above the lines.
        unit: What its numbers are, printed behind the title.
        lines: One a device, up to 8.
        shade: Drawn behind them.
        text: What there is to say of them, such as their mean; printed at the right above the lines.
        top: Where the axis ends, as 100 for percent. What is larger is drawn at the edge; say so in `text`. None: the
            axis ends above the largest value.

    Raises:
        ValueError: There is no line, more than 8, or `top` is not above 0.
    """

    title: str
    unit: str
    lines: Sequence[Line]
    shade: Shade | None = None
    text: str = ""
    top: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= len(self.lines) <= MOST_LINES:
            raise ValueError(
                f"Expected 1 to {MOST_LINES} lines in panel {self.title!r}. Received: {len(self.lines)}. "
                "Of more lines, draw the median with a shade from the lowest to the highest."
            )
        if self.top is not None and not (math.isfinite(self.top) and self.top > 0):
            raise ValueError(f"Expected top of panel {self.title!r} to be above 0. Received: {self.top}.")


@dataclass(frozen=True, slots=True)
class Marks:
    """Moments of one kind, drawn in every panel.

    Args:
        label: What they are, printed in the key.
        seconds: When.
        kind: How they are drawn: "division", a thin line; "note", a triangle; "alarm", a diamond on a line.

    Raises:
        ValueError: A moment is not finite, or the kind is unknown.
    """

    label: str
    seconds: Sequence[float]
    kind: Kind = "note"

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise unknown_name("kind of mark", self.kind, get_args(Kind))
        for number in self.seconds:
            if not math.isfinite(number):
                raise ValueError(f"Expected finite numbers as seconds of {self.label!r}. Received: {number}.")


def _check_columns(what: str, **columns: Sequence[float | None]) -> None:
    if len({len(column) for column in columns.values()}) != 1:
        lengths = ", ".join(f"{len(column)} {name}" for name, column in columns.items())
        raise ValueError(f"Expected equally many numbers in all columns of {what}. Received: {lengths}.")
    for name, column in columns.items():
        for number in column:
            if number is not None and not math.isfinite(number):
                raise ValueError(
                    f"Expected finite numbers as {name} of {what}. Received: {number}. Give None for what is unknown."
                )
