"""What a training step holds at its peak without XLA: its graph, run with the sizes of tensors in place of tensors.

It follows TensorFlow's executor: first come, first served among the operations whose inputs are there; a tensor is
freed after its last reader; a view shares its tensor's memory, and an element-wise operation takes over that of an
input nobody else reads.
"""

import collections
import re
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfopt.internals.graphs import FuncGraph
from tfopt.memory.buffers import (
    BACKWARD,
    FORWARD,
    Buffer,
    Ledger,
    Peak,
    Phases,
    TensorList,
    Value,
    Variable,
    rounded,
    share,
)
from tfopt.model.graph_loops import counters, trips, unchanged_variables
from tfopt.model.graph_shapes import Known, known_of

_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
_IFS = ("If", "StatelessIf")
_LOOPS = ("While", "StatelessWhile")
_VIEWS = re.compile(
    "Bitcast|CheckNumerics|EnsureShape|ExpandDims|Identity|IdentityN|PlaceholderWithDefault|PreventGradient|"
    "Reshape|Snapshot|Squeeze|StopGradient"
)
# Operations whose first output takes over the memory of an input of its size.
_IN_PLACE = re.compile(
    "Abs|Add|AddN|AddV2|Atan|BiasAdd|Cos|Div|DivNoNan|Elu|EluGrad|Erf|Erfc|Exp|Expm1|Floor|FloorDiv|FloorMod|"
    "FusedBatchNormV3|FusedBatchNormGradV3|LeakyRelu|LeakyReluGrad|Log|Log1p|LogSoftmax|Maximum|Minimum|Mul|"
    "MulNoNan|Neg|OnesLike|Pow|RealDiv|Reciprocal|Relu|Relu6|Relu6Grad|ReluGrad|Round|Rsqrt|RsqrtGrad|Selu|"
    "SeluGrad|Sigmoid|SigmoidGrad|Sign|Sin|Softmax|Softplus|SoftplusGrad|Softsign|SoftsignGrad|Sqrt|SqrtGrad|"
    "Square|SquaredDifference|Sub|Tan|Tanh|TanhGrad|Xdivy|Xlogy|ZerosLike"
)
# The gradient, their second output, takes over the memory of the logits.
_LOSSES = ("SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits")


def peak_of_graph(graph: FuncGraph, phases: Phases) -> Peak:
    """Runs the graph of a training step, traced for a batch of a fixed size, and returns what it holds at its peak.

    A size the trace leaves open counts as that of the largest input. Of two branches, the longer one runs. A loop whose
    trips the trace leaves open runs once for each element of the longest list it takes, which is right for the gradient
    of a loop. What an operation needs while it runs, such as cuDNN's workspace, is not known.
    """
    run = _Run(phases)
    arguments = [run.argument(tensor) for tensor in graph.inputs]
    given = run.ledger.live
    run.call(graph, arguments)
    return run.ledger.peak(given)


class _Plan:
    """A function's graph, ready to run: its operations, who reads which tensor, and who waits for whom."""

    def __init__(self, graph: FuncGraph, phases: Phases):
        self.arguments = {tensor.op for tensor in graph.inputs}
        same = _repeated(graph)
        self.outputs = [_source(tensor, same) for tensor in graph.outputs]
        self.inputs: dict[tf.Operation, list[tf.Tensor]] = {}
        self.before: dict[tf.Operation, list[tf.Operation]] = {}
        """Those that an operation waits for without taking a tensor of them."""
        waiting = [tensor.op for tensor in (*graph.inputs, *self.outputs)] + list(graph.control_outputs)
        while waiting:
            operation = waiting.pop()
            if operation not in self.inputs:
                self.inputs[operation] = [_source(tensor, same) for tensor in operation.inputs]
                self.before[operation] = [same.get(other, other) for other in operation.control_inputs]
                waiting += [tensor.op for tensor in self.inputs[operation]] + self.before[operation]
        self.operations = [operation for operation in graph.get_operations() if operation in self.inputs]
        self.readers = collections.Counter(map(id, self.outputs))
        self.followers = collections.defaultdict(list)
        self.waits: dict[tf.Operation, int] = {}
        self.phases: dict[tf.Operation, int] = {}
        self.constants: set[tf.Operation] = set()
        """Those that follow from nothing but constants."""
        for operation in self.operations:
            self.readers.update(map(id, self.inputs[operation]))
            makers = [tensor.op for tensor in self.inputs[operation]]
            self.waits[operation] = len(makers) + len(self.before[operation])
            for other in (*makers, *self.before[operation]):
                self.followers[other].append(operation)
            # A loop is older than the empty lists that its gradient has it fill, and does not follow from those.
            follows = any(self.phases.get(other) == BACKWARD for other in makers)
            self.phases[operation] = max(phases.named(operation.name), BACKWARD if follows else FORWARD)
            if operation not in self.arguments and not operation._is_stateful and self.constants.issuperset(makers):
                self.constants.add(operation)


class _Run:
    """A run of a graph. Each value that is passed on brings one reference along, which its receiver gives back."""

    def __init__(self, phases: Phases):
        self.ledger = Ledger()
        self._phases = phases
        self._plans: dict[FuncGraph, _Plan] = {}
        self._constants: dict[tf.Operation, Buffer] = {}

    def argument(self, tensor: tf.Tensor) -> Value:
        """The value of an input of the step: a variable, or a part of the batch, which the caller keeps."""
        made: Buffer | Variable
        if tensor.dtype == tf.resource:
            held = known_of(tensor).handle
            shapes = () if held is None else held.shape_and_type
            sizes = (tf.TensorShape(one.shape).num_elements() * tf.as_dtype(one.dtype).size for one in shapes)
            made = Variable(self.ledger.new(sum(sizes), (), FORWARD))
        else:
            made = self.ledger.new(_size(tensor) or 0, (), FORWARD)
        share(made)
        return made

    def call(
        self, graph: FuncGraph, arguments: Sequence[Value], callers: tuple[str, ...] = (), phase: int = FORWARD
    ) -> list[Value]:
        """Runs a function that operations of these names, in this phase, called."""
        if graph not in self._plans:
            self._plans[graph] = _Plan(graph, self._phases)
        plan = self._plans[graph]
        values: dict[int, Value] = {}

        def give(tensor: tf.Tensor, value: Value) -> None:
            values[id(tensor)] = value
            if value is not None:
                value.references += plan.readers[id(tensor)]
                self.ledger.release(value)

        for tensor, value in zip(graph.inputs, arguments, strict=True):
            give(tensor, value)
        waits = dict(plan.waits)
        ready = collections.deque(operation for operation in plan.operations if not waits[operation])
        while ready:
            operation = ready.popleft()
            if operation not in plan.arguments:
                inputs = [values[id(tensor)] for tensor in plan.inputs[operation]]
                names = () if operation in plan.constants else (operation.name, *callers)
                results = self._execute(operation, inputs, names, max(plan.phases[operation], phase))
                for tensor, value in zip(operation.outputs, results, strict=True):
                    give(tensor, value)
            for follower in plan.followers[operation]:
                waits[follower] -= 1
                if not waits[follower]:
                    ready.append(follower)
        return [values[id(tensor)] for tensor in plan.outputs]

    def _execute(
        self, operation: tf.Operation, inputs: list[Value], names: tuple[str, ...], phase: int
    ) -> Sequence[Value]:
        kind = operation.type
        if kind in _CALLS:
            return self.call(_function(operation, "f"), inputs, names, phase)
        if kind in _IFS:
            self.ledger.release(inputs[0])
            branches = [_function(operation, name) for name in ("then_branch", "else_branch")]
            longer = max(branches, key=lambda graph: len(graph.get_operations()))
            return self.call(longer, inputs[1:], names, phase)
        if kind in _LOOPS:
            body = _function(operation, "body")
            for _ in range(_trips(operation, body, inputs)):
                inputs = self.call(body, inputs, names, phase)
            return inputs
        if kind == "Const":  # which the operation keeps
            if operation not in self._constants:
                self._constants[operation] = self.ledger.new(_size(operation.outputs[0]) or 0, names, phase)
            share(self._constants[operation])
            return [self._constants[operation]]
        if _VIEWS.fullmatch(kind) or (kind == "Transpose" and _keeps_order(operation)):
            count = len(operation.outputs)
            self.ledger.release(*inputs[count:])
            return inputs[:count]
        if kind.startswith(("TensorList", "ZerosLike")):
            changed = self._change_list(operation, inputs, names, phase)
            if changed is not None:
                return changed
        return self._compute(operation, inputs, names, phase)

    def _compute(self, operation: tf.Operation, inputs: list[Value], names: tuple[str, ...], phase: int) -> list[Value]:
        """Makes an operation's outputs, where it can in the memory of its inputs; then frees the inputs."""
        for value in inputs:
            if isinstance(value, Buffer):
                value.readers.add(phase)
        kind = operation.type
        if kind == "ReadVariableOp" and isinstance(inputs[0], Variable):
            read = inputs[0].buffer
            share(read)
            self.ledger.release(inputs[0])
            return [read]
        inputs = self._assign(kind, inputs, phase)
        outputs: list[Value] = []
        for place, tensor in enumerate(operation.outputs):
            if tensor.dtype in (tf.resource, tf.variant):
                outputs.append(TensorList() if tensor.dtype == tf.variant else None)
                continue
            size = _size(tensor)
            if size is None:
                size = max((value.size for value in inputs if isinstance(value, Buffer)), default=0)
            if (place == 0 and _IN_PLACE.fullmatch(kind)) or (place == 1 and kind in _LOSSES):
                inputs = self._without_reusable(inputs, size)
            outputs.append(self.ledger.new(size, names, phase))
        self.ledger.release(*inputs)
        return outputs

    def _assign(self, kind: str, inputs: list[Value], phase: int) -> list[Value]:
        """Gives a variable new memory if the operation assigns to it; returns the inputs that are left to free."""
        variable = inputs[0] if inputs else None
        if isinstance(variable, Variable):
            # Added to in place, unless a tensor that was read from it is still in use.
            if kind in ("AssignAddVariableOp", "AssignSubVariableOp") and variable.buffer.references > 1:
                self.ledger.store(variable, self.ledger.new(variable.buffer.size, (), phase))
            elif kind == "AssignVariableOp" and isinstance(inputs[1], Buffer):
                self.ledger.store(variable, inputs[1])
                return inputs[:1]
        return inputs

    def _without_reusable(self, inputs: list[Value], size: int) -> list[Value]:
        """Frees the first input of a size that only this operation reads; returns the others."""
        for place, value in enumerate(inputs):
            if isinstance(value, Buffer) and value.references == 1 and value.size == rounded(size):
                self.ledger.release(value)
                return inputs[:place] + inputs[place + 1 :]
        return inputs

    def _change_list(
        self, operation: tf.Operation, inputs: list[Value], names: tuple[str, ...], phase: int
    ) -> list[Value] | None:
        """The results of an operation on a list of tensors; None if it computes something from one."""
        kind, first = operation.type, inputs[0]
        if kind == "TensorListFromTensor":
            number = operation.inputs[0].shape[0] or 1
            size = first.size // number if isinstance(first, Buffer) else 0
            made = TensorList([self.ledger.new(size, names, phase) for _ in range(number)])
            self.ledger.release(*inputs)
            return [made]
        if not isinstance(first, TensorList):
            return None
        if kind == "ZerosLike":
            made = TensorList(
                [self.ledger.new(one.size, names, phase) for one in first.items if isinstance(one, Buffer)]
            )
            self.ledger.release(first)
            return [made]
        if kind in ("TensorListPushBack", "TensorListSetItem"):
            made = self.ledger.own(first)
            *places, item = inputs[1:3]
            made.items.append(item)
            self.ledger.release(*places)
            return [made]
        if kind == "TensorListPopBack":
            made = self.ledger.own(first)
            self.ledger.release(inputs[1])
            return [made, made.items.pop() if made.items else None]
        if kind == "TensorListGetItem":
            item = first.items.pop(0) if first.items else None
            if item is not None:
                first.items.append(item)  # a loop takes each of them once
                share(item)
            self.ledger.release(*inputs)
            return [item]
        return None


def _repeated(graph: FuncGraph) -> dict[tf.Operation, tf.Operation]:
    """The operations that repeat an earlier one, each with that one; TensorFlow takes them out of the graph."""
    same: dict[tf.Operation, tf.Operation] = {}
    first: dict[tuple[Any, ...], tf.Operation] = {}
    for operation in graph.get_operations():
        if operation._is_stateful or operation.control_inputs or operation.type in ("Placeholder", *_LOOPS, *_IFS):
            continue
        attributes = operation.node_def.attr.items()
        own = frozenset((name, one.SerializeToString()) for name, one in attributes if not name.startswith("_"))
        key = (operation.type, own, *(id(_source(tensor, same)) for tensor in operation.inputs))
        if first.setdefault(key, operation) is not operation:
            same[operation] = first[key]
    return same


def _source(tensor: tf.Tensor, same: Mapping[tf.Operation, tf.Operation]) -> tf.Tensor:
    """The tensor that stands for one, which identities pass on or a repeated operation makes once more."""
    while True:
        if tensor.op.type in ("Identity", "IdentityN") and not tensor.op.control_inputs:
            tensor = tensor.op.inputs[tensor.value_index]
        elif tensor.op in same:
            tensor = same[tensor.op].outputs[tensor.value_index]
        else:
            return tensor


def _size(tensor: tf.Tensor) -> int | None:
    """Bytes of a tensor; None if its shape is open."""
    elements = tensor.shape.num_elements()
    return None if elements is None else elements * tensor.dtype.size


def _function(operation: tf.Operation, attribute: str) -> FuncGraph:
    return operation.graph._get_function(operation.get_attr(attribute).name).graph


def _trips(operation: tf.Operation, body: FuncGraph, inputs: Sequence[Value]) -> int:
    known = [known_of(tensor) for tensor in operation.inputs]
    fixed = [one if same else Known(one.shape) for one, same in zip(known, unchanged_variables(body), strict=True)]
    found = trips(_function(operation, "cond"), counters(body, known), fixed)
    if found is not None:
        return found
    return max((len(value.items) for value in inputs if isinstance(value, TensorList)), default=1)


def _keeps_order(transpose: tf.Operation) -> bool:
    """Whether a transposition only moves axes of size 1, so that it is a view."""
    order, shape = tf.get_static_value(transpose.inputs[1]), transpose.inputs[0].shape
    if order is None or shape.rank is None:
        return False
    moved = [axis for axis in order if shape[axis] != 1]
    return moved == sorted(moved)
