"""Traces chosen steps of `fit` so that XProf recognises them."""

import json
import math
import os
import time
from pathlib import Path
from typing import Any

from tfopt.callbacks.profiler.trace import PATIENCE_SECONDS, StepMark, Trace, is_writing, start_trace, warm_up
from tfopt.callbacks.profiler.trace_summary import TraceSummary, summarize_trace
from tfopt.callbacks.shared.running_fit import Callback, end_with_fit
from tfopt.checks import folder, integer, number
from tfopt.files import write_atomic
from tfopt.fit.launching import steps_ahead
from tfopt.measure.timers import wait
from tfopt.warn import warn_once


class StepProfiler(Callback):
    """Records a trace of some steps of `model.fit`, marked so that XProf recognises them.

    Use it to see where a step's time goes. TensorBoard's Profile tab and `xprof LOG_DIR` open the trace; `summary()`
    condenses it. (Keras' `TensorBoard(profile_batch=…)` marks steps in a way that XProf ignores: "No step time
    measured".)

    A trace begins at a step, after a time, or when `request` is called, as by an alert. After the last traced step,
    `fit` waits until the device is done and recording has stopped. A thread then writes the trace, in seconds to a
    minute; `fit` waits for it only at its end, for at most 30 s.

    Args:
        log_dir: Folder for the trace, created if missing.
        start_step: How many steps of the fit run before the trace. Default 10: the first ones trace and compile. None:
            no step starts a trace.
        steps: Steps in a trace. Default 10, which may take 100 MB if steps are large.
        start_after_seconds: Time from the beginning of fit to a trace. Default None: never.

    Raises:
        TypeError: If `log_dir` is not a path, `start_step` or `steps` not an integer, or `start_after_seconds` not a
            number.
        ValueError: If `log_dir` cannot be a folder, `start_step` or `start_after_seconds` is below 0, or `steps` below
            1.

    Example:
        >>> profiler = tfopt.callbacks.StepProfiler("logs", start_step=100)
        >>> model.fit(dataset, callbacks=[profiler])
        >>> print(profiler.summary())
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str],
        start_step: int | None = 10,
        steps: int = 10,
        *,
        start_after_seconds: float | None = None,
    ):
        super().__init__()
        self._log_dir = folder("log_dir", log_dir, "Name a folder for the trace.")
        self._start_step = self._start_after_seconds = None
        if start_step is not None:
            self._start_step = integer("start_step", start_step, "Give a number of steps, or None.", least=0)
        if start_after_seconds is not None:
            self._start_after_seconds = number(
                "start_after_seconds", start_after_seconds, "Give seconds, or None.", least=0
            )
        self._steps = integer("steps", steps, "Give a number of steps.", least=1)
        self._requested = False
        self._trace: Trace | None = None
        self._mark: StepMark | None = None
        self._left = 0  # steps the trace still lacks; 0 while none is recorded
        self._steps_per_execution = 1
        self._before = self._done = 0  # steps of the previous epochs, and of this one
        self._at_step = self._at_seconds = math.inf
        self.traces: list[Path] = []
        """The folders of the last fit's traces, the newest last. A trace that is still being written is added then."""

    @property
    def acts_every(self) -> int:  # type: ignore[override]
        """1 while it records steps, each launched alone."""
        return int(self._left > 0)

    def request(self, alert: object = None) -> None:
        """Starts a trace with the next step. Any thread may call it, also before `fit`.

        Args:
            alert: Ignored; lets `UtilizationAlert(action=profiler.request)` call it.
        """
        self._requested = True

    def summary(self) -> TraceSummary | None:
        """Summarizes the last trace, and writes the summary beside it as `summary.json`. Call it after `fit`.

        A trace that is still being recorded is ended, and one that is being written waited for.

        Returns:
            The summary, None if there is no trace.

        Raises:
            tfopt.errors.UnsupportedError: If xprof is not installed, or cannot read the trace.
        """
        self._collect(to_the_end=True)
        if not self.traces:
            return None
        folder = self.traces[-1]
        summary = summarize_trace(folder, steps_per_execution=self._steps_per_execution)
        try:
            write_atomic(folder / "summary.json", json.dumps(summary.to_dict(), indent=2) + "\n")
        except OSError as error:
            warn_once("step profiler summary", f"Expected to write {folder / 'summary.json'}. Found: {error}.")
        return summary

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Plans when a trace begins."""
        if self._left:  # an exception ended the previous fit
            self._collect()
        self._trace, self.traces = None, []
        self._before = self._done = 0
        self._steps_per_execution = getattr(self.model, "steps_per_execution", 1)
        self._at_step = self._at_seconds = math.inf
        if self._start_step is not None:
            self._at_step = self._start_step - self._steps_per_execution + 1  # the execution it belongs to
        if self._start_after_seconds is not None:
            self._at_seconds = time.monotonic() + self._start_after_seconds
        if min(self._at_step, self._at_seconds) < math.inf:
            warm_up()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Continues the count of steps."""
        self._before, self._done = self._before + self._done, 0

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Begins a trace if one is due, and marks the step if one is recorded."""
        step = self._before + batch
        if self._left == 0:
            if steps_ahead(self.model):
                return  # it runs already
            if step < self._at_step and not self._requested and time.monotonic() < self._at_seconds:
                return
            self._begin(step)
        if self._left:
            self._mark = StepMark(step)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Ends the step, and after the last one the trace."""
        before, self._done = self._done, batch + 1
        mark, self._mark = self._mark, None
        if mark is not None:
            mark.end()
            self._left = max(0, self._left - (self._done - before))
            if self._left == 0:
                self._end()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Ends a trace that is still recorded, and waits until it is written, but not for a slow disk."""
        if self._left:
            self._end()
        self._collect()
        self._requested = False
        if min(self._at_step, self._at_seconds) < math.inf:
            warn_once(f"step profiler {self._at_step} {self._at_seconds}", self._never_begun())

    def _begin(self, step: int) -> None:
        if is_writing():
            return  # starting now would wait for it; the next step tries again
        self._collect()
        self._requested = False
        if step >= self._at_step:
            self._at_step = math.inf
        if time.monotonic() >= self._at_seconds:
            self._at_seconds = math.inf
        self._trace = start_trace(self._log_dir, self.traces)
        if self._trace is not None:
            self._left = self._steps
            end_with_fit(self, self._trace.give_up, at_exit=False)

    def _end(self) -> None:
        """Ends the recording once the device has done what was launched."""
        self._left = 0
        try:
            wait()
        except Exception as error:  # noqa: BLE001  fit will raise what failed on the device
            warn_once(
                "step profiler wait", f"Expected to wait for the traced steps. Found: {error}. They may be missing."
            )
        if self._trace is not None:
            self._trace.end()

    def _collect(self, *, to_the_end: bool = False) -> None:
        """Waits until the last trace, if any, is written, but for a slow disk only if that is wanted."""
        self._mark, self._left = None, 0
        if self._trace is None:
            return
        if self._trace.finish(None if to_the_end else PATIENCE_SECONDS):
            self._trace = None
        else:
            warn_once(
                "step profiler late",
                f"Expected to write a trace to {self._log_dir} within {PATIENCE_SECONDS:g} s. Found it unfinished. A "
                "thread goes on writing, and fit no longer waits. Call summary(), which waits, before Python ends; or "
                "choose a faster disk or fewer steps.",
            )

    def _never_begun(self) -> str:
        planned = [f"at step {self._start_step}"] if self._at_step < math.inf else []
        planned += [f"after {self._start_after_seconds:g} s"] if self._at_seconds < math.inf else []
        return (
            f"Expected to begin a trace {' and '.join(planned)} of fit. Found that it ended after "
            f"{self._before + self._done} steps, before that. Choose an earlier start."
        )
