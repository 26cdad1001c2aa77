"""Runs a part of a model again in the backward pass, so that what it computes need not be kept until then.

The second run draws the same numbers and changes no variable. It begins when the gradient of the part's outputs is
known.
"""

import copy
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfopt.errors import UnsupportedError
from tfopt.internals.graphs import definition_of, in_loop, is_recorded, may_be_recorded
from tfopt.internals.scopes import call_context, get_state, in_stateless_scope, set_state

# What Keras attaches to tensors: the mask of a sequence, and the logits that a softmax was computed from.
_ATTACHED = ("_keras_mask", "_keras_logits")
# Stateful operations that compute the same again and change nothing, or only call others.
_REPEATABLE = {
    *("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VarHandleOp", "VarIsInitializedOp", "LookupTableFindV2"),
    *("StatefulPartitionedCall", "While", "If", "Case", "Assert", "PrintV2", "CudnnRNNV3", "XlaCallModule"),
}
_STEP = "one_step_on_data"  # as Keras calls the function of a training step, and TensorFlow its graph
# What a call depends on besides its arguments and Keras' variables, as pairs of a getter and a setter.
_SURROUNDINGS: tuple[tuple[Callable[[], Any], Callable[[Any], None]], ...] = (
    *((partial(get_state, name), partial(set_state, name)) for name in ("current_call_ctx", "autocast_scope")),
    (random.getstate, random.setstate),
    (np.random.get_state, np.random.set_state),
)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a model that runs again in the backward pass."""

    name: str
    """What errors call it."""
    function: Callable[..., Any]
    """What it computes."""
    layer: keras.Layer
    """The layer that gets the losses added inside it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the part; runs it only once if it is called eagerly, in a loop, or if no gradient is expected."""
        if not is_differentiated(args, kwargs):
            return self.function(*args, **kwargs)
        inputs, surroundings = _Tensors((args, kwargs)), [copy.copy(get()) for get, _ in _SURROUNDINGS]
        outputs: list[_Tensors] = []

        # Not under stop_recording: what the part leaves elsewhere, such as an attribute, keeps its gradient.
        @tf.custom_gradient
        def computed(*tensors: tf.Tensor) -> Any:
            run = _Run(self)
            with _require_repeatable(self.name, tensors):
                outputs.append(run(inputs.replaced(tensors)))
            run.apply()

            def gradient(*upstream: Any, variables: Sequence[tf.Variable] = ()) -> Any:
                upstream = tuple(None if one is None else tf.convert_to_tensor(one) for one in upstream)
                again, values = _after(upstream, tensors), run.values_read()
                weights = [values.get(id(variable), variable) for variable in variables]
                with tf.GradientTape() as tape, _restored(surroundings):
                    tape.watch(list(filter(_is_differentiable, (*again, *weights))))
                    repeated = _Run(self, run.read)(inputs.replaced(again)).tensors
                found = _gradients(tape, repeated, upstream, (*again, *weights))
                dense = [None if one is None else tf.convert_to_tensor(one) for one in found[: len(again)]]
                return (dense, found[len(again) :]) if variables else dense

            return outputs[0].tensors, gradient

        result = computed(*inputs.tensors)
        result, losses = outputs[0].replaced(result)
        for loss in losses:
            keras.Layer.add_loss(self.layer, loss)  # a Functional model's own add_loss raises
        return result


class _Tensors:
    """The tensors in a nested structure, with what Keras attaches to them."""

    def __init__(self, structure: Any) -> None:
        self._structure = structure
        self._leaves = tf.nest.flatten(structure, expand_composites=True)
        self._places: list[tuple[int, str | None]] = []
        self.tensors: list[tf.Tensor] = []
        for place, leaf in enumerate(self._leaves):
            if isinstance(leaf, tf.Tensor) and leaf.dtype not in (tf.resource, tf.variant):
                attached = [(name, getattr(leaf, name, None)) for name in _ATTACHED]
                for name, tensor in ((None, leaf), *attached):
                    if isinstance(tensor, tf.Tensor):
                        self._places.append((place, name))
                        self.tensors.append(tensor)

    def replaced(self, tensors: Iterable[tf.Tensor]) -> Any:
        """Returns the structure with other tensors in the place of these."""
        leaves = list(self._leaves)
        for (place, name), tensor in zip(self._places, tensors, strict=True):
            if name is None:
                leaves[place] = tensor
            else:
                setattr(leaves[place], name, tensor)
        return tf.nest.pack_sequence_as(self._structure, leaves, expand_composites=True)


class _Run(keras.StatelessScope):
    """One run of a part, which collects what it assigns to variables and adds as losses."""

    def __init__(self, part: Part, read: Iterable[tuple[keras.Variable, tf.Tensor]] = ()) -> None:
        super().__init__(collect_losses=True)
        self._part = part
        self._graph = tf.compat.v1.get_default_graph()
        self._changed: dict[int, keras.Variable] = {}
        self.read = list(read)
        """Variables, with their values when the first run read them."""
        self.state_mapping.update((id(variable), value) for variable, value in self.read)

    def __call__(self, arguments: tuple[Sequence[Any], dict[str, Any]]) -> _Tensors:
        """Returns what the part returns and its losses."""
        args, kwargs = arguments
        with self:
            result = self._part.function(*args, **kwargs)
        return _Tensors((result, self.losses))

    def get_current_value(self, variable: keras.Variable) -> tf.Tensor:
        """Returns the value of a variable in this run, which reads it once.

        The second run takes the values of the first. If it read them itself, nothing would keep the optimizer from
        changing a weight before that: Grappler drops the control edge between the two wherever the gradient seems to
        depend on the value, and later finds that only a shape did.
        """
        if id(variable) not in self.state_mapping:
            with self._graph.as_default(), tf.control_dependencies(None):  # not in the loop or branch that asks
                value = tf.identity(variable._value)
            self.read.append((variable, value))
            self.state_mapping[id(variable)] = value
        return self.state_mapping[id(variable)]

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        """Records an assignment, through which no gradient flows."""
        variable, value = update
        value = tf.stop_gradient(tf.cast(value, variable._value.dtype))
        if value.graph is not self._graph:
            raise UnsupportedError(
                f"Expected layers whose second run computes the same. Found that {self._part.name} assigns to "
                f"{variable.path!r} inside a loop, a branch or a tf.function. Leave it out of `layers`."
            )
        if variable.trainable:
            raise UnsupportedError(
                f"Expected layers that leave trainable variables to the optimizer. Found that {self._part.name} "
                f"assigns to {variable.path!r}, as SpectralNormalization does. Leave it out of `layers`."
            )
        self._changed[id(variable)] = variable
        super().add_update((variable, value))

    def apply(self) -> None:
        """Assigns what was collected."""
        for variable in self._changed.values():
            variable.assign(self.get_current_value(variable))

    def values_read(self) -> dict[int, tf.Tensor]:
        """Returns the values of the variables that were read, by the id of TensorFlow's variable on any replica."""
        return {
            id(part): value
            for variable, value in self.read
            for part in (variable._value, *getattr(variable._value, "values", ()))
        }


def is_differentiated(*arguments: Any) -> bool:
    """Whether a call is traced, on tensors, for training or under a gradient tape."""
    symbolic = any(isinstance(leaf, keras.KerasTensor) for leaf in tf.nest.flatten(arguments))
    # In a stateless scope Keras infers shapes, or a part that this one lies in is running.
    if tf.executing_eagerly() or symbolic or in_stateless_scope() or _in_loop():
        return False
    context = call_context()
    return bool(context is not None and context.get_value("training")) or may_be_recorded()


def _in_loop() -> bool:
    """Whether a loop is being traced, where TensorFlow loses the gradients of a custom gradient's variables.

    Keras' loop over the steps of an execution does not count: each step computes its gradients inside it.
    """
    graph = tf.compat.v1.get_default_graph()
    while graph is not None and getattr(graph, "name", None) != _STEP:
        if in_loop(graph):
            return True
        graph = getattr(graph, "outer_graph", None)
    return False


def _is_differentiable(tensor: Any) -> bool:
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)


@contextmanager
def _restored(surroundings: Sequence[Any]) -> Iterator[None]:
    """Returns to the surroundings of the first run for a block."""
    before = [get() for get, _ in _SURROUNDINGS]
    try:
        for (_, put), value in zip(_SURROUNDINGS, surroundings, strict=True):
            put(value)
        yield
    finally:
        for (_, put), value in zip(_SURROUNDINGS, before, strict=True):
            put(value)


def _after(upstream: Sequence[Any], tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Makes tensors depend on the gradients of a part's outputs, and leaves their values as they are.

    XLA and Grappler would otherwise merge the second run with the first and keep everything. Neither knows that no
    hyperbolic tangent exceeds 1. XLA's optimization barrier, tried on a CPU, is removed before buffers are assigned.
    `tfopt.model.graph_flops` recognises second runs by this tangent.
    """
    gradients = [gradient for gradient in upstream if gradient is not None and _is_differentiable(gradient)]
    # Of each, since the gradient of an output that nobody uses is a constant.
    firsts = [tf.cast(tf.abs(tf.reshape(gradient, [-1])[:1]), tf.float32) for gradient in gradients]
    never = tf.reduce_any(tf.tanh(tf.concat(firsts, 0)) > 2)
    return [tf.where(never, tf.zeros((), tensor.dtype), tensor) for tensor in tensors]


def _gradients(tape: Any, outputs: Sequence[tf.Tensor], upstream: Sequence[Any], sources: Sequence[Any]) -> list[Any]:
    """The gradients for sources of any dtype; None where there is none."""
    pairs = [
        (output, gradient)
        for output, gradient in zip(outputs, upstream, strict=True)
        if gradient is not None and _is_differentiable(output)
    ]
    targets, given = zip(*pairs, strict=True)
    wanted = [source for source in sources if _is_differentiable(source)]
    found = iter(tape.gradient(list(targets), wanted, output_gradients=list(given)))
    return [next(found) if _is_differentiable(source) else None for source in sources]


@contextmanager
def _require_repeatable(name: str, given: Sequence[tf.Tensor]) -> Iterator[None]:
    """Raises if what a block traces would compute something else the second time, or lose a gradient."""
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    yield
    operations = graph.get_operations()[before:]
    for kind in _stateful(graph, operations):
        if kind not in _REPEATABLE:
            raise UnsupportedError(
                f"Expected layers whose second run computes the same and changes nothing. Found the operation {kind} "
                f"in {name}. Draw with keras.random and a SeedGenerator, keep state in Keras' variables, or leave it "
                "out of `layers`."
            )
    inside = {operation.name for operation in operations}
    used = {tensor.ref() for operation in operations for tensor in operation.inputs if tensor.op.name not in inside}
    for tensor in (reference.deref() for reference in used - {tensor.ref() for tensor in given}):
        if _is_differentiable(tensor) and is_recorded(tensor):
            raise UnsupportedError(
                f"Expected layers that get tensors as arguments. Found that {name} also uses {tensor.name!r}, computed "
                "elsewhere, whose gradient would be lost. Pass it to the layer's call, or leave it out of `layers`."
            )


def is_stateful(graph: Any) -> bool:
    """Whether any operation of a graph reads or changes more than tensors."""
    return bool(_stateful(graph, graph.get_operations()))


def _stateful(graph: Any, operations: Sequence[Any]) -> list[str]:
    """The types of operations that read or change more than tensors, each once."""
    kinds = dict.fromkeys(kind for operation in operations for kind in _kinds(graph, operation))
    return list(filter(_has_state, kinds))


def _kinds(graph: Any, operation: Any) -> Iterator[str]:
    """The type of an operation, and of all in the functions it calls."""
    pending = [operation.node_def] if _calls_functions(operation.type) else []
    yield operation.type
    while pending:
        for attribute in pending.pop().attr.values():
            for called in (attribute.func, *attribute.list.func):
                function = graph._get_function(called.name) if called.name else None
                nodes = [] if function is None else function.cached_definition.node_def
                yield from (node.op for node in nodes)
                pending += [node for node in nodes if _calls_functions(node.op)]


@cache
def _has_state(kind: str) -> bool:
    definition = definition_of(kind)
    return definition is not None and definition.is_stateful


@cache
def _calls_functions(kind: str) -> bool:
    definition = definition_of(kind)
    return definition is not None and any("func" in attribute.type for attribute in definition.attr)
