"""Logs what XLA compiles during `fit`."""

import time
import warnings
from typing import Any

from tfopt.callbacks.shared.running_fit import Callback, end_with_fit, warn_of_earlier_loggers
from tfopt.checks import integer
from tfopt.errors import TfoptError
from tfopt.xla.recompilation import check_stance, react, repeated_compilation
from tfopt.xla.watching import Compilations, Watch

_COMPILING_SECONDS = 0.005  # no compilation is shorter
_WAIT_SECONDS = 0.03  # how long the end of fit waits for reports: the last epoch's end has waited for those before


class CompilationLogger(Callback):
    """Logs what XLA compiles during `model.fit`; if it keeps recompiling, warns, stops, or continues without XLA.

    XLA recompiles a step for every new batch shape, which takes seconds or minutes, without a word from Keras. Training
    needs one compilation, two with validation, and as many again if the last batch is smaller. If one function is
    compiled more than `max_compilations` times, the message names the argument that changes and the remedy.

    In `logs`, and so in Keras' history and later loggers: `xla_compilations` and `xla_compilation_seconds` of the epoch
    with its validation and what other callbacks compile. Meanwhile, standard error passes through a process
    (`tfopt.xla.watch`). Both are 0 without `jit_compile`, and absent if XLA's reports are unavailable.

    Args:
        max_compilations: Tolerated compilations of one function in one `fit`. Default 4: training and validation, each
            with a smaller last batch. With batches bucketed by length, give the number of buckets.
        on_recompile: What to do beyond that, at the end of the step in which it happened. "warn": warn once. "error":
            end `fit` with a `tfopt.errors.TfoptError`. "eager": warn, and run the model without XLA from the next step
            on, until `tfopt.xla.set_jit(model, True)`. The compilation that exceeded the limit has happened by then.

    Raises:
        ValueError: If `max_compilations` is below 1, or `on_recompile` is none of the above.
        TypeError: If `max_compilations` is not an integer.

    Example:
        >>> model.fit(dataset, callbacks=[tfopt.callbacks.CompilationLogger()])
    """

    def __init__(self, max_compilations: int = 4, *, on_recompile: str = "warn"):
        super().__init__()
        check_stance(on_recompile)
        self._on_recompile = on_recompile
        self._max_compilations = integer(
            "max_compilations", max_compilations, "A training whose last batch is smaller needs 2.", least=1
        )
        self._watch: Watch | None = None
        self.compilations: Compilations | None = None
        """The compilations of the last `fit`; None before the first."""
        self._executions, self._reacted, self._looked = 0, False, 0.0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Starts watching."""
        warn_of_earlier_loggers(self)
        self._end()  # if an exception ended the previous fit
        self._watch = Watch()
        self.compilations = self._watch.compilations
        self._logged = self._executions = 0
        self._looked = 0.0
        self._reacted = False
        if self.compilations.reason:
            warnings.warn(f"No xla_compilations will be logged. {self.compilations.reason}", stacklevel=2)
        end_with_fit(self, self._watch.stop, at_exit=False)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Looks for repeated compilations."""
        self._look()

    def on_test_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Looks for repeated compilations in the validation."""
        if self._watch is not None:
            self._look()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the epoch's figures to the logs."""
        if self._watch is None or self.compilations is None:
            return
        self._react()
        events = self.compilations.events[self._logged :]
        self._logged += len(events)
        if logs is not None and self.compilations.source == "compilations":
            logs["xla_compilations"] = len(events)
            logs["xla_compilation_seconds"] = sum((event.seconds or 0.0 for event in events), 0.0)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Stops watching."""
        self._end()

    def _look(self) -> None:
        """Reads the reports, which takes a millisecond, if there are any; one may be late, so also at 1, 2, 4, 8, …"""
        self._executions += 1
        now, before = time.monotonic(), self._looked
        reported = False
        if now - before > _COMPILING_SECONDS:
            self._looked = now
            reported = self.compilations is not None and self.compilations.changed
        if reported or self._executions & (self._executions - 1) == 0:
            self._react()

    def _react(self) -> None:
        if self._reacted or self.compilations is None:
            return
        found = repeated_compilation(self.compilations.events, self._max_compilations)
        if found:
            self._reacted = True
            try:
                react(found, self._on_recompile, [self.model])
            except TfoptError:
                self._end()  # fit ends without on_train_end
                raise

    def _end(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.stop(_WAIT_SECONDS)
