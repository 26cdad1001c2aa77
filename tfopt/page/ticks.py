"""Ticks at round numbers, times and epochs, and durations as text."""

import math
from itertools import pairwise

# A duration is shown in the largest unit of which it has at least two.
_UNITS = (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0))
_STEPS = 5  # most steps of the axis of times or epochs
# Steps that divide a day, an hour and a minute evenly; elsewhere steps are decimal.
_PARTS = {"h": (0.5, 1, 2, 3, 4, 6, 12), "min": (0.5, 1, 2, 5, 10, 15, 20, 30), "s": (1, 2, 5, 10, 15, 20, 30)}


def nice_step(span: float, most: int) -> float:
    """Returns the smallest of 1, 2 and 5 times a power of ten that divides a span into at most `most` parts."""
    exponent = math.floor(math.log10(span / most))
    steps = [float(f"{digit}e{power}") for power in (exponent, exponent + 1) for digit in (1, 2, 5)]
    return next(step for step in steps if span / step <= most * (1 + 1e-9))


def ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Returns round numbers between `low` and `high` with their text, in at most four steps; if none fit, both ends."""
    if not math.isfinite(high - low) or high - low < 1e-300:
        return [(value, f"{value:.3g}") for value in (low, high)]
    step = nice_step(high - low, 4)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [(number * step, number_text(number * step, step)) for number in range(first, last + 1)]


def logarithmic_ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Returns powers of ten with their text, in at most four steps, from exponents of ten."""
    step = max(1, math.ceil((high - low) / 4))
    powers = [10.0**exponent for exponent in range(round(low), round(high) + 1, step)]
    return [(power, number_text(power, power)) for power in powers]


def number_text(value: float, step: float) -> str:
    """Formats a tick with as many decimals as a distance of `step` needs."""
    if step < 1e-4 or abs(value) >= 1e7:
        return f"{value:.3g}".replace("e+0", "e").replace("e-0", "e-").replace("e+", "e").replace("-", "−")
    decimals = max(0, -math.floor(math.log10(step)))
    return f"{value:,.{decimals}f}".replace("-", "−")


def time_ticks(seconds: float) -> list[tuple[float, str]]:
    """Returns round times from 0 to `seconds`, with their text; the last one has the unit, seconds to days."""
    unit, size = next(((unit, size) for unit, size in _UNITS if seconds >= 2 * size), _UNITS[-1])
    span = seconds / size
    step = next((part for part in _PARTS.get(unit, ()) if span / part <= _STEPS), nice_step(span, _STEPS))
    if seconds < _STEPS:  # a few seconds in all
        step = nice_step(span, _STEPS)
    count = math.floor(span / step + 1e-9)
    texts = [f"{number * step:g}" for number in range(count)] + [f"{count * step:g}\u00a0{unit}"]
    return [(number * step * size, text) for number, text in enumerate(texts)]


def epoch_ticks(first: int, last: int) -> list[tuple[float, str]]:
    """Returns round numbers of epochs from `first` to `last` with their text, in at most five steps."""
    step = max(1, round(nice_step(last - first, _STEPS)))
    numbers = range(-(-first // step) * step, last + 1, step)
    return [(number, f"{number:,}" if place else f"epoch\u00a0{number:,}") for place, number in enumerate(numbers)]


def duration(seconds: float) -> str:
    """Returns a duration in its two largest units.

    Example:
        >>> duration(11_580)
        '3 h 13 min'
    """
    for (large, size), (small, part) in pairwise(_UNITS):
        whole, rest = divmod(round(seconds / part), round(size / part))
        if whole:
            return f"{whole}\u00a0{large}" + (f" {rest}\u00a0{small}" if rest else "")
    return f"{seconds:.1f}\u00a0s" if seconds < 9.95 else f"{seconds:.0f}\u00a0s"
