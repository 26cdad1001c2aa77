"""What the graph of a step shows about its tensors: what each was computed from, and by which operations."""

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.core.framework.attr_value_pb2 import AttrValue

from tfopt.model.layers import RecordedCall

_16_BIT = (tf.float16, tf.bfloat16)
# Operations that pass on their inputs' values, or a simple function of them, element by element.
_PASSING = {
    *("Cast", "Identity", "IdentityN", "StopGradient", "PreventGradient", "EnsureShape", "CheckNumerics"),
    *("Reshape", "Squeeze", "ExpandDims", "Transpose", "Pack", "Unpack", "ConcatV2", "Split", "SplitV"),
    *("StridedSlice", "Slice", "GatherV2", "GatherNd", "Tile", "BroadcastTo", "Pad", "PadV2", "ReverseV2"),
    *("Log", "Log1p", "Neg", "ClipByValue", "Mean"),
}
# Those that do so if all other inputs are constants, or all are probabilities.
_PASSING_WITH_CONSTANTS = {"Mul", "AddV2", "Add", "Sub", "RealDiv", "Maximum", "Minimum", "SelectV2"}
_PROBABILITIES = {"Softmax": "softmax", "LogSoftmax": "log-softmax", "Sigmoid": "sigmoid"}
# What the gradient of a bias or a scale ends in. On a CPU some of them add one element after the other in their own
# dtype: 4,096 ones in bfloat16 give 256. Products and convolutions do not.
_SUMS = {"BiasAddGrad", "Sum", "Mean", "UnsortedSegmentSum", "DepthwiseConv2dNativeBackpropFilter"}
_BEHIND_SUMS = {"Cast", "Identity", "Reshape", "RealDiv"}
_ALIKE = 0.05
# For a size that the graph does not know, up to as many numbers.
_ROWS = 4096
_MOST = 2**28


class Origin(NamedTuple):
    """The computation of one recorded tensor from the recorded tensors before it."""

    tensor: tf.Tensor
    layer: Any
    """The layer that computes it; if it is computed between layers, the one that takes it."""
    is_input: bool
    """Whether the layer takes it."""
    sources: list[tf.Tensor]
    operations: list[tf.Operation]
    """Those in between."""
    makers: list[Any]
    """The layers that made the sources."""
    is_data: bool
    """Whether it is computed from the batch alone, without a variable."""

    @property
    def is_cast(self) -> bool:
        """Whether the layer that takes it only casts it."""
        return self.is_input and all(op.type in ("Cast", "Identity") for op in self.operations)

    @property
    def computes_in_16_bits(self) -> bool:
        """Whether 16 bits are more than handed on."""
        made = [op.outputs[0].dtype for op in self.operations if op.outputs and op.type not in _PASSING | {"Const"}]
        return any(dtype in _16_BIT for dtype in made)

    @property
    def is_first_step(self) -> bool:
        """Whether an RNN's cell takes it, which has a `state_size`: only the first step is outside of the loop."""
        return self.is_input and bool(self.sources) and hasattr(self.layer, "state_size")

    @property
    def makes_integers(self) -> bool:
        """Whether floats are cast to integers, as ids are."""
        casts = [op for op in self.operations if op.type == "Cast"]
        return any(op.inputs[0].dtype.is_floating and op.outputs[0].dtype.is_integer for op in casts)

    @property
    def constants(self) -> list[float]:
        """Of each of its constants in floating point the smallest and the largest number, by magnitude."""
        found: list[float] = []
        for op in self.operations:
            if op.type == "Const" and op.outputs[0].dtype.is_floating:
                size = op.outputs[0].shape.num_elements()
                values = tf.get_static_value(op.outputs[0]).astype("float64").ravel() if size else np.zeros(0)
                values = values[np.isfinite(values) & (values != 0)]
                found += [float(values[at]) for at in np.argsort(np.abs(values))[[0, -1]]] if values.size else []
        return found


def origins(calls: Sequence[RecordedCall]) -> list[Origin]:
    """The origin of each tensor that recorded calls take or return."""
    made = _makers(calls)
    known = {id(tensor) for call in calls for tensor in call.inputs + call.outputs}
    found: dict[int, Origin] = {}
    for call in calls:
        for is_input, tensors in ((True, call.inputs), (False, call.outputs)):
            for tensor in tensors:
                if id(tensor) not in found and not (is_input and id(tensor) in made):
                    sources, operations = _stretch(tensor, known)
                    makers = [made[id(one)].layer for one in sources if id(one) in made]
                    found[id(tensor)] = Origin(tensor, call.layer, is_input, sources, operations, makers, False)
    learned = {key for key, one in found.items() if _reads_variable(one.operations)}
    before = -1
    while len(learned) > before:  # calls end in another order than they compute
        before = len(learned)
        learned |= {key for key, one in found.items() if not learned.isdisjoint(map(id, one.sources))}
    return [one._replace(is_data=key not in learned) for key, one in found.items()]


def _reads_variable(operations: Iterable[tf.Operation]) -> bool:
    return any(one.dtype == tf.resource for op in operations for one in op.inputs)


def _makers(calls: Sequence[RecordedCall]) -> dict[int, RecordedCall]:
    made: dict[int, RecordedCall] = {}
    for call in calls:
        for tensor in call.outputs:
            made.setdefault(id(tensor), call)  # of nested calls, the innermost ends first
    return made


def _stretch(tensor: tf.Tensor, known: Collection[int]) -> tuple[list[tf.Tensor], list[tf.Operation]]:
    """Walks from a tensor back to the nearest known ones, given by id; returns those and the operations between."""
    sources: dict[int, tf.Tensor] = {}
    operations = {tensor.op: None}
    waiting = [*tensor.op.inputs]
    while waiting:
        one = waiting.pop()
        if id(one) in known:
            sources[id(one)] = one
        elif one.op not in operations:
            operations[one.op] = None
            waiting += one.op.inputs
    return [*sources.values()], [*operations]


def may_be_of_16_bits(tensor: tf.Tensor) -> bool:
    """Whether a tensor is one of 16 bits or what a cast makes of one, as far as its graph shows."""
    op = tensor.op
    if op.type in ("Cast", "Identity") and tensor.dtype not in _16_BIT:
        return may_be_of_16_bits(op.inputs[0])
    # A variable that was assigned, a branch or a loop show nothing.
    return tensor.dtype in _16_BIT or any(one.dtype == tf.resource for one in op.inputs)


class Probability(NamedTuple):
    """A softmax, sigmoid or the like in 16 bits whose result becomes a model output."""

    kind: str
    dtype: str
    layer: Any
    """The layer whose call computes it, or None if that is the model itself."""
    before: list[Any]
    """If it is computed between layers, those that made its input."""


def late_casts(outputs: Iterable[tf.Tensor], calls: Sequence[RecordedCall]) -> list[Probability]:
    """The probabilities in 16 bits behind a model's outputs, found through operations that only hand values on."""
    made = _makers(calls)
    found: list[Probability] = []
    seen: set[int] = set()
    waiting: list[tuple[_Place, RecordedCall | None]] = [(_Place(output), None) for output in outputs]
    while waiting:
        place, call = waiting.pop()
        tensor = place.tensor
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        call = made.get(id(tensor), call)
        if call and any(tensor is one for one in call.inputs):
            call = None  # computed before the call
        kind = _probability(tensor)
        if kind and tensor.dtype in _16_BIT:
            between = call is None or bool(call.layer._layers)
            before = [made[id(one)].layer for one in _stretch(place.outermost, made)[0]] if between else []
            found.append(Probability(kind, tensor.dtype.name, call.layer if call else None, before))
        elif not kind:
            waiting += [(one, call) for one in place.handed_on()]
    return found


class _Place(NamedTuple):
    """A tensor, and the function calls around it, each with the function's graph, outermost first."""

    tensor: tf.Tensor
    inside: tuple[tuple[tf.Operation, Any], ...] = ()

    @property
    def outermost(self) -> tf.Tensor:
        """The tensor, or an output of the outermost call around it."""
        return self.inside[0][0].outputs[0] if self.inside else self.tensor

    def handed_on(self) -> "list[_Place]":
        """The tensors whose values are passed on by the operation that made this one."""
        op, index = self.tensor.op, self.tensor.value_index
        if op.type in ("PartitionedCall", "StatefulPartitionedCall"):
            body = op.graph._get_function(op.get_attr("f").name).graph
            return [_Place(body.outputs[index], (*self.inside, (op, body)))]
        if op.type == "Placeholder" and self.inside:
            *outer, (caller, body) = self.inside
            at = next(at for at, one in enumerate(body.inputs) if one is self.tensor)
            return [_Place(caller.inputs[at], tuple(outer))]
        inputs = [one for one in op.inputs if one.dtype.is_floating]
        if op.type == "IdentityN":
            inputs = [op.inputs[index]]
        elif op.type in _PASSING_WITH_CONSTANTS:
            inputs = [one for one in inputs if not _is_constant(one)]
            if len(inputs) > 1 and not all(_Place(one, self.inside)._is_probability() for one in inputs):
                inputs = []
        elif op.type not in _PASSING:
            inputs = []
        return [_Place(one, self.inside) for one in inputs]

    def _is_probability(self) -> bool:
        return bool(_probability(self.tensor) or [one for one in self.handed_on() if one._is_probability()])


def _probability(tensor: tf.Tensor) -> str | None:
    """What a tensor is if its operation makes probabilities or their logarithms."""
    op = tensor.op
    if op.type == "RealDiv":  # exp(x) / sum(exp(x)), 1 / (1 + exp(-x))
        above, below = op.inputs[0].op, op.inputs[1].op
        inner = [*below.inputs] if below.type in ("Sum", "AddV2") else []
        if "Exp" in (above.type, *(one.op.type for one in inner)):
            return "softmax"
    return _PROBABILITIES.get(op.type)


def _is_constant(tensor: tf.Tensor) -> bool:
    op = tensor.op
    return op.type == "Const" or (op.type in ("Cast", "Identity", "Reshape") and _is_constant(op.inputs[0]))


def sums_of(gradient: tf.Tensor) -> list[tf.Operation]:
    """The sums in 16 bits that a gradient is made of."""
    op = gradient.op
    if op.type in _SUMS and gradient.dtype in _16_BIT:
        return [op]
    parts = op.inputs[:1] if op.type in _BEHIND_SUMS else op.inputs if op.type in ("AddN", "AddV2") else ()
    return [one for part in parts for one in sums_of(part)]


def in_float32(op: tf.Operation) -> tf.Tensor:
    """The same sum of the same tensors, in float32."""
    return _made_like(op, [tf.cast(x, tf.float32) if x.dtype in _16_BIT else x for x in op.inputs], tf.float32)


def right_with_xla(op: tf.Operation) -> bool:
    """Whether XLA, on this device, sums ones as float32 does; False if it is not known."""
    known = [tf.get_static_value(x) if x.dtype not in _16_BIT else x.shape.rank for x in op.inputs]
    if any(x is None for x in known):
        return False
    unknown = [x.shape for x in op.inputs if x.dtype in _16_BIT and not x.shape.is_fully_defined()]
    if any(math.prod(size or _ROWS for size in shape) > _MOST for shape in unknown):
        return False
    data = [
        tf.ones([size or _ROWS for size in x.shape], x.dtype) if x.dtype in _16_BIT else value
        for x, value in zip(op.inputs, known, strict=True)
    ]
    summed = tf.function(lambda *data: _made_like(op, data, op.outputs[0].dtype), jit_compile=True, autograph=False)
    plain = tf.function(lambda *data: in_float32(_made_like(op, data, op.outputs[0].dtype).op), autograph=False)
    try:
        found, right = (tf.cast(one(*data), tf.float32).numpy() for one in (summed, plain))
    except tf.errors.OpError:
        return False
    return bool(np.linalg.norm(found - right) <= _ALIKE * np.linalg.norm(right))


def _made_like(op: tf.Operation, inputs: Iterable[tf.Tensor], dtype: tf.DType) -> tf.Tensor:
    attributes = {name: value for name, value in op.node_def.attr.items() if not name.startswith("_")}
    attributes["T"] = AttrValue(type=dtype.as_datatype_enum)
    graph = tf.compat.v1.get_default_graph()
    return graph.create_op(op.type, [*inputs], [dtype], attrs=attributes).outputs[0]
