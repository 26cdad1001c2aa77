"""Logs what XLA compiles during `fit`."""

from typing import Any

from tfopt.callbacks.shared.running_fit import Callback, end_with_fit, warn_of_earlier_loggers
from tfopt.checks import integer
from tfopt.errors import TfoptError
from tfopt.xla.compilations.recompilation import check_stance, react, repeated_compilation
from tfopt.xla.compilations.watching import Compilations


class CompilationLogger(Callback):
    """Logs what XLA compiles during `model.fit`; if it keeps recompiling, warns, stops, or continues without XLA.

    XLA recompiles a step for every new batch shape, which takes seconds or minutes, without a word from Keras. Training
    needs one compilation, two with validation, and as many again if the last batch is smaller. If one function is
    compiled more than `max_compilations` times, the message names the argument that changes and the remedy.

    In `logs`, and so in Keras' history and later loggers: `xla_compilations` and `xla_compilation_seconds` of the epoch
    with its validation and what other callbacks compile. Both are 0 without `jit_compile`. As in `tfopt.xla.watch`,
    which says what it does not see, they are the input signatures that ran for the first time, and the wall time of
    those runs.

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
        self.compilations: Compilations | None = None
        """The compilations of the last `fit`; None before the first."""
        self._logged, self._seen, self._reacted = 0, 0, False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Starts watching."""
        warn_of_earlier_loggers(self)
        self._end()  # if an exception ended the previous fit
        self.compilations = Compilations()
        self._logged, self._seen, self._reacted = 0, 0, False
        end_with_fit(self, self.compilations.end, at_exit=False)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Looks for repeated compilations."""
        self._react()

    def on_test_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Looks for repeated compilations in the validation."""
        self._react()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the epoch's figures to the logs."""
        if self.compilations is None or self.compilations.ended:
            return
        self._react()
        events = self.compilations.events[self._logged :]
        self._logged += len(events)
        if logs is not None:
            logs["xla_compilations"] = len(events)
            logs["xla_compilation_seconds"] = sum((event.seconds for event in events), 0.0)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Stops watching."""
        self._end()

    def _react(self) -> None:
        if self._reacted or self.compilations is None or self.compilations.ended:
            return
        events = self.compilations.events
        if len(events) == self._seen:
            return
        self._seen = len(events)
        found = repeated_compilation(events, self._max_compilations)
        if found:
            self._reacted = True
            try:
                react(found, self._on_recompile, [self.model])
            except TfoptError:
                self._end()  # fit ends without on_train_end
                raise

    def _end(self) -> None:
        if self.compilations is not None:
            self.compilations.end()
