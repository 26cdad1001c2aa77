"""Checks of what `prune` and PruningSchedule take."""

import keras

from tfopt import checks
from tfopt.compress.pruning.selecting import Importance
from tfopt.errors import UnsupportedError, unknown_name
from tfopt.model.batches import Data, as_dataset, is_endless
from tfopt.model.layers import is_built, require_compiled

_IMPORTANCES = ("taylor", "norm")


def checked_sparsity(sparsity: float) -> float:
    """Returns the share to remove; raises a TypeError or ValueError if it is none."""
    remedy = "Pass a share such as 0.5, to remove half."
    share = checks.number("sparsity", sparsity, remedy, above=0)
    if share >= 1:
        raise ValueError(f"Expected sparsity to be below 1. Received: {sparsity!r}. {remedy}")
    return share


def checked_importance(importance: Importance) -> Importance:
    """Returns the kind of importance; raises a ValueError if it is unknown."""
    if importance not in _IMPORTANCES:
        raise unknown_name("importance", importance, _IMPORTANCES)
    return importance


def require_finite(data: Data) -> None:
    """Raises a ValueError if a dataset never ends."""
    if is_endless(as_dataset(data)):
        raise ValueError(
            "Expected data that end, since both models are evaluated on them. Received: a dataset that repeats "
            "endlessly. Pass data.take(n)."
        )


def require_prunable(model: keras.Model) -> None:
    """Raises a TypeError, ValueError or UnsupportedError if a model is not compiled and built, on one device."""
    require_compiled(model)
    if not is_built(model):
        raise ValueError(
            f"Expected a built model. Received: {model.name!r}, which has no weights yet. Call it on one batch first."
        )
    replicas = model.distribute_strategy.num_replicas_in_sync
    if replicas > 1:
        raise UnsupportedError(
            f"Expected a model on one device. Found: {model.name!r} trains on {replicas} replicas. Prune a model built "
            "outside the strategy's scope with the same weights, save the smaller one, and load it inside the scope."
        )
