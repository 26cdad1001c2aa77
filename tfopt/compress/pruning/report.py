"""What pruning left of a model, and what that gained and cost, measured."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import keras

from tfopt.compress.versions.footprint import Footprint, compared
from tfopt.measure import Comparison, compare
from tfopt.text import Shown, aligned, described, percent, wrapped


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Pruned(Shown):
    """A pruned model, beside the original."""

    model: keras.Model
    """The smaller model, compiled like the original, with a fresh optimizer."""
    sparsity: float
    """The share that was to be removed."""
    kept: Mapping[str, tuple[int, int]]
    """How many channels each layer, by path, keeps, and how many it had; heads are listed apart."""
    left: Mapping[str, str]
    """Why nothing is cut of other layers, by path."""
    before: Footprint
    after: Footprint

    @property
    def reached(self) -> float:
        """The share removed of all that `kept` counts."""
        kept, had = (sum(column) for column in zip(*self.kept.values(), strict=True))
        return 1 - kept / had

    @property
    def speedup(self) -> Comparison:
        """Speed of the training step over the original's."""
        return compare(*(one.step for one in (self.before, self.after) if one.step))

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON values, without the model."""
        return {
            "sparsity": self.sparsity,
            "reached": self.reached,
            "kept": {path: list(counts) for path, counts in self.kept.items()},
            "left": dict(self.left),
            "before": self.before.to_dict(),
            "after": self.after.to_dict(),
            "speedup": self.speedup.to_dict(),
        }

    def __str__(self) -> str:
        layers = [
            ("layer", "kept", "of"),
            *((path, f"{kept:,}", f"{had:,}") for path, (kept, had) in self.kept.items()),
        ]
        parts = [
            wrapped(self._lead()),
            "\n".join(aligned([("", "before", "after"), *compared(self.before, self.after)], texts=1)),
        ]
        parts.append("\n".join(aligned(layers, texts=1)))
        if self.left:
            parts.append("Nothing is cut of:\n" + "\n".join(described(list(self.left.items()))))
        return "\n\n".join(parts)

    def _lead(self) -> str:
        layers = f"{len(self.kept)} layer{'s' * (len(self.kept) != 1)}"
        return (
            f"{percent(self.reached)} of the channels and heads of {layers} are cut. A training step is "
            f"{self.speedup}. Train it on, to regain what its quality lost."
        )
