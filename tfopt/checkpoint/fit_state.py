"""The state of a running `fit`: collected for a checkpoint, and restored from one."""

from collections import ChainMap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfopt
from tfopt.checkpoint import callback_states
from tfopt.checkpoint.adapted import adapted, require_same_adapted
from tfopt.checkpoint.folder.reading import Checkpoint
from tfopt.checkpoint.openings import ValidationData
from tfopt.checkpoint.position import DataPosition
from tfopt.checkpoint.processes import Processes
from tfopt.checkpoint.variables import (
    METRICS,
    Copies,
    Part,
    assign,
    built_parts,
    parts_of,
    renamed,
    require_same,
    saved_in,
    step_graphs,
    trained_by_optimizers,
)
from tfopt.model.state import optimizers_of
from tfopt.warn import warn_once


class Training:
    """The state of a `fit`.

    Args:
        model: The model that trains.
        epochs: The `TFEpochIterator` of the running `fit`.
        callbacks: The other callbacks of the running `fit`, whose states are saved too.
        processes: The processes that train the model.
        validation: The validation data of the running `fit`, if they are a dataset.
        validation_steps: Of each validation, if `fit` was told.
    """

    def __init__(
        self,
        model: keras.Model,
        epochs: Any,
        callbacks: Sequence[keras.callbacks.Callback],
        processes: Processes,
        validation: tf.data.Dataset | None,
        validation_steps: int | None,
    ):
        self.epoch = 0
        """The running epoch."""
        self.step = 0
        """Batches trained on, in all epochs."""
        self.callbacks = callbacks
        """The callbacks whose states are saved."""
        self.logs: Mapping[str, Any] = {}
        """Of the last step."""
        self._model, self._processes = model, processes
        self._adapted = adapted(model, getattr(epochs.data_adapter, "_dataset", None))
        self._rates = _learning_rates(model)  # that the script has set
        self._spec = epochs._distributed_dataset.element_spec
        self.position = DataPosition(epochs)
        """The position in the data."""
        self._before_epoch = 0  # steps
        self._parts: dict[str, Part] = {}
        self._is_traced = False  # whether this fit's step has been inspected
        self._before: Copies | None = None  # the validation of the running epoch
        self._position_before: tuple[dict[str, Any], dict[str, np.ndarray]] | None = None
        self._callbacks_before: callback_states.State = {}, {}
        self._validations = ValidationData(model, validation, validation_steps)
        self._rest: Checkpoint | None = None  # restored when its epoch begins

    def begin_epoch(self, epoch: int) -> None:
        """Begins an epoch; restores the state within it if it was interrupted."""
        self.epoch, self._before_epoch, self._before, self._position_before = epoch, self.step, None, None
        self.position.begin_epoch()
        found, self._rest = self._rest, None
        if found is not None:
            batch = self._find_position(found, in_epoch=True)
            self._restore(found, in_epoch=batch > 0)
            self.step, self._before_epoch = found.step, found.step - batch
            self.logs = found.metadata["logs"]
            self._keep_logs(found.metadata["logs"])

    def end_step(self, batch: int, logs: Mapping[str, Any]) -> None:
        """Counts the batches of this epoch that were trained on."""
        self.step, self.logs = self._before_epoch + batch, logs
        self.position.step(batch)
        if not self._is_traced:
            self._parts = parts_of(self._model, self._processes, step_graphs(self._model, self._spec))
            self._is_traced = True

    def keep_callbacks(self) -> None:
        """Keeps the callbacks' states; called before any of them learns that a validation begins."""
        self._callbacks_before = callback_states.save(self.callbacks)

    def begin_validation(self) -> None:
        """Keeps what the validation may change, such as metrics and seeds; called after all other callbacks."""
        trained = trained_by_optimizers(self._model)
        changing = {
            name: part
            for name, part in self._parts.items()
            if not name.startswith("optimizer/") and trained.isdisjoint(map(id, part.variables))
        }
        self._before = Copies(changing, self._processes)
        shares = self._validations.openings.shares(self.position.openings)
        self._position_before = self.position.save(in_epoch=True, over=True) if shares else None

    def end_validation(self) -> None:
        """Ends the validation."""
        self._validations.end()

    def save(self, logs: Mapping[str, Any], *, in_epoch: bool) -> tuple[Mapping[str, np.ndarray], dict[str, Any]]:
        """Returns the state as arrays, which are copies on the device, and JSON values.

        Args:
            logs: Of the last step; at an epoch's end, of the epoch.
            in_epoch: Whether the running epoch is not over.
        """
        numbers = _numbers(logs)
        before = self._before if in_epoch else None
        callbacks, kept = self._callbacks_before if before is not None else callback_states.save(self.callbacks)
        at_validation = self._position_before if in_epoch else None
        data, state = at_validation or self.position.save(in_epoch=in_epoch, over=before is not None)
        metadata = {
            "epoch": self.epoch if in_epoch else self.epoch + 1,
            "batch": data["batch"],
            "metrics": {} if in_epoch else numbers,
            "logs": numbers if in_epoch else {},
            "data": data,
            "validations": self._validations.before if before is not None else self._validations.now(),
            "callbacks": callbacks,
            "learning_rates": self._rates,
            "by_replica": [name for name, part in self._parts.items() if part.rows is not None],
            "versions": {"tfopt": tfopt.__version__, "keras": keras.__version__, "tensorflow": tf.__version__},
        }
        arrays: list[Mapping[str, np.ndarray]] = [kept, state, self._adapted, Copies(self._parts, self._processes)]
        return ChainMap(*([] if before is None else [before]), *arrays), metadata  # type: ignore[arg-type]

    def expect_adapted(self, found: Checkpoint) -> None:
        """Raises CheckpointError if layers have adapted something else than those of a checkpoint."""
        require_same_adapted(self._adapted, found.arrays, str(found.path))

    def resume(self, found: Checkpoint, epochs: int) -> None:
        """Continues from a checkpoint, up to an epoch.

        Call it before the first epoch, after `on_train_begin` of all other callbacks.

        Raises:
            tfopt.errors.CheckpointError: If the model, optimizer or metrics differ.
        """
        self.epoch, self.step = found.metadata["epoch"], found.step
        self._model._initial_epoch = self.epoch
        if found.metadata["batch"] and self.epoch < epochs:
            # Other callbacks repeat what they do when an epoch begins, such as setting the learning rate.
            self._rest = found
        else:
            self._find_position(found, in_epoch=False)
            self._restore(found, in_epoch=found.metadata["batch"] > 0)

    def _find_position(self, found: Checkpoint, *, in_epoch: bool) -> int:
        validations = found.metadata.get("validations", 0)  # none from earlier versions, or how often they were opened
        if isinstance(validations, int):
            validations = {"opened": validations, "places": []}
        data = found.metadata["data"]
        fits = self.position.fits(data)
        if fits:
            self._validations.resume(validations)
        batch = self.position.resume(data, found.arrays, in_epoch=in_epoch, validations=self._validations)
        if fits:
            self._validations.resume_draws(validations)
        return batch

    def _restore(self, found: Checkpoint, *, in_epoch: bool) -> None:
        saved = saved_in(found)
        parts = renamed(built_parts(self._model, self._processes, self._spec, saved), saved, self._model)
        self._parts = parts  # complete even if no step of this epoch is left to trace
        if not in_epoch:  # an epoch that begins has reset its metrics
            saved = {name: content for name, content in saved.items() if not name.startswith(METRICS)}
            parts = {name: part for name, part in parts.items() if not name.startswith(METRICS)}
        require_same(parts, saved, str(found.path))
        assign(parts, found.arrays, self._processes.first)
        self._compare_rates(found)
        callback_states.restore(self.callbacks, found.metadata["callbacks"], found.arrays)

    def _compare_rates(self, found: Checkpoint) -> None:
        """Warns if the script has been given another learning rate since, which the checkpoint's replaces."""
        begun = found.metadata.get("learning_rates", self._rates)  # none from earlier versions
        for name, rate in self._rates.items():
            if name in begun and rate not in (begun[name], restored := _learning_rates(self._model)[name]):
                warn_once(
                    f"learning rate {name}",
                    f"Expected the learning rate that the training began with, {begun[name]:g}. Found {rate:g} in the "
                    f"script. The checkpoint's is used: {restored:g}. To go on with another one, set it in a "
                    "keras.callbacks.LearningRateScheduler, or begin in another folder.",
                )
        self._rates = begun

    def _keep_logs(self, logs: dict[str, float]) -> None:
        """Makes an epoch with no steps left report the logs of its last step."""
        model: Any = self._model
        stock = model._get_metrics_result_or_logs

        def first(found: Any) -> Any:
            del model.__dict__["_get_metrics_result_or_logs"]
            return stock(found or logs)

        model.__dict__["_get_metrics_result_or_logs"] = first


def _learning_rates(model: keras.Model) -> dict[str, float]:
    """The learning rates of a model's optimizers that are numbers, and no schedules."""
    rates = {}
    for optimizer, where in {model.optimizer: "'optimizer'", **optimizers_of(model)}.items():
        rate = getattr(getattr(optimizer, "inner_optimizer", optimizer), "_learning_rate", None)
        if isinstance(rate, keras.Variable):
            rates[where] = float(rate.numpy())
    return rates


def _numbers(logs: Mapping[str, Any]) -> dict[str, float]:
    """The logs that are numbers."""
    found = {}
    for name, value in logs.items():
        with suppress(TypeError, ValueError):  # such as a confusion matrix
            found[name] = float(value)
    return found
