"""A model's own `train_step`, run for its gradients: what it asks optimizers to apply is recorded, not applied."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from tfopt.errors import UnsupportedError
from tfopt.internals.patches import patched
from tfopt.internals.training import BaseOptimizer
from tfopt.model.layers import RecordedCall
from tfopt.model.state import optimizers_of, same_draws

Optimizer: TypeAlias = keras.optimizers.Optimizer
_SCALING = keras.optimizers.LossScaleOptimizer


@dataclass(slots=True, eq=False)
class TakenGradient:
    """One call of `tape.gradient` for variables."""

    loss: list[tf.Tensor]
    variables: frozenset[int]
    """Their ids."""
    of_calls: list[tuple[tf.Tensor, tf.Tensor]]
    """Tensors of layers' calls with their gradients, still scaled."""
    scale: Any = 1.0
    """What the loss was multiplied by; 1 where a train_step forgets to."""


@dataclass(slots=True, eq=False)
class OwnStep:
    """What a `train_step` computed."""

    taken: list[TakenGradient] = field(default_factory=list)
    updates: list[tuple[Optimizer, list[tuple[keras.Variable, tf.Tensor]]]] = field(default_factory=list)
    """What each optimizer was asked to apply, in order: variables and gradients, unscaled."""

    @property
    def loss(self) -> tf.Tensor:
        """The unscaled loss; the sum of magnitudes if there are several, which must not cancel."""
        found = [tf.reduce_mean(tf.cast(part, tf.float32)) / one.scale for one in self.taken for part in one.loss]
        return found[0] if len(found) == 1 else tf.add_n([tf.abs(loss) for loss in found])

    @property
    def of_calls(self) -> list[tuple[int, tf.Tensor, tf.Tensor]]:
        """Which call of `tape.gradient`, a tensor of a layer's call, and its gradient, unscaled."""
        return [
            (number, tensor, _dense(part) / one.scale)
            for number, one in enumerate(self.taken)
            for tensor, part in one.of_calls
        ]


def has_own_step(model: keras.Model) -> bool:
    """Whether a model has a `train_step` that is not Keras'."""
    return type(model).train_step is not keras.Model.train_step


def run(model: keras.Model, batch: Any, calls: list[RecordedCall], scales: Callable[[Optimizer], tf.Tensor]) -> OwnStep:
    """Traces `model.train_step`, with optimizers that update nothing.

    Args:
        model: A model with a train_step of its own.
        batch: What `fit` would pass it.
        calls: The recorded calls of layers so far, which grow meanwhile; their gradients are taken too.
        scales: The loss scale of an optimizer, in place of its own.
    """
    step = OwnStep()

    def gradient(original: Any, tape: tf.GradientTape, target: Any, sources: Any, *args: Any, **options: Any) -> Any:
        flat = keras.tree.flatten(sources)
        variables = frozenset(id(source) for source in flat if isinstance(source, (keras.Variable, tf.Variable)))
        losses = [part for part in keras.tree.flatten(target) if isinstance(part, tf.Tensor)]
        graph = tf.compat.v1.get_default_graph()
        if not variables or not losses or any(loss.graph is not graph for loss in losses):
            return original(tape, target, sources, *args, **options)
        tensors = list({id(x): x for call in calls for x in call.inputs + call.outputs}.values())
        own, extra = original(tape, target, (sources, tensors), *args, **options)
        of_calls = [(tensor, part) for tensor, part in zip(tensors, extra, strict=True) if part is not None]
        step.taken.append(TakenGradient(losses, variables, of_calls))
        return own

    def apply(_: Any, optimizer: Optimizer, grads: Any, trainable_variables: Any = None) -> None:
        variables = list(trainable_variables or optimizer._trainable_variables)
        scale = scales(optimizer)
        pairs = [(one, part) for one, part in zip(variables, grads, strict=True) if part is not None]
        ids = {id(variable) for variable, _ in pairs}
        for taken in step.taken[::-1]:
            if taken.variables & ids:
                taken.scale = scale
                break
        step.updates.append((optimizer, [(variable, _dense(part) / scale) for variable, part in pairs]))

    def scale_loss(_: Any, optimizer: Optimizer, loss: Any) -> Any:
        return keras.ops.multiply(loss, scales(optimizer))

    with ExitStack() as stack:
        for owner in (BaseOptimizer, _SCALING):
            stack.enter_context(_replaced(owner, "apply", apply))
            stack.enter_context(_replaced(owner, "scale_loss", scale_loss))
        stack.enter_context(_replaced(tf.GradientTape, "gradient", gradient))
        stack.enter_context(same_draws())
        for optimizer in optimizers_of(model):
            # A train_step may multiply by it instead of calling scale_loss.
            if isinstance(optimizer, _SCALING) and optimizer.built:
                optimizer.dynamic_scale.assign(scales(optimizer))
        _call(model, batch)
    return step


def touched_variables(model: keras.Model, batch: Any) -> tuple[tf.Variable, ...]:
    """Every variable that the model's own train_step touches; raises what that raises."""

    def trace(batch: Any) -> None:
        step = run(model, batch, [], lambda _: tf.ones([]))
        if not step.taken or not step.updates:
            raise UnsupportedError("it hands no gradients of a tf.GradientTape to a Keras optimizer")

    try:
        graph = tf.function(trace, autograph=False).get_concrete_function(batch).graph
    finally:
        model._clear_losses()  # they would keep tensors of that graph
    scales = [x.dynamic_scale.value for x in optimizers_of(model) if isinstance(x, _SCALING) and x.built]
    return tuple({id(variable): variable for variable in (*graph.variables, *scales)}.values())


def without_scaling(step: OwnStep, adapting: Iterable[Optimizer], scales: tf.Tensor) -> list[str]:
    """Names of the loss-scaling optimizers that get gradients of a loss that was not scaled, whose scale becomes 1."""
    found = []
    for optimizer, pairs in step.updates:
        ids = {id(variable) for variable, _ in pairs}
        taken = [one for one in step.taken if one.variables & ids]
        if optimizer not in adapting or not taken:
            continue
        marks = {scales.op}
        if isinstance(optimizer, _SCALING) and optimizer.built:
            marks.add(scales.graph.capture(optimizer.dynamic_scale.value.handle).op)
        if not any(_depends(taken[-1].loss, marks)):
            found.append(optimizer.name)
            taken[-1].scale = 1.0
    return found


def _depends(tensors: Iterable[tf.Tensor], marks: set[tf.Operation]) -> Iterator[bool]:
    """Whether each tensor is computed from one of the operations."""
    for tensor in tensors:
        seen, waiting = set(), [tensor.op]
        while waiting:
            operation = waiting.pop()
            if operation not in seen:
                seen.add(operation)
                waiting += [x.op for x in operation.inputs]
        yield not marks.isdisjoint(seen)


def _call(model: keras.Model, batch: Any) -> None:
    """Calls the train_step, converted by AutoGraph as in `fit` only where it does not run without."""
    own = model.__dict__.get("compute_metrics")
    model.__dict__["compute_metrics"] = lambda *_, **__: {}  # no gradient depends on them, and they may not be built
    try:
        try:
            model.train_step(batch)
        except tf.errors.OperatorNotAllowedInGraphError:
            tf.autograph.to_graph(type(model).train_step)(model, batch)
    finally:
        del model.__dict__["compute_metrics"]
        if own is not None:
            model.__dict__["compute_metrics"] = own


@contextmanager
def _replaced(owner: type, name: str, hook: Callable[..., Any]) -> Iterator[None]:
    """Replaces a method for this thread; the hook gets the original first."""
    thread = threading.get_ident()

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def method(*args: Any, **options: Any) -> Any:
            if threading.get_ident() != thread:
                return original(*args, **options)
            return hook(original, *args, **options)

        return tf.autograph.experimental.do_not_convert(method)

    with patched(owner, name, make, by="the precision gate"):
        yield


def _dense(gradient: Any) -> tf.Tensor:
    return tf.cast(tf.convert_to_tensor(gradient), tf.float32)
