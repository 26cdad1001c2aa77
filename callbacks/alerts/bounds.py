"""A bound that a metric shall keep."""

from dataclasses import dataclass

from tfopt.checks import number

DEFAULT_BELOW = 50.0  # the very object tells whether a caller gave a bound
_REACHABLE = "Give one that readings can reach, such as 50."
_WITH_DEFAULT = ("gpu_utilization_percent", "sm_active_percent")


@dataclass(frozen=True, slots=True)
class Bound:
    """A bound of a metric.

    Attributes:
        metric: Which.
        value: In the metric's unit.
        above: Whether what lies above it is out of bounds; otherwise what lies below.
    """

    metric: str
    value: float
    above: bool

    @property
    def margin(self) -> float:
        """How far within the bound a metric has recovered: a tenth of the bound.

        Of a percentage, half of the way to 0 or 100 if that is less: further it could not go.
        """
        tenth = abs(self.value) / 10
        if not self.metric.endswith("_percent"):
            return tenth
        return max(0.0, min(tenth, (self.value if self.above else 100 - self.value) / 2))

    def __str__(self) -> str:
        return f"at {'most' if self.above else 'least'} {self.value:g}"


def make_bound(metric: str, below: float | None, above: float | None) -> Bound:
    """Returns the one bound of a metric that a caller has given.

    Raises:
        ValueError: No bound or two; or one that is not finite.
        TypeError: One that is no number.
    """
    if below is DEFAULT_BELOW and (above is not None or metric not in _WITH_DEFAULT):
        below = None
    if (below is None) == (above is None):
        raise ValueError(
            f"Expected one bound for {metric}: below=… or above=…. Received: below={below!r}, above={above!r}. "
            "For two bounds use two alerts."
        )
    given = number("below", below, _REACHABLE) if above is None else number("above", above, _REACHABLE)
    return Bound(metric, given, above is not None)
