"""A trace of chosen steps of `fit`, whose steps XProf can read."""

import json
import math
import os
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras

from tfopt.callbacks.order import running_list
from tfopt.callbacks.profiler.recording import Recording, StepMark, is_writing, record, warm_up
from tfopt.callbacks.profiler.summary import TraceSummary, summarize_trace
from tfopt.checks import folder, integer, number
from tfopt.files import write_atomic
from tfopt.measure.steps import wait
from tfopt.warn import warn_once


class StepProfiler(keras.callbacks.Callback):
    """Records a trace of some steps of `model.fit`, each marked so that XProf can tell it from the next.

    Use it to see what a step's time goes into. Keras' `TensorBoard(profile_batch=…)` marks its steps in a way that
    XProf does not read ("No step time measured"). The trace lies where TensorBoard's Profile tab and `xprof LOG_DIR`
    look for it, in `LOG_DIR/plugins/profile`; `summary()` says in figures what is in it. XProf leaves the first and the
    last step out of its figures where a trace has six or more.

    A trace begins at a step, after a time, or when `request` is called, as by an alert. Each of them begins one; while
    a trace is recorded or written, the next one waits. With `steps_per_execution` above one, whole executions are
    traced, and XProf takes each for a step. Where the `nvtx` package is installed, traced steps are NVTX ranges too,
    "train step 10", which Nsight Systems shows.

    What it costs: outside of a trace a comparison a step. After the last traced step fit waits once until the device
    has done it and the recording is over, a twentieth of the time that writing takes; a thread then writes the trace,
    in seconds to a minute for a long one, for which `fit` waits only at its end. What is trained is the same.

    Args:
        log_dir: Folder for the trace; made if need be.
        start_step: How many steps of the fit run before the trace. None: it begins at no step. Default 10: the first
            ones trace and compile.
        steps: Steps in a trace. Default 10. A trace of ten large steps may take 100 MB.
        start_after_seconds: Time from the beginning of fit to a trace. Default None: after no time.
        clock: Seconds, monotonic.

    Attributes:
        traces: The folders of the traces of the last fit that are written, the newest last.

    Raises:
        TypeError: `log_dir` is no path, `start_step` or `steps` no integer, or `start_after_seconds` no number.
        ValueError: `log_dir` can be no folder, `start_step` or `start_after_seconds` is below 0, or `steps` below 1.

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
        clock: Callable[[], float] = time.monotonic,
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
        self._clock = clock
        self._requested = False
        self._recording: Recording | None = None
        self._mark: StepMark | None = None
        self._left = 0  # steps that the trace still lacks; 0 where none is recorded
        self._steps_per_execution = 1
        self.traces: list[Path] = []

    def request(self, alert: object = None) -> None:
        """Lets a trace begin with the next step. It may be called from any thread, and before `fit`.

        Args:
            alert: Ignored; so that `UtilizationAlert(action=profiler.request)` can call it.
        """
        self._requested = True

    def summary(self) -> TraceSummary | None:
        """Reads the last trace, and writes the summary beside it as `summary.json`. Call it after `fit`.

        Returns:
            The summary; None where there is no trace. A trace that is still recorded is ended.

        Raises:
            tfopt.errors.UnsupportedError: xprof is not installed, or cannot read the trace.
        """
        self._collect()
        if not self.traces:
            return None
        trace = self.traces[-1]
        summary = summarize_trace(trace, steps_per_execution=self._steps_per_execution)
        try:
            write_atomic(trace / "summary.json", json.dumps(summary.to_dict(), indent=2) + "\n")
        except OSError as error:
            warn_once("step profiler summary", f"Expected to write {trace / 'summary.json'}. Found: {error}.")
        return summary

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Notes when to begin."""
        self._collect()  # an exception ended the fit before, without on_train_end
        self.traces = []
        self._before = self._done = 0  # steps of the epochs before, and of this one
        self._steps_per_execution = getattr(self.model, "steps_per_execution", 1)
        self._at_step = self._at_seconds = math.inf
        if self._start_step is not None:
            self._at_step = self._start_step - self._steps_per_execution + 1  # the execution that it is in
        if self._start_after_seconds is not None:
            self._at_seconds = self._clock() + self._start_after_seconds
        if min(self._at_step, self._at_seconds) < math.inf:
            warm_up()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts on from the epoch before."""
        self._before, self._done = self._before + self._done, 0

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Begins a trace if it is time, and marks the step if one is recorded."""
        step = self._before + batch
        if self._left == 0:
            if step < self._at_step and not self._requested and self._clock() < self._at_seconds:
                return
            self._begin(step)
        if self._left:
            self._mark = StepMark(step)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Ends the step, and with the last one the trace."""
        before, self._done = self._done, batch + 1
        mark, self._mark = self._mark, None
        if mark is not None:
            mark.end()
            self._left = max(0, self._left - (self._done - before))
            if self._left == 0:
                self._end()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Ends a trace that fit was too short for, and waits until it is written."""
        if self._left:
            self._end()
        self._collect()
        self._requested = False
        if min(self._at_step, self._at_seconds) < math.inf:
            warn_once(f"step profiler {self._at_step} {self._at_seconds}", self._never_begun())

    def _begin(self, step: int) -> None:
        if is_writing():
            return  # the start would wait for that; the next step asks again
        self._collect()
        self._requested = False
        if step >= self._at_step:
            self._at_step = math.inf
        if self._clock() >= self._at_seconds:
            self._at_seconds = math.inf
        self._recording = record(self._log_dir)
        if self._recording is not None:
            self._left = self._steps
            # Nobody tells this callback of an exception that ends fit; but fit's own list goes then.
            weakref.finalize(running_list() or self, self._recording.give_up).atexit = False

    def _end(self) -> None:
        """Ends the recording when the device has done what was launched."""
        self._left = 0
        try:
            wait()
        except Exception as error:  # noqa: BLE001  what failed on the device is for fit to tell
            warn_once("step profiler wait", f"Expected to wait for the traced steps. Found: {error}. They may lack.")
        if self._recording is not None:
            self._recording.end()

    def _collect(self) -> None:
        """Waits until the last trace, if any, is written, and notes where."""
        recording, self._recording = self._recording, None
        self._mark, self._left = None, 0
        if recording is not None:
            recording.finish()
            if recording.folder is not None and recording.folder not in self.traces:
                self.traces.append(recording.folder)

    def _never_begun(self) -> str:
        planned = [f"at step {self._start_step}"] if self._at_step < math.inf else []
        planned += [f"after {self._start_after_seconds:g} s"] if self._at_seconds < math.inf else []
        return (
            f"Expected to begin a trace {' and '.join(planned)} of fit. Found that it ended after "
            f"{self._before + self._done} steps, before that. Choose an earlier start."
        )
