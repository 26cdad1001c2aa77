"""A model's whole state, kept while something trains it for measurement, and given back bit for bit."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR

from tfopt.errors import UnsupportedError

_ABSENT = object()


def traced(model: keras.Model, batch: Any, *, jit_compile: bool | None = None) -> tuple[Callable[..., Any], tf.Graph]:
    """Traces the training step as `fit` runs it; by that, every variable is made that training needs.

    Args:
        model: A compiled model, built or not.
        batch: One batch as `model.fit` takes it: (x, y[, sample_weight]).
        jit_compile: Whether the step runs under XLA. None: as the model was compiled.

    Returns:
        The step, a function of the batch (in a model that runs eagerly: the plain step), and its graph.
    """
    strategy = model.distribute_strategy
    if model._distribute_strategy is not None:  # where Keras' fit, too, builds before it traces
        local = tf.nest.map_structure(lambda value: strategy.experimental_local_results(value)[0], batch)
        with strategy.scope():
            model._symbolic_build(data_batch=local)

    @tf.autograph.experimental.do_not_convert
    def step(batch: Any) -> Any:
        return strategy.run(model.train_step, args=(batch,))

    function = tf.function(step, jit_compile=model.jit_compile if jit_compile is None else jit_compile)
    try:
        concrete = function.get_concrete_function(batch)
    except Exception as error:
        if not model.run_eagerly:
            raise
        raise UnsupportedError(
            "Expected a training step that TensorFlow can trace, so that all it changes can be given back. Found one "
            f"that only runs eagerly: {error}. Measure the model without run_eagerly=True."
        ) from error
    # To let TensorFlow look for it on each call would take longer than the step of a small model.
    return (step if model.run_eagerly else concrete), concrete.graph


@contextmanager
def preserved(model: keras.Model, *, also: Iterable[tf.Variable] = ()) -> Iterator[None]:
    """Gives a built model back as it was: weights, optimizer slots, iterations, metrics, seeds, fit's own attributes.

    Args:
        model: Built, so that its variables exist.
        also: More variables to keep: those that the training step touches and Keras does not know of.

    Example:
        >>> with tfopt.measure.preserved(model):
        ...     model.fit(dataset)
    """
    values = [(part, part.numpy()) for part in _parts(model, also)]
    attributes = {name: model.__dict__.get(name, _ABSENT) for name in ("train_function", "stop_training", "history")}
    try:
        yield
    finally:
        for part, value in values:
            part.assign(value)
        for name, attribute in attributes.items():
            if attribute is not _ABSENT:
                setattr(model, name, attribute)
            elif name in model.__dict__:
                delattr(model, name)


def _parts(model: keras.Model, also: Iterable[tf.Variable]) -> list[Any]:
    """Every tf.Variable there is to keep, once; a mirrored variable as the one variable of each replica."""
    keras_variables = [*model.variables, *model.metrics_variables]
    if model.optimizer is not None:
        keras_variables += model.optimizer.variables
    # Layers and functions that draw without a seed of their own advance Keras' global one.
    generator = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    if generator is not None:
        keras_variables.append(generator.state)
    variables = [*(variable.value for variable in keras_variables), *also]
    return list(
        {id(part): part for variable in variables for part in getattr(variable, "values", (variable,))}.values()
    )
