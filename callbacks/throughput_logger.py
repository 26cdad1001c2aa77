"""How fast `fit` trains."""

import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import keras

from tfopt.callbacks.order import warn_of_earlier_loggers
from tfopt.callbacks.rows import RowWriter, check_formats

_COLUMNS = ("time_seconds", "epoch", "step", "step_time_ms", "examples_per_second")


class ThroughputLogger(keras.callbacks.Callback):
    """Logs step time and examples per second of `model.fit`, without the first step, which traces and compiles.

    In `logs`, and so in Keras' history and in loggers that stand after this callback: `step_time_ms`, the median over
    the epoch's last `window_steps` steps, input included, and `examples_per_second`, over the whole epoch without
    validation. Examples are counted by Keras' own loss tracker, uneven batches included; a model whose `train_step`
    does not update it has no `examples_per_second`. A training of one step has neither.

    In files: `throughput.csv` and `throughput.jsonl`, a row after every `window_steps` steps, across epochs, and one
    for what remains at the end, with the columns `time_seconds` (since 1970), `epoch`, `step` (of the epoch),
    `step_time_ms` (median of the window) and `examples_per_second` (of the window, taking each batch as large as the
    first).

    Args:
        log_dir: Folder for the files. None: only epoch logs.
        window_steps: Steps in a window. Default 100.
        formats: Which files: "csv", "jsonl".
        clock: Seconds, monotonic.

    Attributes:
        first_step_seconds: What the first step took, with tracing and compilation; None before it.

    Raises:
        ValueError: An unknown format, or `window_steps` below 1.

    Example:
        >>> model.fit(dataset, callbacks=[tfopt.callbacks.ThroughputLogger("logs")])
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str] | None = None,
        window_steps: int = 100,
        formats: Sequence[str] = ("csv", "jsonl"),
        *,
        clock: Callable[[], float] = time.perf_counter,
    ):
        super().__init__()
        if not isinstance(window_steps, int) or window_steps < 1:
            raise ValueError(f"Expected window_steps to be an integer of at least 1. Received: {window_steps!r}.")
        self._log_dir = log_dir
        self._window_steps = window_steps
        self._formats = check_formats(formats)
        self._clock = clock
        self._writer: RowWriter | None = None
        self.first_step_seconds: float | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Opens the files."""
        warn_of_earlier_loggers(self)
        self._close()  # an exception ended the fit before, without on_train_end
        self.first_step_seconds = None
        self._batch_size: float | None = None
        self._unwritten: list[float] = []
        if self._log_dir is not None:
            self._writer = RowWriter(self._log_dir, "throughput", self._formats, _COLUMNS)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Starts the epoch's figures."""
        self._epoch = epoch
        self._steps: deque[float] = deque(maxlen=self._window_steps)
        self._examples: float | None = None
        self._left_out = 0.0  # examples of the first step, whose time is not counted
        self._seconds = 0.0
        self._done = 0
        self._last = self._clock()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Times the step; with `steps_per_execution` above one, several at once."""
        now = self._clock()
        seconds, self._last = now - self._last, now
        steps, self._done = batch + 1 - self._done, batch + 1
        if self.first_step_seconds is None:
            self.first_step_seconds = seconds
            # The one tensor read before the epoch's end; tracing and compiling have just kept the host waiting anyway.
            self._left_out = self._counted()
            self._batch_size = self._left_out / steps or None
            return
        self._seconds += seconds
        self._steps.extend([seconds / steps] * steps)
        self._unwritten.extend([seconds / steps] * steps)
        if len(self._unwritten) >= self._window_steps:
            self._write()

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Takes the count of examples before validation resets it."""
        self._examples = self._counted()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the epoch's figures to the logs."""
        examples = (self._counted() if self._examples is None else self._examples) - self._left_out
        if logs is None or not self._steps or self._seconds <= 0:
            return
        logs["step_time_ms"] = statistics.median(self._steps) * 1000
        if examples > 0:
            logs["examples_per_second"] = examples / self._seconds

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Writes what remains and closes the files."""
        if self._unwritten:
            self._write()
        self._close()

    def _counted(self) -> float:
        """The examples of this epoch so far: Keras weights its mean loss with them."""
        tracker = getattr(self.model, "_loss_tracker", None)
        return 0.0 if tracker is None else float(tracker.count.numpy())

    def _write(self) -> None:
        window, self._unwritten = self._unwritten, []
        if self._writer is None:
            return
        seconds = sum(window)
        row = {
            "time_seconds": time.time(),
            "epoch": self._epoch,
            "step": self._done,
            "step_time_ms": statistics.median(window) * 1000,
            "examples_per_second": self._batch_size * len(window) / seconds
            if self._batch_size and seconds > 0
            else None,
        }
        self._writer.write(row)

    def _close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
