"""A model's whole state, kept while something trains it for measurement, and given back bit for bit."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR


def build(model: keras.Model, batch: tuple[Any, ...]) -> None:
    """Creates every variable that training needs (layers, optimizer slots, metrics), without running a step.

    Args:
        model: A compiled model, built or not.
        batch: One batch as `model.fit` takes it: (x, y[, sample_weight]).
    """
    strategy = model.distribute_strategy
    local = tf.nest.map_structure(lambda value: strategy.experimental_local_results(value)[0], batch)
    with strategy.scope():
        model._symbolic_build(data_batch=local)


@contextmanager
def preserved(model: keras.Model, *, also: Iterable[tf.Variable] = ()) -> Iterator[None]:
    """Gives a built model back as it was: weights, optimizer slots, iterations, metrics, seeds, fit's own attributes.

    Args:
        model: Built with `build`, so that its variables exist.
        also: More variables to keep, such as those that a traced training step uses.
    """
    values = [(part, part.numpy()) for part in _parts(model, also)]
    attributes = {name: model.__dict__.get(name) for name in ("train_function", "stop_training", "history")}
    try:
        yield
    finally:
        for part, value in values:
            part.assign(value)
        for name, attribute in attributes.items():
            if attribute is not None or name in model.__dict__:
                setattr(model, name, attribute)


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
