"""Checks of what `prune` and PruningSchedule take."""

from tfopt import checks
from tfopt.compress.pruning.selecting import Importance
from tfopt.errors import unknown_name

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
