"""Checks of a model of which another version is made, and of the data that both are compared on."""

import keras

from tfopt.errors import UnsupportedError
from tfopt.model.batches import Data, as_dataset, is_endless
from tfopt.model.layers import is_built, require_compiled


def require_finite(data: Data) -> None:
    """Raises a ValueError if a dataset never ends."""
    if is_endless(as_dataset(data)):
        raise ValueError(
            "Expected data that end, since both models are evaluated on them. Received: a dataset that repeats "
            "endlessly. Pass data.take(n)."
        )


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
