"""TrainingCheckpoint: a training that was killed continues where it stopped, bit for bit."""

import contextlib
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Literal, NoReturn

import keras
import numpy as np
import tensorflow as tf

from tfopt import checks
from tfopt.callbacks.local_steps import LocalSteps
from tfopt.callbacks.shared.fit_watch import is_own_handler, share_sigterm
from tfopt.callbacks.shared.running_fit import (
    RESUMED,
    Callback,
    end_with_fit,
    running_list,
)
from tfopt.checkpoint import callback_states
from tfopt.checkpoint.fit_state import Training
from tfopt.checkpoint.folder.reading import Checkpoint, read
from tfopt.checkpoint.folder.store import Store, checked_best
from tfopt.checkpoint.position import DataPosition
from tfopt.checkpoint.processes import Processes
from tfopt.checkpoint.saver import Saver
from tfopt.checkpoint.signals import Signals, checked_signals
from tfopt.distribute.cluster.together import all_or_none
from tfopt.distribute.watchdog.watch import RESTART
from tfopt.errors import UnsupportedError, unknown_name
from tfopt.fit.launching import steps_ahead
from tfopt.internals.fit_door import running_fit
from tfopt.internals.training import print_msg
from tfopt.warn import warn_once


class TrainingCheckpoint(Callback):
    """Saves checkpoints during `fit`, and resumes from the newest one when the script is started again, bit for bit.

    A checkpoint holds everything the training has changed: weights, optimizer, loss scale, metrics of the running
    epoch, random seeds, states of callbacks, and the position in the data. `fit` waits for a copy on the device, and at
    an epoch's end for the previous checkpoint if that is still being written; a thread writes, and `fit` returns once
    the last checkpoint is safe. Arrays that have not changed are not written again.

    On SIGTERM, which Slurm, Kubernetes and spot instances send, it saves after the running step, calls the handler that
    the signal had before, if any, and exits with code 75. A second signal, at least two seconds later, ends the process
    at once.

    A finished training is not repeated: `fit` restores its final state and returns. With more `epochs`, it continues.
    One that a callback stopped within an epoch continues after that step. If it was stopped and its loss is not finite,
    as with `TerminateOnNaN`, it continues from the checkpoint before.

    Args:
        folder: Used by this training only, on a disk that outlives it. `tfopt.checkpoint` lists, verifies and restores
            its checkpoints.
        every_steps: Steps between checkpoints. Default: None.
        every_seconds: Seconds between checkpoints, each saved after the next step. Default: 600; None for no limit.
        every_epochs: Epochs between checkpoints. Default: None. The last epoch is always saved.
        keep: Number of newest checkpoints to keep. Default: 3.
        best: A metric and "min" or "max", such as ("val_loss", "min"): every epoch is saved, and the best is kept too.
        resume: Whether to continue from the folder's newest checkpoint. If False, training starts from scratch, and the
            checkpoints in the folder are removed when its first one is safe.
        signals: Names of the signals that save and exit. Default: ("SIGTERM",).
        on_error: "warn" to continue if a checkpoint cannot be saved, "raise" to stop. Default: "warn".

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If an argument is out of range.

    `fit` raises:
        tfopt.errors.CheckpointError: If another run saves to the folder, it cannot be written, all checkpoints are
            damaged, or the model, optimizer or metrics are not those of the checkpoint.
        tfopt.errors.UnsupportedError: If the training step draws random numbers whose state cannot be saved, or the
            callback is used outside `fit`.
        SystemExit: With code 75 after a signal.

    Example:
        >>> model.fit(dataset, epochs=90, callbacks=[TrainingCheckpoint("checkpoints", every_seconds=300)])
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        every_steps: int | None = None,
        every_seconds: float | None = 600,
        every_epochs: int | None = None,
        keep: int = 3,
        best: tuple[str, str] | None = None,
        resume: bool = True,
        signals: Iterable[str] = ("SIGTERM",),
        on_error: Literal["warn", "raise"] = "warn",
    ):
        super().__init__()
        self._folder = checks.folder("folder", folder, "Name a folder for the checkpoints.")
        self._every_steps = None if every_steps is None else checks.count("every_steps", every_steps, "Pass steps.")
        self._every_epochs = (
            None if every_epochs is None else checks.count("every_epochs", every_epochs, "Pass epochs.")
        )
        self._every_seconds = every_seconds
        if every_seconds is not None:
            self._every_seconds = checks.number("every_seconds", every_seconds, "Pass seconds, or None.", above=0)
        self._keep = checks.integer("keep", keep, "Pass how many checkpoints to keep.", least=1)
        self._best = checked_best(best)
        if on_error not in ("warn", "raise"):
            raise unknown_name("value of on_error", on_error, ("warn", "raise"))
        self._resume, self._on_error = resume, on_error
        self._signals = Signals(checked_signals(signals))
        self._first = _BeforeOthers(self._keep_callbacks)
        self._training: Training | None = None
        self._saver: Saver | None = None
        self._saved_at, self._saved_step = 0.0, 0
        self._is_cut = False  # whether a callback stopped the training within an epoch

    def set_model(self, model: keras.Model) -> None:
        """Moves to the end of fit's list: what it saves must contain what other callbacks do in the same step.

        A helper moves to its front, to record the callbacks' states before a validation begins.
        """
        super().set_model(model)
        running = running_list(self)
        if running is not None and self in running.callbacks:
            # A new list: Keras is walking through the old one.
            others = (each for each in running.callbacks if each not in (self, self._first))
            running.callbacks = [self._first, *others, self]

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Opens the folder, and restores the last checkpoint."""
        fit, running = running_fit(), running_list(self)
        if fit is None or running is None or fit.epochs is None:
            raise UnsupportedError(
                "Expected TrainingCheckpoint in the callbacks of model.fit. Found a custom training loop. Save with "
                "tf.train.Checkpoint in it, or move its body into train_step and call fit."
            )
        others = [each for each in running.callbacks if each not in (self, self._first)]
        self._processes, self._saver = Processes(self.model), None
        with contextlib.ExitStack() as undo:  # a folder that stays locked would refuse the next fit, too
            with all_or_none(self.model.distribute_strategy):
                _refuse(others)
                callback_states.save(others)  # what cannot be saved is refused now
                given = fit.validation_data
                data = None if given is None else keras.utils.unpack_x_y_sample_weight(given)[0]
                data = data if isinstance(data, tf.data.Dataset) else None
                training = Training(self.model, fit.epochs, others, self._processes, data, fit.validation_steps)
                if self._processes.is_chief:
                    store = Store(self._folder, keep=self._keep, best=self._best, replaces=not self._resume)
                    self._saver = Saver(store, self._on_error)
                    undo.callback(self._saver.close)
            self._training = training
            self._close = partial(_close, self._saver, self._signals, training.position)
            end_with_fit(self, self._close)  # also if an exception or SIGTERM ends it
            fit.ends.callback(self._end)
            undo.callback(self._end)
            if self._resume and (found := self._newest(training)):
                training.resume(found, self.params["epochs"])
                self.model.__dict__[RESUMED] = found.step - found.metadata["batch"]
                self._go_on(training)
            undo.pop_all()
        self._saved_at, self._saved_step = time.monotonic(), training.step
        share_sigterm()  # before install: the thread that ends fits may see a signal late, when this handler is gone
        self._signals.install()

    def _newest(self, training: Training) -> Checkpoint | None:
        """The newest whole checkpoint, the same in all processes."""
        with all_or_none(self.model.distribute_strategy):
            found = self._saver.store.read() if self._saver else None
        step = int(self._processes.total(np.int64(found.step if found else -1 if self._saver else 0)))
        with all_or_none(self.model.distribute_strategy):
            found = found if self._saver or step < 0 else read(self._folder, step)
            if found is not None:
                training.expect_adapted(found)
        return found

    def _go_on(self, training: Training) -> None:
        """Reports where the training continues, or that it has ended."""
        epochs = self.params["epochs"]
        stopped = any(getattr(each, "stopped_epoch", 0) for each in training.callbacks)
        if stopped:
            self.model._initial_epoch = epochs
        if self.params.get("verbose"):
            where = f"step {training.step:,} in {os.fspath(self._folder)!r}"
            if stopped or training.epoch >= epochs:
                print_msg(f"Training already complete: restored its final state, {where}.")
            else:
                print_msg(f"Resuming from {where}, in epoch {training.epoch + 1} of {epochs}.")

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Restores the state within an epoch, if it was interrupted."""
        if self._training is not None:
            self._forget_start()
            self._is_cut = False
            self._training.begin_epoch(epoch)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Saves if a checkpoint is due, or a signal was received."""
        training = self._training
        if training is None:
            return
        training.end_step(batch + 1, logs or {})
        if steps_ahead(self.model):
            return  # the weights are those of a later step
        leaves, late = self._processes.agree(training.step, time.monotonic(), *self._wishes())
        every = self._every_steps
        due = late or (every is not None and training.step // every > self._saved_step // every)
        if leaves:
            self._leave(training, training.logs, in_epoch=True)
        elif self.model.stop_training and batch + 1 < (self.params.get("steps") or math.inf):
            self._is_cut = True
            self._save(training, training.logs, in_epoch=True)
        # Alone, do not wait for a slow disk: try again after the next step. Several processes save at the same step.
        elif due and (self._processes.count > 1 or self._saver is None or self._saver.is_free()):
            self._save(training, training.logs, in_epoch=True)

    def _wishes(self) -> tuple[bool, bool]:
        """Whether this process wants to leave, and whether the time for the next checkpoint has come."""
        late = self._every_seconds is not None and time.monotonic() - self._saved_at >= self._every_seconds
        return self._signals.received is not None, late and self._processes.is_chief

    def _keep_callbacks(self) -> None:
        if self._training is not None:
            self._training.keep_callbacks()

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Keeps what the validation may change."""
        if self._training is not None:
            self._training.begin_validation()

    def on_test_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Ends the validation if a signal was received."""
        # Of several processes, none may leave the others alone in an evaluation.
        if self._training is not None and self._signals.received and self._processes.count == 1:
            self.model.stop_evaluating = True

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """Saves the state before the validation if a signal was received in it."""
        if self._training is None:
            return
        if self._signals.received and self._processes.count == 1:
            self._leave(self._training, self._training.logs, in_epoch=True)
        self._training.end_validation()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Saves if a checkpoint is due, and after the last epoch."""
        training = self._training
        if training is None:
            return
        self._expect_metric(logs or {})
        leaves, late = (bool(wished) for wished in self._processes.total(np.array(self._wishes(), np.int64)))
        last = epoch + 1 == self.params["epochs"] or self.model.stop_training
        due = self._best or (self._every_epochs and (epoch + 1) % self._every_epochs == 0)
        if leaves and not self._is_cut:
            self._leave(training, logs or {}, in_epoch=False)
        elif (due or late or last) and not self._is_cut:
            self._save(training, logs or {}, in_epoch=False)

    def _expect_metric(self, logs: Mapping[str, Any]) -> None:
        """Warns if the metric for `best` is missing; an epoch without any `val_` metric was not validated."""
        if self._best is None or self._best[0] in logs:
            return
        if not self._best[0].startswith("val_") or any(name.startswith("val_") for name in logs):
            warn_once(
                f"best {self._best[0]}",
                f"Expected the metric {self._best[0]!r} of `best` in the epoch's logs. Found: {', '.join(logs)}. No "
                "checkpoint is kept as the best. Pass one of the metrics found.",
            )

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Waits until the last checkpoint is safe."""
        try:
            if self._saver:
                self._saver.wait(ended=True)
        except BaseException:
            self._end()
            raise
        if self._signals.received:
            ended = "stopped" if self._is_cut else "complete"
            print_msg(f"\n{self._signals.received}: the training is {ended}, and saved in {os.fspath(self._folder)!r}.")
            self._exit()
        self._end()

    def _forget_start(self) -> None:
        """Makes the next fit begin at its own epoch, and its loggers count from there."""
        self.model._initial_epoch = None
        self.model.__dict__.pop(RESUMED, None)

    def _end(self) -> None:
        self._training = None
        self._forget_start()
        self._close()

    def _exit(self) -> NoReturn:
        """Exits as the signal asked, after the handler that it had before."""
        name, earlier = self._signals.received, self._signals.earlier_handler()
        self._signals.leave(RESTART, is_own_handler)
        if earlier is not None and not is_own_handler(earlier):
            with contextlib.suppress(SystemExit, KeyboardInterrupt):  # neither would say that the training can continue
                earlier(signal.Signals[str(name)], None)
        self._end()
        sys.exit(RESTART)

    def _save(self, training: Training, logs: Mapping[str, Any], *, in_epoch: bool) -> None:
        # A restart would stop at once, and a few of them would leave no checkpoint from before it went wrong.
        if self.model.stop_training and not np.isfinite(training.logs.get("loss", 0.0)).all():
            return
        if self._saver:
            self._saver.wait()  # before copying: memory for one copy is enough
        state = training.save(logs, in_epoch=in_epoch)
        if self._saver:
            self._saver.put(training.step, *state)
        self._saved_at, self._saved_step = time.monotonic(), training.step

    def _leave(self, training: Training, logs: Mapping[str, Any], *, in_epoch: bool) -> None:
        """Saves, then exits as the signal asked. With `on_error="raise"`, a failed save raises instead."""
        self._save(training, logs, in_epoch=in_epoch)
        if self._saver:
            done = (
                f"saved step {self._saved_step:,} to"
                if self._saver.wait()
                else f"could not save step {self._saved_step:,} to"
            )
            again = " Run the same command again to continue." if self._resume else ""
            name = self._signals.received or "Signal to another process"
            print_msg(f"\n{name}: {done} {os.fspath(self._folder)!r}.{again}")
        self._processes.total(0)  # nobody leaves before the checkpoint is safe
        self._exit()


class _BeforeOthers(keras.callbacks.Callback):
    """The first in fit's list."""

    def __init__(self, keep_callbacks: Callable[[], None]):
        super().__init__()
        self._keep_callbacks = keep_callbacks

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._keep_callbacks()


def _close(saver: Saver | None, signals: Signals, position: DataPosition) -> None:
    """Restores the signal handlers and releases the data and the folder; a second call does nothing."""
    signals.remove()
    position.close()
    if saver:
        saver.close()


def _refuse(callbacks: Iterable[keras.callbacks.Callback]) -> None:
    """Raises UnsupportedError for callbacks that prevent an exact resume."""
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.BackupAndRestore | LocalSteps | TrainingCheckpoint):
            name = type(callback).__name__
            why = (
                "has state between steps that is not saved" if name == "LocalSteps" else "restores the training as well"
            )
            raise UnsupportedError(
                f"Expected TrainingCheckpoint alone to resume the training. Found {name} in fit's callbacks, which "
                f"{why}. Remove one of the two."
            )
