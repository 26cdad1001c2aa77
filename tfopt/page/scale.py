"""Where on a chart's width a value stands: linear from zero, or logarithmic around a reference."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

# Beyond this the shortest bar of a linear chart falls under 5 % of the longest: too short to compare.
WIDEST_LINEAR_SPREAD = 20.0


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps values to percent of the chart's width.

    Args:
        low: What stands at the left edge.
        high: What stands at the right edge, above `low`.
        origin: Where bars begin: zero, or the reference of a logarithmic scale, which has no zero.
        logarithmic: Whether equal distances are equal ratios.
    """

    low: float
    high: float
    origin: float
    logarithmic: bool

    def percent(self, value: float) -> float:
        """Returns how far from the left edge `value` stands, from 0 to 100."""
        if self.logarithmic:
            low, high, at = math.log10(self.low), math.log10(self.high), math.log10(value)
        else:
            # Divided by the largest, so that the difference of two huge values stays finite.
            largest = max(abs(self.low), abs(self.high))
            low, high, at = self.low / largest, self.high / largest, value / largest
        return min(100.0, max(0.0, 100 * (at - low) / (high - low)))


def fit_scale(values: Iterable[float], reference: float | None) -> Scale:
    """Returns the scale that holds all of `values` and the reference.

    It is linear from zero, so that a bar twice as long is a value twice as large. Where the values spread too widely
    for that it is logarithmic and bars run from the reference to either side. That takes a reference and values above
    zero; without them it stays linear: bars of a logarithmic scale without a reference would begin anywhere.
    """
    held = [*values, *([] if reference is None else [reference])]
    low, high = min(held), max(held)
    if reference is not None and low > 0 and math.log10(high) - math.log10(low) > math.log10(WIDEST_LINEAR_SPREAD):
        return Scale(low, high, origin=reference, logarithmic=True)
    low, high = min(low, 0.0), max(high, 0.0)
    return Scale(low, high if high > low else low + 1.0, origin=0.0, logarithmic=False)
