"""How fast `fit` trains."""

import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras

from tfopt.callbacks.background import end_with_fit
from tfopt.callbacks.epoch_examples import EpochExamples
from tfopt.callbacks.files.background_rows import BackgroundRows
from tfopt.callbacks.files.rows import check_formats
from tfopt.callbacks.order import warn_of_earlier_loggers
from tfopt.callbacks.sources import Listeners
from tfopt.callbacks.steps_trained import steps_trained
from tfopt.callbacks.throughput.input_wait import InputWait, takes_a_batch_a_step
from tfopt.callbacks.throughput.model_rate import ModelRate, model_rate
from tfopt.callbacks.throughput.step_window import StepWindow
from tfopt.callbacks.throughput.time_left import TimeLeft
from tfopt.checks import integer, log_folder, number

_TOLD_EVERY_SECONDS = 1.0
# Of what it tells, how fast the training is.
THROUGHPUT_KEYS = (
    "step_time_ms",
    "step_time_p95_ms",
    "step_time_p99_ms",
    "examples_per_second",
    "input_wait_percent",
    "model_tflops_per_second",
    "mfu_percent",
)
_COLUMNS = ("time_seconds", "epoch", "step", *THROUGHPUT_KEYS, "eta_seconds")


class ThroughputLogger(keras.callbacks.Callback):
    """Logs step time, examples per second, model FLOPs and the time that is left of `model.fit`.

    The first step, which traces and compiles, is in none of these. Later steps that compile are: `CompilationLogger`
    logs their `xla_compilation_seconds`. All durations come from a monotonic clock.

    In `logs`, and so in Keras' history and in loggers that stand after this callback:

    - `step_time_ms`, `step_time_p95_ms`, `step_time_p99_ms`: median, 95th and 99th percentile of the epoch's last
      `window_steps` steps, input included, in an epoch's first step its start too. With `steps_per_execution` above
      one, of the executions' means; with `tfopt.fit.overlap` on a GPU, of groups of steps: those launched ahead return
      at once, and then one waits.
    - `examples_per_second`: over the whole epoch, without validation, with the start of the input, which makes it less
      than a batch over the median. Examples, those of all replicas, are counted by Keras' own loss tracker, a smaller
      last batch included; where another callback has reset that (by `evaluate`), each batch counts as large as the
      first. A model whose `train_step` does not update it has no `examples_per_second`. In a training of one step,
      that step is all there is, tracing and compilation included.
    - `input_wait_percent`: the share of the epoch's time, without its last step, in which the host waited for a batch:
      near 0 the model sets the pace, near 100 the input does. It comes from tf.data's own timing, and is absent where
      that has none: under a distribution strategy, and for a dataset whose autotuning is off. It is absent, too, with
      `steps_per_execution` above one, where a batch is taken while the step before still runs, with `run_eagerly`, and
      where an epoch or window has fewer than five steps to go by: an epoch's last step and the first of the training
      tell nothing.
    - `model_tflops_per_second`: `flops_per_example` times `examples_per_second`, in 10¹² operations; `mfu_percent`,
      model FLOPs utilisation: their share of `peak_tflops` (Chowdhery et al., "PaLM", 2022, appendix B). Absent where
      they are unknown.
    - `eta_seconds`: what is left of the fit, at the pace of its steps so far, with the validations and whatever else
      lies between epochs, once seen. Absent where the number of steps is unknown and no epoch has ended.
    - `first_step_seconds`: what the first step took, in the epoch in which it fell.

    In files: `throughput.csv` and `throughput.jsonl`, a row after every `window_steps` steps, across epochs, and one
    for what remains at the end, with the columns `time_seconds` (since 1970), `epoch`, `step` (of the epoch), and the
    keys above, without `first_step_seconds`, of the window; `examples_per_second` takes each batch as large as the
    first.

    Args:
        log_dir: Folder for the files. None: only epoch logs.
        window_steps: Steps in a window. Default 100.
        formats: Which files: "csv", "jsonl", and "tensorboard" where that is installed.
        flops_per_example: Floating-point operations of a training step on one example, a multiply-add being two. None:
            three times those of the forward pass's matrix products, counted from Keras' layers when `fit` begins; a
            layer that freezes its weights has a cheaper backward pass, and where nothing before it trains either, none.
            Where a layer's are not known, it is named once, and there are none.
        peak_tflops: What one device can do, in 10¹² operations per second; `tfopt.measure.matmul_tflops` measures it.
            None: as NVIDIA lists it for this GPU and the dtype that most of the operations run in.
        clock: Seconds, monotonic.

    Attributes:
        first_step_seconds: What the first step took, with tracing and compilation; None before it.
        batch_size: Examples of a step, those of all replicas; None before the first, 0 where Keras counts none.
        flops_per_example: As given, or as counted when the last fit began; None where unknown.
        peak_tflops: Of all devices of the last fit together; None where unknown.
        listeners: Told, in the training thread, of the steps since they were last told (a dict with a file row's
            fields), about once a second and at an epoch's end.

    Raises:
        ValueError: An unknown format, `window_steps` below 1, FLOPs that are not above 0, or a `log_dir` that can be no
            folder.
        TypeError: `log_dir` is no path, `window_steps` no integer, or FLOPs that are no number.
        tfopt.errors.UnsupportedError: TensorBoard is asked for and not installed.

    Example:
        >>> model.fit(dataset, callbacks=[tfopt.callbacks.ThroughputLogger("logs")])
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str] | None = None,
        window_steps: int = 100,
        formats: Sequence[str] = ("csv", "jsonl"),
        *,
        flops_per_example: float | None = None,
        peak_tflops: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        super().__init__()
        self._log_dir = log_folder(log_dir)
        self._window_steps = integer("window_steps", window_steps, "Give a number of steps.", least=1)
        self._formats = check_formats(formats)
        self._given_flops = _positive("flops_per_example", flops_per_example)
        self._given_peak = _positive("peak_tflops", peak_tflops)
        self._clock = clock
        self._writer: BackgroundRows | None = None
        self._input = InputWait()
        self._rate = ModelRate(self._given_flops, None)
        self.first_step_seconds: float | None = None
        self.batch_size: float | None = None
        self.listeners = Listeners()

    @property
    def flops_per_example(self) -> float | None:
        """FLOPs of a training step on one example."""
        return self._rate.flops_per_example

    @property
    def peak_tflops(self) -> float | None:
        """TFLOPS that all devices of the fit can do together."""
        return self._rate.peak_tflops

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Opens the files, and counts the model's operations."""
        warn_of_earlier_loggers(self)
        self._close()  # an exception ended the fit before, without on_train_end
        self.first_step_seconds = self.batch_size = None
        self._examples = EpochExamples(self.model)
        self._unwritten, self._untold = StepWindow(), StepWindow()
        self._uncounted: list[tuple[int, float]] = []  # executions: the last batch of each, and when it ended
        self._left = TimeLeft()
        self._ended_at: float | None = None
        self._trained = self._done = 0
        params = self.params or {}
        self._epochs: int | None = params.get("epochs")
        self._known_steps = self._epoch_steps = params.get("steps")
        self._input.begin()
        self._rate = model_rate(self.model, self._given_flops, self._given_peak)
        if self._log_dir is not None:
            self._writer = BackgroundRows(self._log_dir, "throughput", self._formats, _COLUMNS)
            end_with_fit(self, self._writer.close)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Starts the epoch's figures."""
        self._epoch = self._epochs_ended = epoch
        self._follows_input = takes_a_batch_a_step(self.model)
        self._group = _executions_in_a_group(self.model)
        self._steps = StepWindow(-(-self._window_steps // (self._group * self.model.steps_per_execution)))
        self._examples.start(self._known_steps)
        self._uncounted.clear()
        self._countable = 1  # an epoch's first execution is counted at once
        self._left_out = 0  # steps of the first execution, whose time is not counted
        # Of the steps done here and the optimizer's, the greater: BackupAndRestore may have restored the latter.
        self._trained = max(self._trained + self._done, steps_trained(self.model))
        self._done = 0
        self._start_group()
        self._last = self._told_at = self._clock()
        if self._ended_at is not None:
            self._left.end_seconds += self._last - self._ended_at  # what callbacks behind this one did

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Times the step; with `steps_per_execution` above one, several at once."""
        if batch >= self._examples.due:
            self._examples.look(batch)  # before the clock, as it waits for the steps that were launched ahead
            self.batch_size = self._examples.batch_size
        now = self._clock()
        self._uncounted.append((batch, now))
        if len(self._uncounted) >= self._countable or now - self._told_at >= _TOLD_EVERY_SECONDS:
            self._count()

    def _count(self) -> None:
        """Counts the steps that have ended: many at once, for one at a time costs several times as much."""
        for batch, ended in self._uncounted:
            self._count_step(batch, ended)
        self._uncounted.clear()
        until_a_row = -(-(self._window_steps - self._unwritten.steps) // self.model.steps_per_execution)
        self._countable = min(until_a_row, self._input.room)

    def _count_step(self, batch: int, ended: float) -> None:
        seconds, self._last = ended - self._last, ended
        # At least one: a loop of one's own may not number its steps, and a nested fit counts here as well.
        steps = max(1, batch + 1 - self._done)
        self._done += steps
        if self._follows_input:
            self._follow_input(seconds, steps)
        if self.first_step_seconds is None:
            self.first_step_seconds, self._left_out = seconds, steps
            return
        self._open_executions += 1
        self._open_steps += steps
        self._open_seconds += seconds
        if self._open_executions >= self._group:
            # Of a group that waits for all steps launched ahead, only the sum tells something.
            self._end_group(sampled=self._group == 1 or batch + 1 != self._known_steps)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the epoch's figures to the logs."""
        self._count()
        if self._open_steps:
            self._end_group(sampled=False)
        wait_percent = self._input.end_epoch()
        self._ended_at = self._clock()
        self._left.add_end(self._ended_at - self._last)
        self._epochs_ended = epoch + 1
        if self._done:
            self._epoch_steps = self._known_steps or self._done
        self._tell()
        if logs is not None and self._done:
            found = self._epoch_figures() | {"input_wait_percent": wait_percent, "eta_seconds": self._eta_seconds()}
            logs.update({key: value for key, value in found.items() if value is not None})

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Writes what remains and closes the files."""
        self._count()
        if self._unwritten.steps:
            self._write()
        self._close()

    def _start_group(self) -> None:
        self._open_executions = self._open_steps = 0
        self._open_seconds = 0.0

    def _end_group(self, *, sampled: bool) -> None:
        steps, seconds = self._open_steps, self._open_seconds
        self._start_group()
        for window in (self._steps, self._unwritten, self._untold):
            window.add(steps, seconds, sampled=sampled)
        self._left.add_steps(steps, seconds)
        if self._unwritten.steps >= self._window_steps:
            self._write()
        if self._last - self._told_at >= _TOLD_EVERY_SECONDS:
            self._tell()

    def _epoch_figures(self) -> dict[str, float | None]:
        """Of the epoch without the training's first execution, unless that is all there is."""
        steps, left_out = self._steps, self._left_out
        if not steps.steps:
            steps, left_out = StepWindow(), 0
            steps.add(self._done, self.first_step_seconds or 0.0, sampled=True)
        examples, batch_size = self._examples.examples(self._done), self._examples.batch_size
        rate = None
        if examples and batch_size and steps.seconds > 0:
            rate = (examples - left_out * batch_size) / steps.seconds
        first = {"first_step_seconds": self.first_step_seconds} if self._left_out else {}
        return steps.step_times() | {"examples_per_second": rate} | self._rate.figures(rate) | first

    def _follow_input(self, seconds: float, steps: int) -> None:
        if steps == self._done:
            self._input.end_first_step(None if self.first_step_seconds is None else seconds)
        else:
            self._input.end_step(seconds)

    def _eta_seconds(self) -> float | None:
        if self._epochs is None or self._epoch_steps is None:
            return None
        ends = self._epochs - self._epochs_ended
        done = self._done if self._epochs_ended == self._epoch else 0
        return self._left.seconds(steps=max(0, ends * self._epoch_steps - done), ends=ends)

    def _write(self) -> None:
        window, self._unwritten = self._unwritten, StepWindow()
        if self._writer is not None:
            self._writer.write(self._row(window, "files"), step=self._trained + self._done)

    def _tell(self) -> None:
        window, self._untold = self._untold, StepWindow()
        self._told_at = self._last
        if window.steps:
            self.listeners(self._row(window, "listeners"))

    def _row(self, window: StepWindow, reader: str) -> dict[str, Any]:
        rate = window.examples_per_second(self._examples.batch_size)
        return {
            "time_seconds": time.time(),
            "epoch": self._epoch,
            "step": self._done,
            **window.step_times(),
            "examples_per_second": rate,
            "input_wait_percent": self._input.percent(reader),
            **self._rate.figures(rate),
            "eta_seconds": self._eta_seconds(),
        }

    def _close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


def _positive(name: str, value: float | None) -> float | None:
    return None if value is None else number(name, value, "Leave it out where you do not know it.", above=0)


def _executions_in_a_group(model: keras.Model) -> int:
    """How many executions are timed as one: those from one wait of an overlapped fit to its next."""
    from tfopt.fit.settings import overlap_of  # here, as it takes half as long to load as all callbacks together

    overlap = overlap_of(model)
    if overlap is None:
        return 1
    every = overlap.in_flight.waits_every
    return every // math.gcd(every, model.steps_per_execution)
