"""How often the body of a loop in a graph runs."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf

from tfopt.internals.graphs import FuncGraph
from tfopt.model.graph_shapes import Known, ShapedGraph, TracedGraph, origin


class Counter(NamedTuple):
    """A loop variable that grows by the same number in each trip."""

    start: int
    step: int


def unchanged_variables(body: FuncGraph) -> list[bool]:
    """For each variable of a loop, whether its body only passes it on."""
    return [origin(after) is before for before, after in zip(body.inputs, body.outputs, strict=True)]


def counters(body: FuncGraph, variables: Sequence[Known]) -> dict[int, Counter]:
    """The variables of a loop that count, by their place."""
    found = {}
    for place, (before, after, known) in enumerate(zip(body.inputs, body.outputs, variables, strict=True)):
        made = origin(after).op
        if known.value is None or known.value.size != 1 or made.type not in ("Add", "AddV2", "Sub"):
            continue
        first, second = map(origin, made.inputs)
        if first is not before and made.type != "Sub":
            first, second = second, first
        step = tf.get_static_value(second) if first is before else None
        if step is not None and step.size == 1:
            found[place] = Counter(int(known.value), int(step) * (-1 if made.type == "Sub" else 1))
    return found


def trips(condition: FuncGraph, counting: Mapping[int, Counter], variables: Sequence[Known]) -> int | None:
    """How often a loop's condition holds; None if that depends on more than counters and known limits.

    Args:
        condition: The condition's graph.
        counting: The variables that count.
        variables: All variables, with values where they never change.
    """
    traced = TracedGraph(condition)
    shaped = ShapedGraph(traced, variables)
    given = {tensor.op.name for tensor in condition.inputs}
    shaped.add_nodes([name for name in traced.sources_of([condition.outputs[0].op.name]) if name not in given])
    places = {id(tensor): place for place, tensor in enumerate(condition.inputs)}

    def holds(test: tf.Tensor) -> int | None:
        made = origin(test).op
        if made.type == "LogicalAnd":
            both = [holds(part) for part in made.inputs]
            known = [number for number in both if number is not None]
            return min(known) if len(known) == 2 else None
        if made.type not in _COMPARISONS:
            return None
        counter, limit = map(origin, made.inputs)
        kind = made.type
        if places.get(id(counter), -1) not in counting:
            counter, limit, kind = limit, counter, _MIRRORED[kind]
        place, bound = places.get(id(counter), -1), shaped.known(limit).value
        if place not in counting or bound is None or bound.size != 1:
            return None
        return _until(counting[place], kind, int(bound))

    return holds(condition.outputs[0])


_MIRRORED = {"Less": "Greater", "Greater": "Less", "LessEqual": "GreaterEqual", "GreaterEqual": "LessEqual"}
_MIRRORED["NotEqual"] = "NotEqual"
_COMPARISONS = tuple(_MIRRORED)


def _until(counter: Counter, kind: str, bound: int) -> int | None:
    """How often a counter compares as `kind` says with a bound; None if for ever."""
    if kind == "NotEqual":
        times, rest = divmod(bound - counter.start, counter.step) if counter.step else (-1, 0)
        return times if times >= 0 and rest == 0 else None
    sign = 1 if kind.startswith("Less") else -1
    distance, step = sign * (bound - counter.start), sign * counter.step
    distance += kind.endswith("Equal")  # ≤ 9 is < 10
    if distance <= 0:
        return 0
    return math.ceil(distance / step) if step > 0 else None
