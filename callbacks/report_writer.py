"""Writes a page about a training."""

import functools
import os
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import keras

from tfopt.callbacks.report.recorder import Recorder
from tfopt.callbacks.report.training_page import report
from tfopt.callbacks.shared.background import Background
from tfopt.callbacks.shared.reading_sources import find_source, subscribe
from tfopt.callbacks.shared.run import begin_run
from tfopt.callbacks.shared.running_fit import Callback, end_with_fit, replicas_of, running_list
from tfopt.callbacks.shared.workers import worker_rank
from tfopt.callbacks.throughput_logger import ThroughputLogger
from tfopt.callbacks.utilization_alert import UtilizationAlert
from tfopt.callbacks.utilization_logger import UtilizationLogger
from tfopt.checks import file
from tfopt.files import write_atomic
from tfopt.model.batches import steps_per_launch
from tfopt.page import require_renderer
from tfopt.warn import warn_once

# With 8 GPUs a page takes 0.1 s of Python's time, also away from the training thread.
_EVERY_SECONDS = 300.0
# How long the end of fit waits for a disk that hangs.
_WAIT_SECONDS = 30.0


class ReportWriter(Callback):
    """Writes an HTML page about the training: what the hardware did, how fast it went, and what held it back.

    Use it to see why training is slow, and to show that to a colleague. The page is one self-contained file, with a
    verdict, the curves of loss and metrics, charts of the hardware over time, the epochs with their logs, and the
    environment. It shows compilations and alerts if a `CompilationLogger` and `UtilizationAlert`s are in fit's list.

    A background thread writes it at the end of `fit`, about every five minutes before, and soon after an exception,
    Ctrl-C or SIGTERM. A page that cannot be written is reported once, and training continues.

    Args:
        path: The page, such as "report.html". Its folder is created if missing. With several workers (TF_CONFIG) each
            writes its own, "report-worker1.html".

    Raises:
        TypeError: If `path` is not a path.
        ValueError: If `path` is a folder, an address, or not a valid path.
        tfopt.errors.UnsupportedError: If jinja2 is not installed.

    Example:
        >>> model.fit(dataset, callbacks=[tfopt.callbacks.ReportWriter("report.html")])
    """

    def __init__(self, path: str | os.PathLike[str]):
        super().__init__()
        self._path = file("path", path, "Name a file, such as 'report.html'.")
        require_renderer()
        self._recorder: Recorder | None = None
        self._background: Background | None = None
        self._page_writer: _PageWriter | None = None
        self._logs: dict[str, Any] | None = None
        self._earlier_logs: tuple[float, dict[str, Any]] | None = None
        self._ending = ExitStack()

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Starts recording."""
        self._end()  # if an exception ended the previous fit
        from tfopt.callbacks.compilation_logger import CompilationLogger  # imported late: loads all of tfopt.xla

        running = running_list(self)
        others = running.callbacks if running else []
        compilations = next((other for other in others if isinstance(other, CompilationLogger)), None)
        throughput = find_source(ThroughputLogger, self)
        self._run = begin_run(self)
        setup, replicas = _setup(self.model), replicas_of(self.model)
        name = getattr(self.model, "name", "a model")
        recorder = Recorder(name, throughput, compilations, setup, replicas)
        self._recorder, self._logs, self._earlier_logs = recorder, None, None
        path = self._path.with_name(f"{worker_rank().file_name(self._path.stem)}{self._path.suffix}")
        self._page_writer = _PageWriter(path, recorder)
        self._background = Background("report", self._page_writer)
        self._background.put("begun")
        self._written_at = time.monotonic()
        end_with_fit(self, functools.partial(_end_interrupted, self._background))
        subscribe(self, {UtilizationLogger: recorder.take_samples, ThroughputLogger: self._take_steps}, self._ending)
        for other in others:
            if isinstance(other, UtilizationAlert):
                other.listeners.add(recorder.take_alert)
                self._ending.callback(other.listeners.remove, recorder.take_alert)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes when the epoch began."""
        if self._recorder is not None:
            self._recorder.begin_epoch()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Keeps the step's logs, unread: reading them may have to wait for the step."""
        self._logs = logs

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Keeps the epoch's logs."""
        if self._recorder is not None:
            self._logs = self._earlier_logs = None
            self._recorder.end_epoch(epoch, {} if logs is None else logs)
            self._write_if_due()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Writes the page."""
        if self._background is not None and self._page_writer is not None and self._recorder is not None:
            self._recorder.end()
            self._background.put("ended")
            self._background.close(_WAIT_SECONDS)
            if self._background.works:
                self._page_writer.warn_if_unfinished()
        self._end()

    def _end(self) -> None:
        self._ending.close()
        background, self._background, self._page_writer, self._recorder = self._background, None, None, None
        if background is not None:
            _end_interrupted(background)

    def _take_steps(self, row: Mapping[str, Any]) -> None:
        """Runs in the training thread, about once a second."""
        if self._recorder is not None:
            self._recorder.take_steps(row, ago=self._run.elapsed_seconds - row["elapsed_seconds"])
            # Those of a second ago, whose step has ended also where fit is overlapped.
            if self._earlier_logs is not None:
                self._recorder.take_logs(*self._earlier_logs)
            self._earlier_logs = None if self._logs is None else (self._recorder.now, self._logs)
            self._write_if_due()

    def _write_if_due(self) -> None:
        # Only the training thread asks, so that no page shows the idle GPU after an interruption.
        now = time.monotonic()
        if self._background is not None and now - self._written_at >= _EVERY_SECONDS:
            self._written_at = now
            self._background.put("running")


class _PageWriter:
    """Writes the page in the background thread. It must not keep the ReportWriter alive."""

    def __init__(self, path: Path, recorder: Recorder):
        self._path, self._recorder = path, recorder
        self._environment: dict[str, Any] = {}
        self._ended = False

    def __call__(self, state: str) -> None:
        """Writes the page; `state` is "begun" (not yet), "running", "interrupted" or "ended"."""
        try:
            self._write(state)
        finally:
            self._ended = self._ended or state == "ended"

    def _write(self, state: str) -> None:
        if not self._environment:
            # At the beginning: at the end, the driver may hang, and fit would wait for it.
            from tfopt.measure import environment  # imported late, in this thread: it takes a while to load

            self._environment = environment()
        if state == "begun":
            return
        record = self._recorder.record(
            ended=state == "ended",
            interrupted=state == "interrupted",
            written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            environment=self._environment,
        )
        html = report(record)
        try:
            write_atomic(self._path, html)
        except OSError as error:
            text = (
                f"Expected to write the report to {self._path}. Found: {error}. The training goes on; free the disk or "
                "choose another path."
            )
            warn_once(f"report {self._path} {type(error).__name__}", text)

    def warn_if_unfinished(self) -> None:
        """Warns that the last page is not written, as on a disk that hangs."""
        if not self._ended:
            text = (
                f"Expected the report in {self._path} within {_WAIT_SECONDS:.0f} s. Found it unfinished, and fit "
                "ends without it. Choose a path on another disk."
            )
            warn_once(f"report {self._path} unfinished", text)


def _setup(model: keras.Model | None) -> tuple[str, ...]:
    """How a model is trained, in words: optimizer, precision, XLA, replicas."""
    if model is None:
        return ()
    optimizer = getattr(model, "optimizer", None)
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)  # without the LossScaleOptimizer around it
    replicas = model.distribute_strategy.num_replicas_in_sync
    return (
        *([] if optimizer is None else [type(optimizer).__name__]),
        _precision(model),
        *([f"XLA {'on' if model.jit_compile and not model.run_eagerly else 'off'}"] if model.compiled else []),
        *(["eager"] if model.run_eagerly else []),
        *([f"{model.steps_per_execution} steps per execution"] if model.steps_per_execution > 1 else []),
        *([f"{launched} steps per launch"] if (launched := steps_per_launch(model)) > 1 else []),
        *([f"{replicas} replicas"] if replicas > 1 else []),
    )


def _precision(model: keras.Model) -> str:
    """The dtype policy of most layers, and how many layers have others."""
    layers = [layer for layer in model._flatten_layers(include_self=False) if not list(layer._layers)]
    policies = Counter(layer.dtype_policy.name for layer in layers if layer.variables).most_common()
    if not policies:
        return model.dtype_policy.name
    others = [f"{name} in {count} {'layer' if count == 1 else 'layers'}" for name, count in policies[1:]]
    return " and ".join([policies[0][0], *others])


def _end_interrupted(background: Background) -> None:
    """Writes the page of a fit that an exception ended; does nothing if fit ran to its end."""
    background.put("interrupted")
    background.close()
