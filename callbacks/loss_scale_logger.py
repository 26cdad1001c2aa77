"""Logs what loss scaling does during `fit`."""

import math
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import keras
from keras.optimizers import LossScaleOptimizer

from tfopt.callbacks.shared.row_files import BackgroundRows, check_formats
from tfopt.callbacks.shared.run import COORDINATES, begin_run
from tfopt.callbacks.shared.running_fit import RESUMED, Callback, end_with_fit, warn_of_earlier_loggers
from tfopt.checks import log_folder
from tfopt.model.layers import computing_layers
from tfopt.text import listed

_COLUMNS = (*COORDINATES, "steps", "optimizer", "loss_scale", "skipped_steps", "loss_scale_growths")
_LAYERS_NAMED = 5


class LossScaleLogger(Callback):
    """Logs the loss scale of float16 training, the steps skipped for overflow, and how often the scale grew.

    A gradient that overflows makes `LossScaleOptimizer` skip the step and halve the scale; 2,000 good steps
    (`dynamic_growth_steps`) double it. A few skips at the start and an occasional one later are healthy. It warns if an
    epoch skipped every step, which trains nothing, and if layers compute in float16 while no optimizer scales the loss.

    In `logs`, and so in Keras' history and later loggers: `loss_scale` at the epoch's end, `skipped_steps` and
    `loss_scale_growths` of the epoch. In files (`loss_scale.csv`, `loss_scale.jsonl`): a row per epoch and optimizer
    that scales the loss. No step waits for it: the optimizers are read when an epoch begins and ends, and the counts
    follow from the applied steps and the change of the scale. Unknown counts are left out (null in files).

    Args:
        log_dir: Folder for the files. Default None: only epoch logs.
        formats: Which files: "csv", "jsonl", "tensorboard".

    Raises:
        ValueError: If a format is unknown, or `log_dir` cannot be a folder.
        TypeError: If `log_dir` is not a path.
        tfopt.errors.UnsupportedError: If TensorBoard is asked for and not installed.

    Example:
        >>> model.fit(dataset, callbacks=[tfopt.callbacks.LossScaleLogger("logs")])
    """

    def __init__(self, log_dir: str | os.PathLike[str] | None = None, formats: Sequence[str] = ("csv", "jsonl")):
        super().__init__()
        self._log_dir = log_folder(log_dir)
        self._formats = check_formats(formats)
        self._writer: BackgroundRows | None = None
        self._optimizers: dict[str, LossScaleOptimizer] = {}
        self._trained = self._last_step = 0
        self._warned: set[str] = set()

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Opens the files if there is a loss scale to log."""
        warn_of_earlier_loggers(self)
        self._close()  # if an exception ended the previous fit
        self._run = begin_run(self)
        self._trained = self._last_step = 0
        self._optimizers = _loss_scaling(self.model)
        self._before: dict[str, _State] = {}
        if not self._optimizers:
            self._warn_once("unscaled", _unscaled(self.model))
        elif self._log_dir is not None:
            self._writer = BackgroundRows(self._log_dir, "loss_scale", self._formats, _COLUMNS)
            end_with_fit(self, self._writer.close)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Reads each optimizer's state."""
        self._before = self._states()
        # A restored training goes on counting; the optimizer does not count skipped steps.
        applied = [state.applied for state in self._before.values()]
        self._trained = max(self._trained + self._last_step, getattr(self.model, RESUMED, 0), *applied)
        self._last_step = 0

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts steps."""
        self._last_step = batch + 1

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the epoch's figures to the logs and the files."""
        if not self._optimizers:
            return
        steps, planned = self._possible_steps(), (self.params or {}).get("steps")
        before, self._before = self._before, self._states()
        changes = {name: _change(before[name], self._before[name], steps, planned) for name in before}
        used = {name: change for name, change in changes.items() if change is not None}
        for name, change in used.items():
            if self._writer is not None:
                where = self._run.coordinates(epoch=epoch, step=self._trained + self._last_step)
                self._writer.write(where | {"optimizer": name} | asdict(change))
            if change.steps and change.skipped_steps == change.steps:
                self._warn_once("skipped", _all_skipped(epoch, change))
        if logs is None or not used:
            return
        scales = [change.loss_scale for change in used.values() if change.loss_scale is not None]
        figures = {
            "loss_scale": min(scales, default=None),
            "skipped_steps": _sum([change.skipped_steps for change in used.values()]),
            "loss_scale_growths": _sum([change.loss_scale_growths for change in used.values()]),
        }
        logs |= {key: figure for key, figure in figures.items() if figure is not None}

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Closes the files."""
        self._close()

    def _states(self) -> "dict[str, _State]":
        return {name: _state(optimizer) for name, optimizer in self._optimizers.items()}

    def _possible_steps(self) -> range:
        """How many steps the epoch may have had: for an execution, Keras reports the last step it may take."""
        least = self._last_step - getattr(self.model, "steps_per_execution", 1) + 1
        return range(max(1, least), self._last_step + 1)

    def _warn_once(self, cause: str, message: str) -> None:
        if cause not in self._warned:
            self._warned.add(cause)
            warnings.warn(message, stacklevel=3)

    def _close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


@dataclass(frozen=True, slots=True)
class _State:
    """An optimizer's loss scale, applied steps, good steps since the last change, and those it needs to grow."""

    scale: float
    applied: int
    good_steps: int
    growth_steps: int


@dataclass(frozen=True, slots=True)
class _Change:
    """What happened to the scale in an epoch, by log key. None: unknown."""

    loss_scale: float | None
    steps: int | None
    skipped_steps: int | None
    loss_scale_growths: int | None


def _state(optimizer: LossScaleOptimizer) -> _State:
    # Not `.iterations`, which counts updates: with gradient accumulation several steps make one update.
    applied = int(optimizer.inner_optimizer._iterations.numpy())
    if not optimizer.built:  # it has a scale only once the first step has built it
        return _State(optimizer.initial_scale, applied, 0, optimizer.dynamic_growth_steps)
    scale, good_steps = float(optimizer.dynamic_scale.numpy()), int(optimizer.step_counter.numpy())
    return _State(scale, applied, good_steps, optimizer.dynamic_growth_steps)


def _change(before: _State, after: _State, steps: range, planned: int | None) -> _Change | None:
    """What happened between two states in one of `steps` possible step counts; None if nothing did."""
    applied = after.applied - before.applied
    usual = 0 < before.scale < math.inf and 0 < after.scale < math.inf
    if usual and applied == 0 and after.scale == before.scale:
        return None
    scale = after.scale if math.isfinite(after.scale) else None
    known = steps[0] if len(steps) == 1 else None
    if not usual:
        skipped = None if known is None else known - applied
        return _Change(scale, known, skipped, None)
    found = [(skipped, growths) for skipped, growths in _explanations(before, after) if applied + skipped in steps]
    if len(found) > 1 and planned in steps:  # nearly always the epoch used all data, or all of its last execution
        found = [one for one in found if applied + one[0] in (planned, steps[-1])]
    if len(found) != 1:
        return _Change(scale, known, None, None)
    return _Change(scale, applied + found[0][0], *found[0])


def _explanations(before: _State, after: _State) -> Iterator[tuple[int, int]]:
    """The pairs of skipped steps and growths that lead from one state to the other."""
    good = before.good_steps + after.applied - before.applied
    halved = round(math.log2(before.scale / after.scale))
    for growths in range(max(0, -halved), good // before.growth_steps + 1):
        skipped = halved + growths
        # Each skipped step ends a run of good ones, shorter than a growth needs; the last run goes on.
        lost = good - growths * before.growth_steps - after.good_steps
        if 0 <= lost <= skipped * (before.growth_steps - 1):
            yield skipped, growths


def _sum(figures: list[int | None]) -> int | None:
    known = [figure for figure in figures if figure is not None]
    return sum(known) if len(known) == len(figures) else None


def _loss_scaling(model: keras.Model) -> dict[str, LossScaleOptimizer]:
    """The model's optimizers that scale the loss, by attribute name."""
    found: dict[str, LossScaleOptimizer] = {}
    for name, value in {"optimizer": getattr(model, "optimizer", None), **getattr(model, "__dict__", {})}.items():
        if isinstance(value, LossScaleOptimizer) and all(value is not other for other in found.values()):
            found[name] = value
    return found


def _unscaled(model: keras.Model) -> str:
    optimizer = type(getattr(model, "optimizer", None)).__name__
    found = f"Expected an optimizer that scales the loss, for LossScaleLogger to log. Found: {optimizer}"
    layers = [] if model is None else computing_layers(model)
    half = [layer for layer in layers if layer.compute_dtype == "float16"]
    if not half:
        return f"{found}, and no layer that computes in float16. No loss scale is needed: remove LossScaleLogger."
    names = [layer.path or layer.name for layer in half if layer.weights] or [layer.name for layer in half]
    return (
        f"{found}, while these layers compute in float16: {listed(names, _LAYERS_NAMED)}. Their small "
        "gradients are silently lost. Compile with keras.optimizers.LossScaleOptimizer(optimizer)."
    )


def _all_skipped(epoch: int, change: _Change) -> str:
    return (
        f"Expected finite gradients in some of the {change.steps} steps of epoch {epoch}. Found all of them skipped "
        f"for overflow, the loss scale now {change.loss_scale}: nothing was trained. If this continues, look for NaN "
        "in the data and run tfopt.precision.check(model, dataset, {}), which names the layer that overflows."
    )
