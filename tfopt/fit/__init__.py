"""`model.fit` that keeps the device fed: steps are launched without waiting for the one before."""

from tfopt.fit.overlapping import overlap, undo

__all__ = ["overlap", "undo"]
