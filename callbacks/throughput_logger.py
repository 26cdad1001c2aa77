"""How fast `fit` trains."""

import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfopt.callbacks.input_wait import InputWait
from tfopt.callbacks.order import warn_of_earlier_loggers
from tfopt.callbacks.rows import RowWriter, check_formats, check_log_dir

_COLUMNS = ("time_seconds", "epoch", "step", "step_time_ms", "examples_per_second", "input_wait_percent")


class ThroughputLogger(keras.callbacks.Callback):
    """Logs step time and examples per second of `model.fit`, without the first step, which traces and compiles.

    In `logs`, and so in Keras' history and in loggers that stand after this callback: `step_time_ms`, the median over
    the epoch's last `window_steps` steps, input included, and `examples_per_second`, over the whole epoch: without
    validation, with the start of the input, which makes it less than a batch over the median. Examples are counted by
    Keras' own loss tracker, a smaller last batch included; where another callback has reset that (by `evaluate`), each
    batch counts as large as the first. A model whose `train_step` does not update it has no `examples_per_second`. In a
    training of one step, that step is all there is, tracing and compilation included. `input_wait_percent` is the share
    of the epoch's time, without its last step, in which the host waited for a batch: near 0 the model sets the pace,
    near 100 the input does. It comes from tf.data's own timing, and is absent where that has none: under a distribution
    strategy, and for a dataset whose autotuning is off. It is absent, too, with `steps_per_execution` above one, where
    a batch is taken while the step before still runs, with `run_eagerly`, and where an epoch or window has fewer than
    five steps to go by: an epoch's last step and the first of the training tell nothing.

    In files: `throughput.csv` and `throughput.jsonl`, a row after every `window_steps` steps, across epochs, and one
    for what remains at the end, with the columns `time_seconds` (since 1970), `epoch`, `step` (of the epoch),
    `step_time_ms` (median of the window), `examples_per_second` (of the window, taking each batch as large as the
    first) and `input_wait_percent` (of the window).

    Args:
        log_dir: Folder for the files. None: only epoch logs.
        window_steps: Steps in a window. Default 100.
        formats: Which files: "csv", "jsonl".
        clock: Seconds, monotonic.

    Attributes:
        first_step_seconds: What the first step took, with tracing and compilation; None before it.

    Raises:
        ValueError: An unknown format, `window_steps` below 1, or a `log_dir` that can be no folder.

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
        if isinstance(window_steps, bool) or not isinstance(window_steps, int) or window_steps < 1:
            raise ValueError(f"Expected window_steps to be an integer of at least 1. Received: {window_steps!r}.")
        self._log_dir = check_log_dir(log_dir)
        self._window_steps = window_steps
        self._formats = check_formats(formats)
        self._clock = clock
        self._writer: RowWriter | None = None
        self._input = InputWait()
        self.first_step_seconds: float | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Opens the files."""
        warn_of_earlier_loggers(self)
        self._close()  # an exception ended the fit before, without on_train_end
        self.first_step_seconds = None
        self._batch_size: float | None = None
        self._unwritten: list[float] = []
        self._input.begin()
        if self._log_dir is not None:
            self._writer = RowWriter(self._log_dir, "throughput", self._formats, _COLUMNS)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Starts the epoch's figures."""
        self._epoch = epoch
        self._steps: deque[float] = deque(maxlen=self._window_steps)
        self._counted: float | None = None
        self._left_out = 0  # steps of the first execution, whose time is not counted
        self._seconds = 0.0
        self._done = 0
        self._last = self._clock()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Times the step; with `steps_per_execution` above one, several at once."""
        now = self._clock()
        seconds, self._last = now - self._last, now
        steps, self._done = batch + 1 - self._done, batch + 1
        self._follow_input(seconds, steps)
        if self._done == self.params.get("steps"):
            self._counted = self._count()  # before validation, or another callback's, resets it
        if self.first_step_seconds is None:
            self.first_step_seconds = seconds
            # The one tensor read before an epoch's end; tracing and compiling have just kept the host waiting anyway.
            self._batch_size = self._count() / steps or None
            self._left_out = steps
            return
        self._seconds += seconds
        self._steps.extend([seconds / steps] * steps)
        self._unwritten.extend([seconds / steps] * steps)
        if len(self._unwritten) >= self._window_steps:
            self._write()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the epoch's figures to the logs."""
        wait_percent = self._input.end_epoch()
        if logs is None or not self._done:
            return
        first = self.first_step_seconds or 0.0
        only = not self._steps  # a training of one execution: the first is all there is
        logs["step_time_ms"] = 1000 * (first / self._done if only else statistics.median(self._steps))
        examples, seconds = self._examples(0 if only else self._left_out), first if only else self._seconds
        if examples and seconds > 0:
            logs["examples_per_second"] = examples / seconds
        if wait_percent is not None:
            logs["input_wait_percent"] = wait_percent

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Writes what remains and closes the files."""
        if self._unwritten:
            self._write()
        self._close()

    def _examples(self, left_out: int) -> float:
        """Examples of the epoch, without those of its first `left_out` steps; 0 where unknown."""
        if not self._batch_size:
            return 0.0
        counted = self._count() if self._counted is None else self._counted
        # Steps of one size, the last perhaps smaller: any other count is not this epoch's.
        if not (self._done - 1) * self._batch_size < counted <= self._done * self._batch_size:
            counted = self._done * self._batch_size
        return counted - left_out * self._batch_size

    def _count(self) -> float:
        """The examples since the last reset: Keras weights its mean loss with them."""
        tracker = getattr(self.model, "_loss_tracker", None)
        return 0.0 if tracker is None else float(tracker.count.numpy())

    def _follow_input(self, seconds: float, steps: int) -> None:
        if getattr(self.model, "steps_per_execution", 1) != 1:
            return  # a batch is taken while the step before still runs
        if getattr(self.model, "run_eagerly", False) or tf.config.functions_run_eagerly():
            return  # tried: shares were wrong by up to a half
        if steps == self._done:
            self._input.end_first_step(None if self.first_step_seconds is None else seconds)
        else:
            self._input.end_step(seconds)

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
            "input_wait_percent": self._input.end_window(),
        }
        self._writer.write(row)

    def _close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
