"""What the terms of a loss are, as read from its graph: divided among the replicas, sums over examples, or neither."""

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

DIVIDED = "divided"
"""A term that was divided by the number of replicas, whose gradients are summed."""
SUMMED = "summed"
"""A sum over a replica's examples, times constants: over all replicas it is the sum over all examples."""
UNDIVIDED = "undivided"
"""Any other term: a mean over a replica's examples, or of weights alone."""

_PRODUCTS = ("Mul", "MulNoNan", "RealDiv", "DivNoNan", "MatMul", "BatchMatMulV2", "Einsum")
_QUOTIENTS = ("RealDiv", "DivNoNan")
_LINEAR = (
    *("Identity", "IdentityN", "Cast", "Reshape", "Squeeze", "ExpandDims", "Neg", "AddV2", "Add", "AddN", "Sub"),
    *("Pack", "ConcatV2", "StridedSlice", "GatherV2", "Unpack", "Sum", "Mean", "Select", "SelectV2"),
    *("CheckNumerics", "EnsureShape", "BroadcastTo", "PreventGradient"),
)
_FUNCTIONS = ("f", "then_branch", "body")  # attributes of operations that call a function


class _Part(NamedTuple):
    """What is known of a tensor."""

    terms: frozenset[str] = frozenset()
    """Kinds of the terms through which it depends on the weights; empty for a constant."""
    of_data: bool = False
    """Whether it depends on the batch, or on random numbers."""
    sizes: frozenset[int] = frozenset()
    """Of a sum over examples, where known: how many it has added up, by which it would become a mean."""
    by_replicas: bool = False
    """Whether a constant has the number of replicas as a factor."""


class Terms:
    """Kinds of the terms of losses in a graph.

    Args:
        known: Tensors of a kind that was noted when they were computed, and their kinds.
        shared: Tensors that are the same in all replicas, since they were reduced over them.
        weights: Variables that the loss is differentiated for.
        examples: Examples in a replica's batch; None if the graph does not say.
        replicas: The number by which the step itself may divide; None if it has not asked for the number of replicas.
    """

    def __init__(
        self,
        known: Iterable[tuple[Any, str]],
        shared: Iterable[Any] = (),
        *,
        weights: Iterable[Any] = (),
        examples: int | None = None,
        replicas: int | None = None,
    ):
        known = [(tensor, kind) for tensor, kind in known if hasattr(tensor, "graph")]
        self._graphs = [tensor.graph for tensor, kind in known if kind == DIVIDED]
        self._known = {id(tensor): _Part(frozenset([kind]), True) for tensor, kind in known}
        self._shared = {id(tensor) for tensor in shared}
        self._handles = {id(variable.handle) for variable in weights}
        self._examples, self._replicas = examples, replicas
        self._parts: dict[int, _Part] = {}

    def of(self, loss: Any) -> frozenset[str]:
        """Returns the kinds of the terms of a loss; one that is not a scalar counts as its sum."""
        for operation in self._needed(loss):
            inputs = [self._part(tensor) for tensor in operation.inputs]
            for index, output in enumerate(operation.outputs):
                part = self._combined(operation, inputs, index)
                self._parts[id(output)] = part._replace(of_data=False) if id(output) in self._shared else part
        part = self._part(loss)
        return (self._total(part, loss) if loss.shape.rank else part).terms

    def _part(self, tensor: Any) -> _Part:
        return self._known.get(id(tensor)) or self._parts[id(tensor)]

    def _needed(self, loss: Any) -> list[Any]:
        """What a tensor is computed from, in order."""
        found: dict[Any, int] = {}
        left = [loss]
        while left:
            tensor = left.pop()
            if id(tensor) not in self._known and id(tensor) not in self._parts and tensor.op not in found:
                found[tensor.op] = tensor.op._id
                left.extend(tensor.op.inputs)
        return sorted(found, key=found.__getitem__)

    def _combined(self, operation: Any, inputs: list[_Part], output: int) -> _Part:
        kind, tensor = operation.type, operation.outputs[output]
        if kind == "Placeholder":
            return self._given(tensor)
        of_data = any(part.of_data for part in inputs) or "Random" in kind or not (inputs or kind == "Const")
        by_replicas = kind in ("Cast", "Mul", "Identity", "Reshape") and any(part.by_replicas for part in inputs)
        if kind == "Const":
            by_replicas = self._replicas is not None and _number(tensor) == self._replicas
        if kind == "StopGradient" or not (tensor.dtype.is_floating or tensor.dtype.is_complex):
            return _Part(of_data=of_data, by_replicas=by_replicas)
        if any(name in operation.node_def.attr for name in _FUNCTIONS):
            terms = frozenset().union(*(part.terms for part in inputs))
            elsewhere = any(graph is not tensor.graph for graph in self._graphs)  # it may have been divided inside
            kind = DIVIDED if elsewhere or terms == {DIVIDED} else UNDIVIDED
            return _Part(frozenset([kind] if terms else []), of_data)
        if kind in _PRODUCTS:
            return self._product(operation, inputs)._replace(of_data=of_data, by_replicas=by_replicas)
        parts = [inputs[output]] if kind == "IdentityN" else inputs
        together = _Part(
            frozenset().union(*(part.terms for part in parts)),
            of_data,
            frozenset().union(*(part.sizes for part in parts)),
            by_replicas,
        )
        if kind in ("Sum", "L2Loss"):
            axes: Any = tf.get_static_value(operation.inputs[1]) if kind == "Sum" else 0
            first = axes is None or 0 in np.ravel(axes)
            return self._total(together, operation.inputs[0]) if first else together
        return together if kind in _LINEAR else together._replace(terms=_nonlinear(together.terms))

    def _given(self, tensor: Any) -> _Part:
        """What an input of the graph is: a weight, another variable, or a part of the batch."""
        captured = True
        while captured and hasattr(tensor, "op"):
            outer = {id(inside): outside for outside, inside in getattr(tensor.graph, "captures", ())}
            captured = id(tensor) in outer
            tensor = outer.get(id(tensor), tensor)
        is_weight = id(tensor) in self._handles
        return _Part(frozenset([UNDIVIDED]) if is_weight else frozenset(), tensor.dtype != tf.resource and not captured)

    def _total(self, part: _Part, values: Any) -> _Part:
        """The sum over the first axis of values: over the examples, if that is theirs."""
        rank = values.shape.rank
        size = values.shape[0] if rank else None
        of_examples = rank != 0 and (size is None or (self._examples and size % self._examples == 0))
        if not part.of_data or not of_examples or UNDIVIDED not in part.terms:
            return part
        sizes = self._examples, size, values.shape.num_elements() if rank else None
        known = frozenset(size for size in sizes if size is not None)
        return part._replace(terms=part.terms - {UNDIVIDED} | {SUMMED}, sizes=known)

    def _product(self, operation: Any, inputs: list[_Part]) -> _Part:
        varying = [part for part in inputs if part.terms]
        divides = operation.type in _QUOTIENTS
        if not varying:
            return _Part()
        if len(varying) > 1 or (divides and not inputs[0].terms):
            divided = [part for part in varying if DIVIDED in part.terms]
            linear = divided == inputs[:1] if divides else len(divided) == 1
            if linear and divided[0].terms == {DIVIDED}:
                return _Part(frozenset([DIVIDED]))
            return _Part(_nonlinear(frozenset().union(*(part.terms for part in varying))))
        part = varying[0]
        place = 1 - inputs.index(part) if len(inputs) == 2 else None
        if place is None or operation.type not in _PRODUCTS[:4]:
            return part._replace(terms=_mixed(part.terms))
        factor, value = inputs[place], _number(operation.inputs[place])
        if value == 0 and not divides:
            return _Part()
        terms, divisor = part.terms, value if divides else 1 / value
        if DIVIDED in terms and not divides and value == self._replicas:
            return part._replace(terms=terms - {DIVIDED} | {UNDIVIDED})
        if self._replicas and UNDIVIDED in terms and (divisor == self._replicas or (divides and factor.by_replicas)):
            terms = terms - {UNDIVIDED} | {DIVIDED}
        if SUMMED in terms and (factor.of_data or any(math.isclose(divisor, size) for size in part.sizes)):
            terms = terms - {SUMMED} | {DIVIDED if divides and factor.by_replicas else UNDIVIDED}
        return part._replace(terms=terms)

    def undivided_at(self, loss: Any) -> str:
        """Returns the user's line that computes an undivided term of a loss, after `of` has found one."""
        while loss.op.type in (*_LINEAR, *_PRODUCTS):
            parts = [tensor for tensor in loss.op.inputs if UNDIVIDED in self._part(tensor).terms]
            if not parts:
                break
            loss = parts[-1]
            if loss.op.type == "Mean":
                break
        for frame in reversed(loss.op.traceback):
            own = any(f"/{package}/" in frame.filename for package in ("tensorflow", "keras", "tfopt"))
            if not own and Path(frame.filename).parent != Path(os.__file__).parent:
                return f"{Path(frame.filename).name}, line {frame.lineno}"
        return f"the operation {loss.name}"


def _number(tensor: Any) -> float:
    """The constant value of a scalar, or NaN."""
    value: Any = tf.get_static_value(tensor)
    return math.nan if value is None or np.ndim(value) else float(value)


def _mixed(terms: frozenset[str]) -> frozenset[str]:
    """The kinds of such terms times unknown factors."""
    return frozenset(UNDIVIDED if kind == SUMMED else kind for kind in terms)


def _nonlinear(terms: frozenset[str]) -> frozenset[str]:
    """The kinds of a function of such terms whose gradient is not divided as they are."""
    return frozenset([UNDIVIDED] if terms else [])


def update_without(gradients: Iterable[Any], applied: Iterable[Any], noted: Iterable[Any]) -> bool:
    """Whether all gradients that update weights are known to be computed from other noted gradients than these."""
    gradients, applied, noted = map(_dense, (gradients, applied, noted))
    graphs = {id(getattr(tensor, "graph", None)) for tensor in (*gradients, *applied)}
    if not applied or len(graphs) != 1 or depends_on(applied, gradients):
        return False
    return all(depends_on([tensor], noted) for tensor in applied)


def _dense(tensors: Iterable[Any]) -> list[Any]:
    return [tensor.values if isinstance(tensor, tf.IndexedSlices) else tensor for tensor in tensors]


def depends_on(tensors: Iterable[Any], sources: Iterable[Any]) -> bool:
    """Whether tensors of a graph are computed from any of the sources."""
    wanted, seen, left = {id(source) for source in sources}, set(), list(tensors)
    while left:
        tensor = left.pop()
        if id(tensor) in wanted:
            return True
        if tensor.op not in seen:
            seen.add(tensor.op)
            left.extend(tensor.op.inputs)
    return False
