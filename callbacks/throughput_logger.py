"""Logs how fast `fit` trains."""

import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras

from tfopt.callbacks.shared.reading_sources import THROUGHPUT_KEYS, Listeners
from tfopt.callbacks.shared.row_files import BackgroundRows, check_formats
from tfopt.callbacks.shared.run import COORDINATES, begin_run
from tfopt.callbacks.shared.running_fit import EpochExamples, end_with_fit, steps_trained, warn_of_earlier_loggers
from tfopt.callbacks.throughput_figures import (
    InputWait,
    ModelRate,
    StepWindow,
    TimeLeft,
    model_rate,
    takes_one_batch_per_step,
)
from tfopt.checks import integer, log_folder, number

_CALL_LISTENERS_EVERY_SECONDS = 1.0
_COLUMNS = (*COORDINATES, "window_steps", "window_seconds", *THROUGHPUT_KEYS, "eta_seconds")


class ThroughputLogger(keras.callbacks.Callback):
    """Logs step time, examples per second, input wait, model FLOPs and the time left of `model.fit`.

    Use it to see how fast a training is and whether its input holds it back. docs/callbacks.md lists every key with its
    unit, source and limits. The first step, which traces and compiles, is reported apart. What is unknown is left out.

    In `logs`, and so in Keras' history and later loggers, the figures of each epoch. In files (`throughput.csv`,
    `throughput.jsonl`), a row after every `window_steps` steps and one for the rest at the end.

    Args:
        log_dir: Folder for the files. Default None: only epoch logs.
        window_steps: Steps per row, and steps whose times give an epoch's percentiles. Default 100.
        formats: Which files: "csv", "jsonl", "tensorboard".
        flops_per_example: FLOPs of a training step on one example, a multiply-add being two. Default None: counted from
            Keras' layers when `fit` begins. Layers that cannot be counted are named once, and no FLOPs are logged.
        peak_tflops: What one device can do, in 10¹² FLOPs per second; `tfopt.measure.matmul_tflops` measures it.
            Default None: NVIDIA's figure for this GPU and the dtype of most FLOPs.
        clock: Seconds, monotonic.

    Raises:
        ValueError: If a format is unknown, `window_steps` is below 1, FLOPs are not above 0, or `log_dir` cannot be a
            folder.
        TypeError: If `log_dir` is not a path, `window_steps` not an integer, or FLOPs not a number.
        tfopt.errors.UnsupportedError: If TensorBoard is asked for and not installed.

    Example:
        >>> model.fit(dataset, callbacks=[tfopt.callbacks.ThroughputLogger("logs")])

    Source: Chowdhery et al., "PaLM", 2022, appendix B, for model FLOPs utilisation (`mfu_percent`).
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
        """How long the first step took, with tracing and compilation; None before it."""
        self.batch_size: float | None = None
        """Examples per step, over all replicas; None before the first, 0 if Keras counts none."""
        self.listeners = Listeners()
        """Called about once a second and at an epoch's end, in the training thread, with a dict of a file row's fields
        for the steps since the last call."""

    @property
    def flops_per_example(self) -> float | None:
        """As given, or as counted when the last fit began; None if unknown."""
        return self._rate.flops_per_example

    @property
    def peak_tflops(self) -> float | None:
        """What all devices of the last fit can do together; None if unknown."""
        return self._rate.peak_tflops

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Opens the files, and counts the model's FLOPs."""
        warn_of_earlier_loggers(self)
        self._close()  # if an exception ended the previous fit
        self.first_step_seconds = self.batch_size = None
        self._examples = EpochExamples(self.model)
        self._unwritten, self._unreported = StepWindow(), StepWindow()
        self._uncounted: list[tuple[int, float]] = []  # executions: their last batch and its end
        self._left = TimeLeft()
        self._ended_at: float | None = None
        self._trained = self._done = 0
        params = self.params or {}
        self._epochs: int | None = params.get("epochs")
        self._known_steps = self._epoch_steps = params.get("steps")
        self._input.begin()
        self._rate = model_rate(self.model, self._given_flops, self._given_peak)
        self._run = begin_run(self)
        if self._log_dir is not None:
            self._writer = BackgroundRows(self._log_dir, "throughput", self._formats, _COLUMNS)
            end_with_fit(self, self._writer.close)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Starts the epoch's figures."""
        self._epoch = self._epochs_ended = epoch
        self._follows_input = takes_one_batch_per_step(self.model)
        self._group = _executions_in_a_group(self.model)
        self._steps = StepWindow(-(-self._window_steps // (self._group * self.model.steps_per_execution)))
        self._examples.start(self._known_steps)
        self._uncounted.clear()
        self._countable = 1  # count an epoch's first execution at once
        self._left_out = 0  # steps of the training's first execution
        # BackupAndRestore may have restored the optimizer's count; the optimizer does not count skipped steps.
        self._trained = max(self._trained + self._done, steps_trained(self.model))
        self._done = 0
        self._start_group()
        self._last = self._reported_at = self._clock()
        if self._ended_at is not None:
            self._left.end_seconds += self._last - self._ended_at  # spent in later callbacks

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Times the step, or an execution of several (`steps_per_execution`)."""
        if batch >= self._examples.due:
            self._examples.look(batch)  # before reading the clock: it waits for steps launched ahead
            self.batch_size = self._examples.batch_size
        now = self._clock()
        self._uncounted.append((batch, now))
        if len(self._uncounted) >= self._countable or now - self._reported_at >= _CALL_LISTENERS_EVERY_SECONDS:
            self._count()

    def _count(self) -> None:
        """Counts the steps that have ended, many at once: one at a time costs several times as much."""
        for batch, ended in self._uncounted:
            self._count_step(batch, ended)
        self._uncounted.clear()
        until_a_row = -(-(self._window_steps - self._unwritten.steps) // self.model.steps_per_execution)
        self._countable = min(until_a_row, self._input.room)

    def _count_step(self, batch: int, ended: float) -> None:
        seconds, self._last = ended - self._last, ended
        # At least one: custom loops may not number their steps, and a nested fit reports its own here.
        steps = max(1, batch + 1 - self._done)
        self._done += steps
        if self._follows_input and steps == self._done:
            self._input.end_first_step(None if self.first_step_seconds is None else seconds)
        elif self._follows_input:
            self._input.end_step(seconds)
        if self.first_step_seconds is None:
            self.first_step_seconds, self._left_out = seconds, steps
            return
        self._open_executions += 1
        self._open_steps += steps
        self._open_seconds += seconds
        if self._open_executions >= self._group:
            # A last group waits for all steps launched ahead, so its mean is not a sample of a step's time.
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
        self._report()
        if logs is not None and self._done:
            found = self._epoch_figures() | {"input_wait_percent": wait_percent, "eta_seconds": self._eta_seconds()}
            logs.update({key: value for key, value in found.items() if value is not None})

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Writes the last row and closes the files."""
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
        for window in (self._steps, self._unwritten, self._unreported):
            window.add(steps, seconds, sampled=sampled)
        self._left.add_steps(steps, seconds)
        if self._unwritten.steps >= self._window_steps:
            self._write()
        if self._last - self._reported_at >= _CALL_LISTENERS_EVERY_SECONDS:
            self._report()

    def _epoch_figures(self) -> dict[str, float | None]:
        """The epoch's figures without the training's first execution, unless that is all there is."""
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

    def _eta_seconds(self) -> float | None:
        if self._epochs is None or self._epoch_steps is None:
            return None
        ends = self._epochs - self._epochs_ended
        done = self._done if self._epochs_ended == self._epoch else 0
        return self._left.seconds(steps=max(0, ends * self._epoch_steps - done), ends=ends)

    def _write(self) -> None:
        window, self._unwritten = self._unwritten, StepWindow()
        if self._writer is not None:
            self._writer.write(self._row(window, "files"))

    def _report(self) -> None:
        window, self._unreported = self._unreported, StepWindow()
        self._reported_at = self._last
        if window.steps:
            self.listeners(self._row(window, "listeners"))

    def _row(self, window: StepWindow, reader: str) -> dict[str, Any]:
        rate = window.examples_per_second(self._examples.batch_size)
        return {
            **self._run.coordinates(epoch=self._epoch, step=self._trained + self._done),
            "window_steps": window.steps,
            "window_seconds": window.seconds,
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
    return None if value is None else number(name, value, "Leave it out if you do not know it.", above=0)


def _executions_in_a_group(model: keras.Model) -> int:
    """How many executions are timed as one: in an overlapped fit, those from one wait to the next."""
    from tfopt.fit.launching import overlap_of  # imported late: takes half as long as all callbacks

    overlap = overlap_of(model)
    if overlap is None:
        return 1
    every = overlap.in_flight.waits_every
    return every // math.gcd(every, model.steps_per_execution)
