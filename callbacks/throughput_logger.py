"""Logs how fast `fit` trains."""

import functools
import math
import os
import time
from collections.abc import Collection, Sequence
from typing import Any

import keras

from tfopt.callbacks.shared.histogram import Histogram
from tfopt.callbacks.shared.reading_sources import THROUGHPUT_KEYS, Listeners
from tfopt.callbacks.shared.row_files import BackgroundRows, check_formats
from tfopt.callbacks.shared.run import COORDINATES, begin_run
from tfopt.callbacks.shared.running_fit import (
    Callback,
    EpochExamples,
    check_shown,
    end_with_fit,
    log_epoch,
    most_steps,
    steps_trained,
    warn_of_earlier_loggers,
)
from tfopt.callbacks.throughput.input_wait import InputWait, takes_one_batch_per_step
from tfopt.callbacks.throughput.model_rate import CountedRate
from tfopt.callbacks.throughput.step_times import EpochSteps, StepWindow, TimeLeft
from tfopt.checks import integer, log_folder, number
from tfopt.fit.launching import overlap_of, steps_ahead
from tfopt.model.batches import steps_at_once
from tfopt.warn import warn_once

_CALL_LISTENERS_EVERY_SECONDS = 1.0
# Steps of a second or more fill no window of 100 in this time, and their training may be killed before they do.
_WRITE_EVERY_SECONDS = 60.0
_LOGGED = (*THROUGHPUT_KEYS, "eta_seconds")
_COLUMNS = (*COORDINATES, "window_steps", "window_seconds", *_LOGGED)


class ThroughputLogger(Callback):
    """Logs step time, examples per second, input wait, model FLOPs and the time left of `model.fit`.

    Use it to see how fast training is and whether its input holds it back. docs/callbacks.md lists every key with its
    unit, source and limits. The first step, which traces and compiles, is reported separately. What is unknown is left
    out.

    In `logs`, and so in Keras' history and later loggers, the figures of each epoch. In files (`throughput.csv`,
    `throughput.jsonl`), a row after every `window_steps` steps or, if these take longer, after a minute, and one for
    the rest at the end.

    Your own loop may call it through `keras.callbacks.CallbackList` or directly: `on_train_batch_end` suffices.

    Args:
        log_dir: Folder for the files. Default None: only epoch logs.
        window_steps: Most steps per row. Default 100.
        formats: Which files: "csv", "jsonl", "tensorboard".
        examples_per_step: Examples in the batches of all replicas. Default None: Keras counts them in `fit`; your own
            loop must pass it.
        show: Which of the epoch's figures the progress bar prints. None: all.
        tokens_per_example: Gives `tokens_per_second`. Default None: no such figure.
        flops_per_example: FLOPs of a training step on one example, a multiply-add being two. Default None: counted in
            the graph of the step that `fit` has traced. What cannot be counted is named once, and no FLOPs are logged.
        peak_tflops: What one device can do, in 10¹² FLOPs per second; `tfopt.measure.matmul_tflops` measures it.
            Default None: NVIDIA's figure for this GPU and the dtype of most FLOPs.

    Raises:
        ValueError: If a format is unknown, `window_steps` is below 1, another number is not above 0, or `log_dir`
            cannot be a folder.
        TypeError: If `log_dir` is not a path, `window_steps` not an integer, or another one not a number.
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
        show: Collection[str] | None = ("examples_per_second", "input_wait_percent"),
        examples_per_step: float | None = None,
        tokens_per_example: float | None = None,
        flops_per_example: float | None = None,
        peak_tflops: float | None = None,
    ):
        super().__init__()
        self._log_dir = log_folder(log_dir)
        self._window_steps = integer("window_steps", window_steps, "Give a number of steps.", least=1)
        self._formats = check_formats(formats)
        self._show = check_shown(show, _LOGGED)
        self._examples_per_step = _positive("examples_per_step", examples_per_step)
        self._tokens_per_example = _positive("tokens_per_example", tokens_per_example)
        self._given_flops = _positive("flops_per_example", flops_per_example)
        self._given_peak = _positive("peak_tflops", peak_tflops)
        self._in_fit = self._in_epoch = False
        self._writer: BackgroundRows | None = None
        self._rest: list[dict[str, Any]] = []  # the row to write if the fit ended now
        self._input = InputWait()
        self._rate = CountedRate(self._given_flops, self._given_peak)
        self.first_step_seconds: float | None = None
        """How long the first step took, with tracing and compilation; None before it."""
        self.batch_size: float | None = None
        """Examples per step, over all replicas; None before the first, 0 if Keras counts none."""
        self.step_times = Histogram()
        """In seconds, of each step of the last fit but the first; brought up to date with each call of `listeners`."""
        self.listeners = Listeners()
        """Called about once a second and at an epoch's end, in the training thread, with a dict of a file row's fields
        for the steps since the last call."""

    @property
    def flops_per_example(self) -> float | None:
        """As given, or as counted after the last fit's first step; None if unknown."""
        return self._rate.known.flops_per_example

    @property
    def peak_tflops(self) -> float | None:
        """What all devices of the last fit can do together; None if unknown."""
        return self._rate.known.peak_tflops

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Opens the files."""
        warn_of_earlier_loggers(self)
        self._close()  # if an exception ended the previous fit
        self._in_fit, self._in_epoch = True, False
        self.first_step_seconds = None
        self._compiled = False  # whether the first step has ended
        self._examples = EpochExamples(self.model, self._examples_per_step)
        self.batch_size = self._examples.batch_size
        self.step_times = Histogram()
        self._unwritten, self._unreported = StepWindow(), StepWindow()
        # Executions: their last batch, its end, and whether more steps of its launch follow.
        self._uncounted: list[tuple[int, float, bool]] = []
        self._ago = 0.0
        self._left = TimeLeft()
        self._ended_at: float | None = None
        self._trained = self._done = self._epochs_ended = 0
        params = self.params or {}
        self._epochs: int | None = params.get("epochs")
        self._known_steps = self._epoch_steps = params.get("steps")
        self._most = most_steps(self)
        self._input.begin()
        self._rate.begin()
        self._run = begin_run(self)
        if self._log_dir is not None:
            self._writer = BackgroundRows(self._log_dir, "throughput", self._formats, _COLUMNS)
            self._rest = []
            end_with_fit(self, functools.partial(_write_rest, self._writer, self._rest))

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Starts the epoch's figures."""
        if not self._in_fit:
            self.on_train_begin()
        self._in_epoch = True
        self._epoch: int | None = epoch
        self._epochs_ended = epoch
        self._steps_per_execution = getattr(self.model, "steps_per_execution", 1)
        self._follows_input = takes_one_batch_per_step(self.model)
        self._input_sought = False
        self._group = _executions_in_a_group(self.model)
        self._steps = EpochSteps()
        self._examples.start(self._known_steps)
        self._uncounted.clear()
        self._countable = 1  # count an epoch's first execution at once
        self._left_out = 0  # steps that are not timed: the training's first execution
        # BackupAndRestore may have restored the optimizer's count; the optimizer does not count skipped steps.
        self._trained = max(self._trained + self._done, steps_trained(self.model))
        self._done = 0
        self._start_group()
        self._last = self._reported_at = time.perf_counter()
        if self._ended_at is not None:
            self._left.end_seconds += self._last - self._ended_at  # spent in later callbacks

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Times the step, or an execution of several (`steps_per_execution`)."""
        if not self._in_epoch:
            self._begin_unannounced(batch)
            return
        if batch >= self._examples.due:
            self._examples.look(batch)  # before reading the clock: it waits for steps launched ahead
            self.batch_size = self._examples.batch_size
            if not self.batch_size:
                _warn_of_no_examples(self.model)
        now = time.perf_counter()
        self._uncounted.append((batch, now, steps_ahead(self.model) > 0))
        if len(self._uncounted) >= self._countable or now - self._reported_at >= _CALL_LISTENERS_EVERY_SECONDS:
            self._count()

    def _begin_unannounced(self, batch: int) -> None:
        """Begins an epoch with the end of a step, in a loop that does not say when epochs begin."""
        if not self._in_fit:
            self.on_train_begin()
        trained = self._trained + self._done
        self.on_epoch_begin(self._epochs_ended)
        self._epoch = None
        self._compiled = True  # nobody knows when that step began
        self._done = self._left_out = batch + 1
        self._trained = max(trained, self._trained - self._done)  # the optimizer has counted it

    def _count(self, *, epoch_ends: bool = False) -> None:
        """Counts the steps that have ended, many at once: one at a time costs several times as much.

        The last one waits until the next one has ended: only then tf.data tells how long its batch took.
        """
        if not self._uncounted:
            return
        if not self._rate.counts and self.model is not None:
            self._rate.count(self.model, self.batch_size)
        if not self._input_sought:
            self._input_sought = True
            self._follows_input = self._follows_input and self._input.find(
                skipped_seconds=None if self._compiled else self._uncounted[0][1] - self._last
            )
        waits = int(self._follows_input and self._compiled and not epoch_ends)
        counted = self._uncounted[: len(self._uncounted) - waits]
        self._uncounted = self._uncounted[len(counted) :]
        now = (self._uncounted or counted)[-1][1]
        for place, (batch, ended, within) in enumerate(counted, start=1):
            self._ago = now - ended
            self._count_step(batch, ended, within=within, wait_known=not epoch_ends or place < len(counted))
        until_a_row = -(-(self._window_steps - self._unwritten.steps) // self._steps_per_execution)
        self._countable = min(until_a_row, self._input.room) + waits

    def _count_step(self, batch: int, ended: float, *, within: bool, wait_known: bool) -> None:
        seconds, self._last = ended - self._last, ended
        # At least one: custom loops may not number their steps, and a nested fit reports its own here.
        steps = max(1, min(batch + 1, self._most) - self._done)
        self._done += steps
        if not self._compiled:
            self._compiled, self.first_step_seconds, self._left_out = True, seconds, steps
            return
        if self._follows_input and wait_known:
            self._input.add(seconds)
        self._open_executions += 1
        self._open_steps += steps
        self._open_seconds += seconds
        if self._open_executions >= self._group and not within:
            # A last group waits for all steps launched ahead, so its mean is not a sample of a step's time.
            self._end_group(sampled=self._group == 1 or self._done != self._known_steps)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Counts the epoch's examples before validation resets their count."""
        if self._in_epoch:
            self._examples.look_before_validation(self._done + len(self._uncounted))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the epoch's figures to the logs."""
        if not self._in_epoch:
            return
        self._ended_at = time.perf_counter()
        self._end_steps(self._ended_at)
        wait_percent = self._input.end_epoch()
        self._in_epoch = False
        self._left.add_end(self._ended_at - self._last)
        self._epochs_ended = epoch + 1
        if self._done:
            self._epoch_steps = self._known_steps or self._done
        self._report()
        if logs is not None and self._done:
            found = self._epoch_figures() | {"input_wait_percent": wait_percent, "eta_seconds": self._eta_seconds()}
            log_epoch(self, logs, {key: value for key, value in found.items() if value is not None}, self._show)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Writes the last row and closes the files."""
        if self._in_epoch:  # a loop that does not say when epochs end
            self._end_steps(time.perf_counter())
            self._report()
        if self._in_fit and self._unwritten.steps:
            self._ago = time.perf_counter() - self._last
            self._write()
        self._close()
        self._in_fit = self._in_epoch = False

    def _end_steps(self, now: float) -> None:
        """Counts what is left to count at the end of an epoch."""
        self._rate.wait()  # before the last rows
        self._count(epoch_ends=True)
        self._ago = now - self._last
        if self._open_steps:
            self._end_group(sampled=False)

    def _start_group(self) -> None:
        self._open_executions = self._open_steps = 0
        self._open_seconds = 0.0

    def _end_group(self, *, sampled: bool) -> None:
        steps, seconds = self._open_steps, self._open_seconds
        self._start_group()
        for window in (self._unwritten, self._unreported):
            window.add(steps, seconds, sampled=sampled)
        self._left.add_steps(steps, seconds)
        if self._unwritten.steps >= self._window_steps or self._unwritten.seconds >= _WRITE_EVERY_SECONDS:
            self._write()
        if self._last - self._reported_at >= _CALL_LISTENERS_EVERY_SECONDS:
            self._report()

    def _epoch_figures(self) -> dict[str, float | None]:
        """The epoch's figures without the training's first execution, unless that is all there is."""
        steps, left_out = self._steps, self._left_out
        if not steps.steps:
            if self.first_step_seconds is None:
                return {}
            only = StepWindow()
            only.add(self._done, self.first_step_seconds, sampled=True)
            steps.add(only)
            left_out = 0
        examples, batch_size = self._examples.examples(self._done), self._examples.batch_size
        rate = None
        if examples and batch_size and steps.seconds > 0:
            rate = (examples - left_out * batch_size) / steps.seconds
        first = {"first_step_seconds": self.first_step_seconds} if self._left_out else {}
        return steps.step_times() | self._rates(rate) | first

    def _rates(self, examples_per_second: float | None) -> dict[str, float | None]:
        """What follows from the examples per second, by log key."""
        tokens = None
        if examples_per_second is not None and self._tokens_per_example is not None:
            tokens = examples_per_second * self._tokens_per_example
        return {
            "examples_per_second": examples_per_second,
            "tokens_per_second": tokens,
            **self._rate.known.figures(examples_per_second),
        }

    def _eta_seconds(self) -> float | None:
        if self._epochs is None or self._epoch_steps is None or self._epoch is None:
            return None
        ends = self._epochs - self._epochs_ended
        done = self._done if self._epochs_ended == self._epoch else 0
        return self._left.seconds(steps=max(0, ends * self._epoch_steps - done), ends=ends)

    def _write(self) -> None:
        if self._writer is not None:
            self._writer.write(self._row(self._unwritten, self._input.percent("files")))
        self._unwritten = StepWindow()
        self._rest.clear()

    def _report(self) -> None:
        window, self._unreported = self._unreported, StepWindow()
        self._reported_at = self._last
        if not window.steps:
            return
        self._steps.add(window)
        self.step_times.add(window.samples, window.steps_of_samples)
        self.listeners(self._row(window, self._input.percent("listeners")))
        if self._writer is not None and self._unwritten.steps:
            self._rest[:] = [self._row(self._unwritten, self._input.percent("files", peek=True))]

    def _row(self, window: StepWindow, input_wait_percent: float | None) -> dict[str, Any]:
        rate = window.examples_per_second(self._examples.batch_size)
        return {
            **self._run.coordinates(epoch=self._epoch, step=self._trained + self._done, ago=self._ago),
            "window_steps": window.steps,
            "window_seconds": window.seconds,
            **window.step_times(),
            **self._rates(rate),
            "input_wait_percent": input_wait_percent,
            "eta_seconds": self._eta_seconds(),
        }

    def _close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            _write_rest(writer, self._rest)


def _write_rest(writer: BackgroundRows, rest: list[dict[str, Any]]) -> None:
    """Closes the files, after the row of the steps that a fit which an exception or a signal ended has not written."""
    while rest:
        writer.write(rest.pop())
    writer.close()


def _warn_of_no_examples(model: keras.Model | None) -> None:
    name = getattr(model, "name", None)
    warn_once(
        f"examples per step {name}",
        f"Expected Keras' loss tracker to count the examples of {name!r}. Found that its train_step, or a loop of your "
        "own, does not update it. No examples_per_second, and nothing that needs it, is logged; pass "
        "ThroughputLogger(examples_per_step=…).",
    )


def _positive(name: str, value: float | None) -> float | None:
    return None if value is None else number(name, value, "Leave it out if you do not know it.", above=0)


def _executions_in_a_group(model: keras.Model) -> int:
    """How many executions are timed as one: in an overlapped fit, those from one wait to the next, or of a launch."""
    overlap = overlap_of(model)
    if overlap is None:
        return 1
    every, once = overlap.in_flight.waits_every, model.steps_per_execution
    return every // math.gcd(every, once) if once > 1 else max(every, steps_at_once(model))
