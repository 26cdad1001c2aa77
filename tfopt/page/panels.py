"""What a chart of lines shows: panels with their lines and shades, and moments to mark."""

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

    Raises:
        ValueError: If the sequences differ in length, or a number is not finite.
    """

    label: str
    """What it shows; printed at its end if a panel has several lines."""
    at: Sequence[float]
    """Times of its points in seconds, or their epochs; in order."""
    values: Sequence[float | None]
    """Values there; None (unknown) breaks the line."""

    def __post_init__(self) -> None:
        _check_columns(f"line {self.label!r}", at=self.at, values=self.values)


@dataclass(frozen=True, slots=True)
class Shade:
    """The range behind a panel's lines, from the lowest to the highest value at each place.

    Raises:
        ValueError: If the sequences differ in length, a number is not finite, or only one edge is known.
    """

    at: Sequence[float]
    """As in `Line`."""
    low: Sequence[float | None]
    """Lowest values; None where unknown."""
    high: Sequence[float | None]
    """Highest values; None where the lowest is."""

    def __post_init__(self) -> None:
        _check_columns("a shade", at=self.at, low=self.low, high=self.high)
        if any((low is None) != (high is None) for low, high in zip(self.low, self.high, strict=True)):
            raise ValueError("Expected both edges of a shade, or neither, at each place. Found: only one is None.")


@dataclass(frozen=True, slots=True)
class Panel:
    """One quantity.

    Raises:
        ValueError: If there is no line, there are more than 8, or `top` is not above 0.
    """

    title: str
    """The quantity, printed above the lines."""
    unit: str
    """What its numbers are, printed after the title."""
    lines: Sequence[Line]
    """One per device, up to 8."""
    shade: Shade | None = None
    """Drawn behind the lines."""
    text: str = ""
    """A summary, such as the mean; printed above the lines, on the right."""
    top: float | None = None
    """End of the axis, such as 100 for percent; larger values are drawn at the edge (say so in `text`). None: above the
    largest value."""
    tick_unit: str = ""
    """The unit, printed after the highest tick."""
    from_zero: bool = True
    """Whether the axis begins at 0 however small the differences are. Otherwise it begins just below the smallest
    value, unless that is near 0."""
    group: str = ""
    """What it has in common with the panels beside it; printed above the first of them."""
    logarithmic: bool = False
    """Whether equal distances are equal ratios. Ignored unless all values are above 0."""

    def __post_init__(self) -> None:
        if not 1 <= len(self.lines) <= MOST_LINES:
            raise ValueError(
                f"Expected 1 to {MOST_LINES} lines in panel {self.title!r}. Received: {len(self.lines)}. "
                "Where there are more, draw the median with a shade from the lowest to the highest."
            )
        if self.top is not None and not (math.isfinite(self.top) and self.top > 0):
            raise ValueError(f"Expected top of panel {self.title!r} to be above 0. Received: {self.top}.")


@dataclass(frozen=True, slots=True)
class Marks:
    """Moments of one kind, drawn in every panel.

    Raises:
        ValueError: If a moment is not finite, or the kind is unknown.
    """

    label: str
    """What they are, printed in the key."""
    at: Sequence[float]
    """As in `Line`."""
    kind: Kind = "note"
    """How they are drawn: "division", a thin line; "note", a triangle; "alarm", a diamond on a line."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise unknown_name("kind of mark", self.kind, get_args(Kind))
        for number in self.at:
            if not math.isfinite(number):
                raise ValueError(f"Expected finite numbers as places of {self.label!r}. Received: {number}.")


def _check_columns(what: str, **columns: Sequence[float | None]) -> None:
    if len({len(column) for column in columns.values()}) != 1:
        lengths = ", ".join(f"{len(column)} {name}" for name, column in columns.items())
        raise ValueError(f"Expected all columns to have the same length in {what}. Received: {lengths}.")
    for name, column in columns.items():
        for number in column:
            if number is not None and not math.isfinite(number):
                raise ValueError(
                    f"Expected finite numbers as {name} of {what}. Received: {number}. Use None for unknown values."
                )
