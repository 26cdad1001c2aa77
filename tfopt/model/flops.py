"""FLOPs of a model's training step, counted in TensorFlow's graph of it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfopt.internals.graphs import FuncGraph
from tfopt.model.graph_flops import FlopsCounter, GraphFlops
from tfopt.model.graph_shapes import Known, known_of
from tfopt.model.state import optimizer_names, optimizers_of, traced_steps


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """FLOPs of a training step; a multiply-add counts as two."""

    by_dtype: dict[str, int]
    unknown: tuple[str, ...]
    """What cannot be counted, each with the reason."""
    examples: float
    """Examples of the step."""

    @property
    def per_example(self) -> float | None:
        """The total on one example; None if some are unknown or there are none."""
        total = sum(self.by_dtype.values())
        return None if self.unknown or not self.examples else total / self.examples or None

    @property
    def dtype(self) -> str | None:
        """The dtype of most FLOPs; None if none are known."""
        return max(self.by_dtype, key=self.by_dtype.__getitem__, default=None)


def fit_flops(model: keras.Model, element_spec: Any, examples: float) -> ModelFlops:
    """Counts the training step that `fit` has traced, without tracing anything.

    Args:
        model: A model that `fit` has trained for a step.
        element_spec: Of the batches it took, as its iterator has it; None: unknown.
        examples: Examples of a step, over all replicas.
    """
    try:
        concrete, leaves = _traced_step(model, element_spec)
    except _NotTracedError as error:
        return ModelFlops({}, (str(error),), examples)
    strategy = model._distribute_strategy
    here = 1 if strategy is None else len(strategy.extended.worker_devices)
    batch = max(1, round(examples / model.distribute_strategy.num_replicas_in_sync))
    data = [Known(_with_batch(leaf.shape, batch) if first else leaf.shape) for leaf, first in leaves]
    sizes = [known.shape[0] for known, (_, first) in zip(data, leaves, strict=True) if first and known.shape.rank]
    return step_flops(model, concrete.graph, data, here * (sizes[0] if sizes else batch))


def step_flops(model: keras.Model, graph: FuncGraph, data: Sequence[Known], examples: float) -> ModelFlops:
    """Counts a traced training step.

    Matrix products and convolutions count as they stand in the graph, forward and backward; element-wise work does not.
    So a frozen layer has less of a backward pass, and a first layer no gradient of its inputs.

    Args:
        model: The model it trains.
        graph: The step's graph.
        data: What is known of the graph's first inputs; the others count as they were traced.
        examples: Examples of the step.
    """
    rest = [known_of(tensor) for tensor in graph.inputs[len(data) :]]
    found = FlopsCounter(optimizer_names(optimizers_of(model, inner=False))).count(graph, [*data, *rest])
    unknown = tuple(f"{name} ({reason})" for name, reason in found.unknown.items())
    return ModelFlops(dict(+found.by_dtype), unknown, examples)


def graph_flops(graph: FuncGraph) -> GraphFlops:
    """Counts a traced function whose input shapes are known, as `step_flops` does a step."""
    return FlopsCounter().count(graph, [known_of(tensor) for tensor in graph.inputs])


def functional_flops(model: keras.Model) -> ModelFlops:
    """Traces a Functional model's forward and backward pass on one example, and counts them as `step_flops` does."""

    @tf.function(autograph=False)
    def step(*inputs: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            outputs = model(list(inputs) if inputs[1:] else inputs[0], training=True)
            loss = sum(tf.reduce_sum(output) for output in keras.tree.flatten(outputs))
        return loss, tape.gradient(loss, model.trainable_weights)

    specs = [tf.TensorSpec((1, *tensor.shape[1:]), tensor.dtype) for tensor in model.inputs]
    return step_flops(model, step.get_concrete_function(*specs).graph, [], 1)


class _NotTracedError(Exception):
    """There is no graph of the training step."""


def _traced_step(model: keras.Model, element_spec: Any) -> tuple[Any, list[tuple[Any, bool]]]:
    """The function traced for batches of a spec; their flat specs, and whether each has the batch as its first axis."""
    concretes = traced_steps(model)
    if not concretes:
        raise _NotTracedError("the training step (Keras has no graph of it: it runs eagerly, or outside `fit`)")
    fitting = []
    for concrete in concretes:
        own = list(_leaves(concrete.structured_input_signature))
        leaves = own if element_spec is None else list(_leaves(element_spec))
        if len(own) == len(leaves) and all(map(_takes, own, leaves)):
            exact = sum(one.shape == other.shape for (one, _), (other, _) in zip(own, leaves, strict=True))
            fitting.append((exact, concrete, leaves))
    if len({str(leaves) for *_, leaves in fitting}) != 1:
        raise _NotTracedError("the training step (batches of several shapes, and which one this is, is not known)")
    # Of a trace for these shapes and one for any, TensorFlow takes the former; of two alike, the first made variables.
    _, concrete, leaves = max(reversed(fitting), key=lambda found: found[0])
    return concrete, leaves


def _leaves(specs: Any) -> Iterator[tuple[Any, bool]]:
    for spec in tf.nest.flatten(specs):
        if not isinstance(spec, tf.TypeSpec) or isinstance(spec, tf.OptionalSpec):
            continue  # a part that batches do not have
        dense = isinstance(spec, tf.TensorSpec) or type(spec).__name__ == "PerReplicaSpec"
        for leaf in tf.nest.flatten(spec, expand_composites=True):
            yield leaf, dense and isinstance(leaf, tf.TensorSpec)


def _takes(own: tuple[Any, bool], given: tuple[Any, bool]) -> bool:
    """Whether a trace with such an input was made for, or also for, batches with this one."""
    return bool(own[0].dtype == given[0].dtype and given[0].is_subtype_of(own[0]))


def _with_batch(shape: tf.TensorShape, size: int) -> tf.TensorShape:
    return tf.TensorShape([size, *shape[1:]]) if shape.rank and shape[0] is None else shape
