"""PruningSchedule: prunes gradually while the model trains."""

from typing import Any

import keras
import numpy as np

from tfopt import checks
from tfopt.compress.pruning.graph import Graph, graph_of
from tfopt.compress.pruning.masking import Held, Mask, all_zero, apply, channel_masks
from tfopt.compress.pruning.report import Pruned
from tfopt.compress.pruning.selecting import Importance, by_norm, checked_importance, checked_sparsity, choose, scorer
from tfopt.compress.versions.footprint import footprints
from tfopt.compress.versions.rebuilding import rebuilt, require_same
from tfopt.compress.versions.requirements import require_finite, require_single, trial_batch
from tfopt.model.batches import one_batch
from tfopt.model.state import rebuild_step_function
from tfopt.warn import warn_caller


class PruningSchedule(keras.callbacks.Callback):
    """Prunes a model step by step during `fit`, so that it adapts; `cut()` then returns the smaller model.

    The share that is masked grows from 0 at `begin_step` to `sparsity` at `end_step`, fast at first, as 1 - (1 - t)³
    (Zhu and Gupta, "To prune, or not to prune", 2017). Masks set the weights that read a channel or head to zero,
    within each update of the optimizer. What is masked once stays masked. Steps are no faster until `cut()`.

    Let the model train for a while after `end_step` before you cut it.

    Args:
        data: As for `prune`.
        sparsity: The share of each layer's channels and heads to remove.
        end_step: The step, counted over all training with this callback, from which the whole share is masked.
        begin_step: The step from which the masks grow. Default: 0.
        every_steps: Steps between two updates of the masks. Default: 100.
        importance: As for `prune`.

    Raises:
        TypeError, ValueError: If an argument is out of range.
        tfopt.errors.UnsupportedError: When `fit` begins: as for `prune`.

    Example:
        >>> schedule = tfopt.compress.PruningSchedule(dataset.take(32), 0.5, end_step=2000)
        >>> model.fit(dataset, epochs=10, callbacks=[schedule])
        >>> smaller = schedule.cut().model
    """

    def __init__(
        self,
        data: Any,
        sparsity: float = 0.5,
        *,
        end_step: int,
        begin_step: int = 0,
        every_steps: int = 100,
        importance: Importance = "taylor",
    ):
        super().__init__()
        require_finite(data)
        self._data = data
        self._sparsity = checked_sparsity(sparsity)
        self._begin = checks.integer("begin_step", begin_step, "Pass a step.", least=0)
        self._end = checks.integer("end_step", end_step, "Pass a step, not before begin_step.", least=self._begin)
        self._every = checks.count("every_steps", every_steps, "Pass a number of steps.")
        self._importance = checked_importance(importance)
        self._pruner: _Channels | None = None
        self._held: Held | None = None
        self._step, self._last_batch, self._rounds = 0, -1, -1

    def on_train_begin(self, logs: Any = None) -> None:
        """Installs the masks."""
        if self._held is not None:  # of a training that an error ended
            self._held.release()
            self._held = None
        if self._pruner is None or self._pruner.model is not self.model:
            require_single(self.model, "Prune")
            self._pruner = None
            self._pruner = _Channels(self.model, self._data, self._importance)
            self._step, self._rounds = 0, -1
        self._held = Held(self._pruner.masks)
        rebuild_step_function(self.model, "train_function")  # a step traced earlier has no masks
        self._prune()

    def get_state(self) -> dict[str, Any]:
        """Returns what `tfopt.callbacks.TrainingCheckpoint` saves of a running training."""
        masked = None if self._pruner is None else self._pruner.masked
        return {"step": self._step, "last_batch": self._last_batch, "rounds": self._rounds, "masked": masked}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on in a running training from what `get_state` returned."""
        self._step, self._last_batch, self._rounds = state["step"], state["last_batch"], state["rounds"]
        if self._pruner is not None and self._held is not None:
            self._pruner.masked = state["masked"]
            self._held.set(self._pruner.masks)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Batches are numbered from 0 again."""
        self._last_batch = -1

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Enlarges the masks if it is time."""
        self._step += batch - self._last_batch  # more than one with steps_per_execution
        self._last_batch = batch
        self._prune()

    def on_train_end(self, logs: Any = None) -> None:
        """Removes the masks; what they set to zero is zero."""
        if self._held is not None and self._pruner is not None:
            apply(self._pruner.masks)  # once more, since averaged weights may have replaced the trained ones
            self._held.release()
            self._held = None
        rebuild_step_function(self.model, "train_function")
        if self._step < self._end:
            warn_caller(
                f"The training ended after {self._step:,} steps, before end_step={self._end:,}, so that only "
                f"{self._share():.2g} of the sparsity of {self._sparsity:g} is masked. Train on with this callback, or "
                "pass a smaller end_step."
            )

    def cut(self) -> Pruned:
        """Returns the model without the masked channels and heads, which computes the same; both are measured.

        Raises:
            ValueError: If the model was not trained with this callback yet, or masked weights have changed since.
            tfopt.errors.UnsupportedError: If a part of the model cannot be built again.
        """
        if self._pruner is None:
            raise ValueError(
                "Expected channels that a training has masked. Found: no training yet. Call fit with this callback, "
                "and then cut()."
            )
        if not all_zero(self._pruner.masks):
            raise ValueError(
                "Expected channels that are masked as the training left them. Found: something has set their weights "
                "since, such as another fit, or a callback that restores the best ones. Put this callback after such "
                "callbacks, and call cut() right after fit."
            )
        return self._pruner.smaller(self._sparsity)

    def _prune(self) -> None:
        """Sets masks for the present step, unless those of its round are set."""
        last = -(-(self._end - self._begin) // self._every)
        passed = self._step - self._begin
        rounds = last if self._step >= self._end else passed // self._every
        if passed >= 0 and rounds > self._rounds:
            self._rounds = rounds
            if (share := self._share()) and self._pruner is not None and self._held is not None:
                self._pruner.prune(self._sparsity * share)
                self._held.set(self._pruner.masks)

    def _share(self) -> float:
        """The masked share of the sparsity at the present step."""
        if self._step >= self._end or self._step <= self._begin:
            return float(self._step >= self._end)
        return 1 - (1 - (self._step - self._begin) / (self._end - self._begin)) ** 3


class _Channels:
    """Masks of channels and heads, and the model without them."""

    def __init__(self, model: keras.Model, data: Any, importance: Importance):
        self.model, self._data = model, data
        self._graph: Graph = graph_of(model)
        copy = rebuilt(model)
        require_same(model, copy, trial_batch(copy, data), "a clone")
        self._scores = scorer(self._graph, model, data, importance)
        self.masked: Any = np.array([], int)
        """The units."""

    @property
    def masks(self) -> list[Mask]:
        return channel_masks(self._graph, self.masked)

    def prune(self, sparsity: float) -> None:
        metrics = [(variable, variable.numpy()) for variable in self.model.metrics_variables]
        scores = self._scores()
        for variable, value in metrics:  # the loss updates those of single outputs
            variable.assign(value)
        if not scores.any():
            warn_caller(
                "The gradients of the schedule's data are all zero, so the channels of this round were chosen by the "
                "norm of their weights. Pass data on which the loss is not 0."
            )
            scores = by_norm(self._graph)
        self.masked = choose(self._graph, scores, sparsity, self.masked)

    def smaller(self, sparsity: float) -> Pruned:
        masked = rebuilt(self.model)
        model = rebuilt(self.model, self._graph.configs(self.masked), self._graph.kept(self.masked))
        require_same(masked, model, one_batch(self._data), "the smaller model")
        before, after = footprints((masked, model), self._data)
        return Pruned(
            model=model,
            sparsity=sparsity,
            kept=self._graph.channels(self.masked),
            left=self._graph.left,
            before=before,
            after=after,
        )
