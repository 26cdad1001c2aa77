"""Restores a checkpoint into a model, for inference, fine-tuning or a custom loop."""

import os
from collections import ChainMap
from dataclasses import dataclass
from typing import Any

import keras

from tfopt.checkpoint.adapted import adapted, require_same_adapted
from tfopt.checkpoint.adapted import differences as adapted_otherwise
from tfopt.checkpoint.folder.reading import read
from tfopt.checkpoint.variables import (
    WEIGHTS,
    assign,
    build_optimizer,
    differences,
    parts_of,
    renamed,
    require_same,
    saved_in,
)
from tfopt.errors import CheckpointError
from tfopt.model.layers import is_built, require_model
from tfopt.text import Shown, listed

_SHOWN = 8


@dataclass(frozen=True, slots=True, repr=False)
class Restored(Shown):
    """What `restore` did."""

    step: int
    """Of the training."""
    variables: int
    """How many got a value."""
    skipped: tuple[str, ...]
    """With `partial`, variables of the model or the checkpoint that do not fit, and layers that are adapted to other
    data."""

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON values."""
        return {"step": self.step, "variables": self.variables, "skipped": list(self.skipped)}

    def __str__(self) -> str:
        skipped = f"; skipped: {listed(self.skipped, _SHOWN)}" if self.skipped else ""
        return f"step {self.step:,}: {self.variables:,} variables restored{skipped}"


def restore(
    model: keras.Model, folder: str | os.PathLike[str], step: int | None = None, *, partial: bool = False
) -> Restored:
    """Restores the weights of a checkpoint into a built model, and the optimizer's state if the model is compiled.

    Use it to evaluate, export or fine-tune a model that `TrainingCheckpoint` saved. To continue a training run, start
    its script again. `model.save_weights("model.weights.h5")` exports the weights afterwards. The whole checkpoint is
    verified before anything changes, and nothing in it is executed.

    Args:
        model: A built model. If compiled, with the optimizer it was trained with.
        folder: The training's folder. It may still be running.
        step: Step of the checkpoint; `available` lists them. Default: the newest whole one.
        partial: Whether to restore only variables with the same name, dtype and shape. Default: False.

    Returns:
        The step, and with `partial` what was skipped.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If the model is not built, `folder` is a file or `step` is negative.
        tfopt.errors.CheckpointError: If there is no whole checkpoint, or the variables differ, or what layers have
            adapted, such as a vocabulary; each one is named.

    Example:
        >>> print(tfopt.checkpoint.restore(model, "checkpoints"))
        step 1,200: 14 variables restored
        >>> model.save_weights("model.weights.h5")
    """
    require_model(model)
    if not is_built(model):
        raise ValueError(f"Expected a built model. Received: {model.name!r}, which is not. Call it on a batch first.")
    found = read(folder, step)
    if found is None:
        raise CheckpointError(f"Expected a checkpoint in {os.fspath(folder)!r}. Found none. Check the path.")
    own = adapted(model)
    if not partial:
        require_same_adapted(own, found.arrays, str(found.path), whole=False)
    groups = (WEIGHTS,) if getattr(model, "optimizer", None) is None else (WEIGHTS, "optimizer/")
    # For variables that differ per replica, such as batch normalization's averages: the first replica's, as in Keras.
    first = {name: found.arrays[name][0] for name in found.metadata.get("by_replica", ()) if name.startswith(groups)}
    saved = {name: content for name, content in saved_in(found).items() if name.startswith(groups)}
    saved |= {name: (dtype, shape[1:]) for name, (dtype, shape) in saved.items() if name in first}
    build_optimizer(model, saved)
    parts = {name: part for name, part in parts_of(model).items() if name.startswith(groups)}
    parts = renamed(parts, saved, model)
    skipped = (*adapted_otherwise(own, found.arrays, whole=False), *differences(parts, saved)) if partial else ()
    if partial:
        parts = {name: part for name, part in parts.items() if saved.get(name) == (part.dtype, part.shape)}
    else:
        require_same(parts, saved, str(found.path))
    assign(parts, ChainMap(first, found.arrays))  # type: ignore[arg-type]
    return Restored(found.step, len(parts), skipped)
