"""The search beside trying every assignment."""

import itertools
import random

import pytest
from quick import first_quick

from tfopt.precision.per_layer.search import LayerFacts, fastest


def cost(known, cast_ms, choice):
    """Milliseconds and error of a choice, counted in the plainest way."""
    dtypes = {None: False} | dict(enumerate(choice))
    ms = sum(layer.ms[half] for layer, half in zip(known, choice, strict=True))
    casts = sum(
        n for at, layer in enumerate(known) for source, n in layer.links.items() if dtypes[source] != dtypes[at]
    )
    error = sum(layer.error**2 for layer, half in zip(known, choice, strict=True) if half) ** 0.5
    return ms + cast_ms * casts, error


def planted(seed, count=9):
    """Layers with random times, errors and links: chains with skips, some kept in float32."""
    draw = random.Random(seed)
    known = []
    for at in range(count):
        before = [None if at == 0 else at - 1] + [draw.randrange(at) for _ in range(draw.randrange(3)) if at > 1]
        links = {source: draw.randrange(1, 100) for source in before}
        ms = draw.uniform(1, 10)
        facts = LayerFacts((ms, ms * draw.uniform(0.4, 1.3)), draw.uniform(0.001, 0.08), draw.random() < 0.2, links)
        known.append(facts)
    return known


@pytest.mark.parametrize("seed", first_quick(range(40), 5))
def test_the_search_finds_what_trying_everything_finds(seed):
    known = planted(seed)
    for cast_ms, tolerance in itertools.product((0.0, 0.01, 0.1), (0.0, 0.05, 0.1, 1.0)):
        choices = itertools.product((False, True), repeat=len(known))
        allowed = [c for c in choices if not any(half and its.fixed for half, its in zip(c, known, strict=True))]
        found = {c: cost(known, cast_ms, c) for c in allowed}
        best = min(ms for ms, error in found.values() if error <= tolerance)
        chosen = fastest(known, cast_ms, tolerance)
        assert found[chosen][0] == pytest.approx(best)
        assert found[chosen][1] <= tolerance


def test_many_layers_are_searched_within_the_tolerance():
    known = planted(1, count=60)
    chosen = fastest(known, 0.01, 0.2)
    ms, error = cost(known, 0.01, chosen)
    assert error <= 0.2
    # Nothing is gained by changing a single layer.
    for at, layer in enumerate(known):
        other = (*chosen[:at], not chosen[at], *chosen[at + 1 :])
        other_ms, other_error = cost(known, 0.01, other)
        assert layer.fixed or other_error > 0.2 or other_ms > ms - 0.5


@pytest.mark.parametrize(("cast_ms", "half"), [(0.004, True), (0.006, False)])
def test_a_layer_between_two_of_float32_pays_for_two_casts(cast_ms, half):
    kept = LayerFacts((1.0, 1.0), 0.0, True, {None: 100})
    gains_one_ms = LayerFacts((3.0, 2.0), 0.01, False, {0: 100})
    known = [kept, gains_one_ms, kept._replace(links={1: 100})]
    assert fastest(known, cast_ms, 0.1) == (False, half, False)
