"""A page about a training, to look at and to send."""

import functools
import os
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import keras

from tfopt.callbacks.background import Background, end_with_fit
from tfopt.callbacks.files.ranks import rank
from tfopt.callbacks.order import running_list
from tfopt.callbacks.report.page import report
from tfopt.callbacks.report.recording import Recording
from tfopt.callbacks.sources import source
from tfopt.callbacks.throughput_logger import ThroughputLogger
from tfopt.callbacks.utilization_alert import Alert, UtilizationAlert
from tfopt.callbacks.utilization_logger import UtilizationLogger
from tfopt.checks import file
from tfopt.files import write_atomic
from tfopt.hardware import GpuSample
from tfopt.page import require_renderer
from tfopt.warn import warn_once

# With 8 GPUs a page takes 0.6 s of one core to make, which Python takes from the training thread: 0.2 %.
_EVERY_SECONDS = 300.0
# How long the end of fit waits for the page, on a disk that hangs.
_PATIENCE_SECONDS = 30.0


class ReportWriter(keras.callbacks.Callback):
    """Writes a page about the training: what the hardware did, how fast it went, and what held it back.

    Use it to see why a training is slow, and to send that to a colleague. The page is one HTML file that needs nothing
    beside itself. On it: a verdict in a sentence (by the bounds of `tfopt.callbacks.report.verdict`); for each GPU
    utilisation, the activity of multiprocessors and tensor cores, memory and power; step time, throughput, the wait for
    input, the host's CPU and memory; the ends of epochs, compilations and alerts marked on them; the epochs with their
    logs; the environment. What the device does not give has no chart.

    Readings come from the `UtilizationLogger` and `ThroughputLogger` in fit's list, or from ones that it adds;
    compilations and alerts from the `CompilationLogger` and each `UtilizationAlert` there, if there are any. Of a long
    training neighbouring readings are drawn together, with their extremes; memory stays below 5 MB with 8 GPUs.

    The page is written at the end of `fit`, and about every five minutes before it, so that a killed process leaves
    one. An exception or Ctrl-C leaves one too, as soon as nothing holds the fit any more. All of it is made in a thread
    of its own. A page that cannot be written is reported once, and the training goes on.

    Args:
        path: The page, such as "report.html". Its folder is made if need be. Of several workers (TF_CONFIG) each
            writes its own, "report-worker1.html".
        clock: Seconds, monotonic.

    Raises:
        TypeError: `path` is no path.
        ValueError: `path` is a folder or an address, or can be no path.
        tfopt.errors.UnsupportedError: jinja2 is not installed.

    Example:
        >>> model.fit(dataset, callbacks=[tfopt.callbacks.ReportWriter("report.html")])
    """

    def __init__(self, path: str | os.PathLike[str], *, clock: Callable[[], float] = time.monotonic):
        super().__init__()
        self._path = file("path", path, "Name a file, such as 'report.html'.")
        require_renderer()
        self._clock = clock
        self._recording: Recording | None = None
        self._background: Background | None = None
        self._writing: _Writing | None = None
        self._sources: tuple[Any, ...] = ()

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begins to record."""
        self._end()  # an exception ended the fit before, without on_train_end
        from tfopt.callbacks.compilation_logger import CompilationLogger  # here, as it brings all of tfopt.xla along

        utilization, throughput = source(UtilizationLogger, self), source(ThroughputLogger, self)
        running = running_list()
        others = running.callbacks if running else []
        compilations = next((other for other in others if isinstance(other, CompilationLogger)), None)
        alerts = [other for other in others if isinstance(other, UtilizationAlert)]
        self._recording = Recording(self.model.name, throughput, compilations, self._clock, _optimizer(self.model))
        path = self._path.with_name(f"{rank().file_name(self._path.stem)}{self._path.suffix}")
        self._writing = _Writing(path, self._recording)
        self._background = Background("report", self._writing)
        self._written_at = self._clock()
        end_with_fit(self, functools.partial(_end_interrupted, self._background))
        utilization.listeners.add(self._take_samples)
        throughput.listeners.add(self._take_steps)
        for alert in alerts:
            alert.listeners.add(self._take_alert)
        self._sources = (utilization, throughput, *alerts)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes when the epoch began."""
        if self._recording is not None:
            self._recording.begin_epoch()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Keeps the epoch's logs."""
        if self._recording is not None:
            self._recording.end_epoch(epoch, {} if logs is None else logs)
            self._write_if_due()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Writes the page."""
        if self._background is not None and self._writing is not None:
            self._background.put("ended")
            self._background.close(_PATIENCE_SECONDS)
            if self._background.works:
                self._writing.warn_if_unfinished()
        self._end()

    def _end(self) -> None:
        sources, self._sources = self._sources, ()
        for one in sources:
            for method in (self._take_samples, self._take_steps, self._take_alert):
                one.listeners.remove(method)
        background, self._background, self._writing, self._recording = self._background, None, None, None
        if background is not None:
            _end_interrupted(background)

    def _take_samples(self, rows: tuple[GpuSample, ...]) -> None:
        """Runs in the sampler's thread."""
        recording = self._recording
        if recording is not None:
            recording.take_samples(rows)

    def _take_steps(self, row: Mapping[str, Any]) -> None:
        """Runs in the training thread, about once a second."""
        if self._recording is not None:
            self._recording.take_steps(row)
            self._write_if_due()

    def _take_alert(self, alert: Alert) -> None:
        recording = self._recording
        if recording is not None:
            recording.take_event("alert", alert.text)

    def _write_if_due(self) -> None:
        # Asked for by the training thread, so that after an interruption no page shows how the GPU idles.
        now = self._clock()
        if self._background is not None and now - self._written_at >= _EVERY_SECONDS:
            self._written_at = now
            self._background.put("running")


class _Writing:
    """Writes the page of a recording, in the background's thread. It must not keep the ReportWriter alive."""

    def __init__(self, path: Path, recording: Recording):
        self._path, self._recording = path, recording
        self._environment: dict[str, Any] = {}
        self._ended = False

    def __call__(self, state: str) -> None:
        """Writes it; `state` is "running", "interrupted" or "ended"."""
        try:
            self._write(state)
        finally:
            self._ended = self._ended or state == "ended"

    def _write(self, state: str) -> None:
        if not self._environment:
            from tfopt.measure import environment  # here, in a thread: it takes a while to load

            self._environment = environment()
        record = self._recording.record(
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
        """Says that the last page is not written, where a disk hangs."""
        if not self._ended:
            text = (
                f"Expected the report in {self._path} within {_PATIENCE_SECONDS:.0f} s. Found it unfinished, and fit "
                "ends without it. Choose a path on another disk."
            )
            warn_once(f"report {self._path} unfinished", text)


def _optimizer(model: keras.Model) -> str | None:
    """The name of the class of a model's optimizer, in mixed_float16 of the one that it scales the loss for."""
    optimizer = getattr(model, "optimizer", None)
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    return None if optimizer is None else type(optimizer).__name__


def _end_interrupted(background: Background) -> None:
    """Writes what there is of a fit that an exception has ended; does nothing after one that came to its end."""
    background.put("interrupted")
    background.close()
