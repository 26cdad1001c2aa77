"""Which layers to put into 16 bits so that a step is fastest, given each one's times, error and links."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

# Of partial assignments. Below this the search is exact.
_BEAM = 1000


class LayerFacts(NamedTuple):
    """What the search knows of one layer."""

    ms: tuple[float, float]
    """In float32 and in 16 bits."""
    error: float
    """Its own, in 16 bits."""
    fixed: bool
    """Whether it must stay in float32."""
    links: Mapping[int | None, int]
    """Elements from each earlier layer; None stands for the data, which is float32."""


def fastest(layers: Sequence[LayerFacts], cast_ms: float, tolerance: float) -> tuple[bool, ...]:
    """Finds which layers to put into 16 bits so that all layers and the casts between them take the least time.

    The root of the sum of their squared errors stays within the tolerance. Layer by layer it keeps the partial
    assignments that could still be best: of those that give the same dtypes to all layers whose outputs are yet to be
    used, one that is both slower and less exact than another cannot. Exact while no more than `_BEAM` are left.
    """
    last = {source: place for place, layer in enumerate(layers) for source in layer.links}
    partials: list[tuple[float, float, tuple[bool, ...]]] = [(0.0, 0.0, ())]  # milliseconds, squared error, choice
    for place, layer in enumerate(layers):
        grown = []
        for ms, squares, choice in partials:
            for half in (False,) if layer.fixed else (False, True):
                casts = sum(n for source, n in layer.links.items() if half != (source is not None and choice[source]))
                error = squares + half * layer.error**2
                if error <= tolerance**2:
                    grown.append((ms + layer.ms[half] + casts * cast_ms, error, (*choice, half)))
        used = [source for source, until in last.items() if source is not None and source <= place < until]
        partials = _worth_keeping(grown, used, tolerance**2)
    return min(partials)[2]


def _worth_keeping(grown: list[Any], used: Sequence[int], limit: float) -> list[Any]:
    least: dict[tuple[bool, ...], float] = {}  # squared error of the faster ones with the same dtypes
    kept = []
    for one in sorted(grown):
        state = tuple(one[2][source] for source in used)
        if one[1] < least.get(state, math.inf):
            least[state] = one[1]
            kept.append((state, one))
    if len(kept) > _BEAM:  # the fastest for each of a hundred levels of error
        levels = {(state, math.ceil(100 * one[1] / limit) if limit else 0): one for state, one in reversed(kept)}
        return sorted(levels.values())[:_BEAM]
    return [one for _, one in kept]
