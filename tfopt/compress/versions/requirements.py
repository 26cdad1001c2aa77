"""Checks of a model of which another version is made, and of the data that both are compared on."""

from typing import Any

import keras
import tensorflow as tf

from tfopt.errors import TfoptError, UnsupportedError, summarize_error
from tfopt.model.batches import Data, as_dataset, first_alike_batches, is_endless, specs_of
from tfopt.model.layers import is_built, require_compiled
from tfopt.model.state import StatePreserver


def require_finite(data: Data) -> None:
    """Raises a ValueError if a dataset never ends."""
    if is_endless(as_dataset(data)):
        raise ValueError(
            "Expected data that end, since both models are evaluated on them. Received: a dataset that repeats "
            "endlessly. Pass data.take(n)."
        )


def trial_batch(model: keras.Model, data: Data) -> Any:
    """Returns the first batch, on which the model is evaluated once; it should be a copy, since its metrics change.

    Raises:
        ValueError: If the model cannot be evaluated on it.
        tfopt.errors.PipelineError: If the dataset is empty, or its first batch holds no example.
    """
    (batch,) = first_alike_batches(data, 1)
    try:
        with StatePreserver(model).preserved():  # a layer may draw, or keep a state
            model.evaluate(tf.data.Dataset.from_tensors(batch), verbose=0)
    except (TfoptError, Warning, tf.errors.ResourceExhaustedError):
        raise
    except Exception as error:  # whatever Keras, TensorFlow or the user's loss raises
        raise ValueError(
            f"Expected batches on which {model.name!r} can be evaluated. Received: {specs_of(batch)}. It raises: "
            f"{summarize_error(error)}. Pass data that model.evaluate takes."
        ) from error
    return batch


def require_single(model: keras.Model, verb: str) -> None:
    """Raises a TypeError, ValueError or UnsupportedError if a model is not compiled and built, on one device."""
    require_compiled(model)
    if not is_built(model):
        raise ValueError(
            f"Expected a built model. Received: {model.name!r}, which has no weights yet. Call it on one batch first."
        )
    remedy = "built outside the strategy's scope with the same weights, save what comes of it, and load that inside."
    require_one_device(model, f"{verb} a model {remedy}")


def require_one_device(model: keras.Model, remedy: str = "Build it outside the strategy's scope.") -> None:
    """Raises an UnsupportedError if a model trains on several replicas."""
    replicas = model.distribute_strategy.num_replicas_in_sync
    if replicas > 1:
        raise UnsupportedError(
            f"Expected a model on one device. Found: {model.name!r} trains on {replicas} replicas. {remedy}"
        )
