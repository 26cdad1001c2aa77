"""Exports readings of `fit` to Prometheus."""

import contextlib
import importlib.util
import math
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfopt.callbacks.prometheus.metrics import PACE_KEYS, Exported
from tfopt.callbacks.shared.background import Background
from tfopt.callbacks.shared.progress import Progress
from tfopt.callbacks.shared.reading_sources import find_source, finite, subscribe
from tfopt.callbacks.shared.run import Run, begin_run
from tfopt.callbacks.shared.running_fit import Callback, end_with_fit, most_steps
from tfopt.callbacks.throughput_logger import ThroughputLogger
from tfopt.callbacks.utilization_logger import UtilizationLogger
from tfopt.checks import file, integer, number
from tfopt.errors import UnsupportedError
from tfopt.files import write_atomic
from tfopt.hardware import GpuSample
from tfopt.model.batches import steps_at_once
from tfopt.warn import warn_once

if TYPE_CHECKING:  # prometheus-client is an optional extra
    from prometheus_client import CollectorRegistry

# How long the end of fit waits for the file or the port. What takes longer goes on.
_WAIT_SECONDS = 0.03
_LONGEST_SECONDS = 5.0


class PrometheusExporter(Callback):
    """Exports the readings of `model.fit` to Prometheus, in a file for node_exporter or on a port.

    Use the file where node_exporter runs (its textfile collector), and the port where Prometheus reaches the machine.
    Readings have Prometheus' names and base units, and the GPU as labels:
    `tfopt_gpu_utilization_ratio{gpu="0",uuid="GPU-…"}`. docs/callbacks.md lists the metrics. What is unknown has no
    sample. A file that cannot be written or a port that is taken is reported once, and training continues.

    Args:
        textfile: The file, ending in ".prom", in node_exporter's folder; replaced atomically. Each process needs its
            own.
        port: The port to listen on, in place of `textfile`; 0 for any free one.
        host: The address to listen on. Default: only this machine can connect; "0.0.0.0": anyone can.
        interval_seconds: Shortest time between two writes of the file. Default 15, the scrape interval in Prometheus'
            example configuration.

    Raises:
        ValueError: If not exactly one of `textfile` and `port` is given, the file does not end in ".prom", or the port
            is out of range.
        TypeError: If an argument has the wrong type.
        tfopt.errors.UnsupportedError: If prometheus-client is not installed.

    Example:
        >>> exporter = tfopt.callbacks.PrometheusExporter("/var/lib/node_exporter/training.prom")
        >>> model.fit(dataset, callbacks=[exporter])
    """

    def __init__(
        self,
        textfile: str | os.PathLike[str] | None = None,
        *,
        port: int | None = None,
        host: str = "127.0.0.1",
        interval_seconds: float = 15.0,
    ):
        super().__init__()
        if importlib.util.find_spec("prometheus_client") is None:
            raise UnsupportedError(
                "Expected the package prometheus-client, which PrometheusExporter needs. Found that it is not "
                "installed. Run: pip install 'tfopt[prometheus]'"
            )
        if (textfile is None) == (port is None):
            raise ValueError(
                f"Expected a textfile or a port. Received: textfile={textfile!r}, port={port!r}. For both, use two "
                "exporters."
            )
        self._textfile = None if textfile is None else _prom_file(textfile)
        self._port = None if port is None else integer("port", port, "Use 0 for any free port.", least=0, most=65535)
        if not isinstance(host, str) or not host:  # an empty one would listen everywhere
            raise TypeError(f'Expected host to be an address. Received: {host!r}. Use "127.0.0.1".')
        self._host = host
        self._interval_seconds = number("interval_seconds", interval_seconds, "Give seconds.", above=0)
        self._ending = contextlib.ExitStack()
        self._outlet: _Textfile | _Server | None = None
        self._throughput: ThroughputLogger | None = None
        self._exported = Exported(Run())  # of no fit: `evaluate` and `predict` call callbacks too
        self._before, self._most = 0, sys.maxsize

    @property
    def url(self) -> str | None:
        """Where to scrape, while `fit` runs; None otherwise."""
        return self._outlet.url if isinstance(self._outlet, _Server) else None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Opens the port, or begins the file."""
        self._end()  # if an exception ended the previous fit
        self._exported = Exported(begin_run(self), progress=Progress())
        self._before, self._most = 0, most_steps(self)
        if self._textfile is not None:
            self._outlet = _Textfile(self._textfile, self._exported, self._interval_seconds)
        elif self._port is not None:
            self._outlet = _serve(self._host, self._port, self._exported)
        if self._outlet is None:
            return
        end_with_fit(self, self._outlet.close)
        self._ending.callback(self._outlet.close, _WAIT_SECONDS)
        self._throughput = find_source(ThroughputLogger, self)
        subscribe(self, {UtilizationLogger: self._take_samples, ThroughputLogger: self._take_throughput}, self._ending)
        self._refresh()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts steps."""
        self._exported.steps = self._before + min(batch + 1, self._most)
        self._exported.progress.end_step(batch)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Removes the throughput, which validation has none of."""
        self._exported.throughput = {}

    def on_test_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes that a step of validation has ended, if not the first one."""
        self._exported.progress.begin_validation_step()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Exports the epoch's logs."""
        self._exported.epochs += 1
        self._before = self._exported.steps
        self._exported.logs = {} if logs is None else logs
        self._refresh()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Closes the port, or leaves in the file what stays true."""
        self._end()

    def _end(self) -> None:
        self._ending.close()
        self._outlet = self._throughput = None

    def _take_samples(self, rows: tuple[GpuSample, ...]) -> None:
        """Runs in the sampler's thread."""
        self._exported.rows = rows
        self._refresh()

    def _take_throughput(self, row: Mapping[str, Any]) -> None:
        """Runs in the training thread, about once a second."""
        self._exported.throughput = finite({key: row.get(key) for key in PACE_KEYS})
        slowest = row.get("step_time_p99_ms") or 0.0
        self._exported.step_seconds = slowest / 1000 * steps_at_once(self.model)
        if self._throughput is not None:
            self._exported.step_times = self._throughput.step_times
        self._refresh()

    def _refresh(self) -> None:
        outlet = self._outlet
        if isinstance(outlet, _Textfile):  # a scrape of the port gets the current values anyway
            outlet.refresh()


def _registry(exported: Exported) -> "CollectorRegistry":
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry()
    registry.register(exported)
    return registry


class _Textfile:
    """Writes the metrics to a file at intervals."""

    def __init__(self, path: Path, exported: Exported, interval_seconds: float):
        self._path, self._exported, self._registry = path, exported, _registry(exported)
        self._interval_seconds = interval_seconds
        self._written = -math.inf
        self._background = Background("textfile", self._write)

    def refresh(self) -> None:
        """Queues a write if one is due."""
        now = time.monotonic()
        if now - self._written >= self._interval_seconds:
            self._written = now
            self._background.put("readings")

    def close(self, wait_seconds: float = _LONGEST_SECONDS) -> None:
        """Writes the file for the last time. A second call does nothing."""
        self._exported.end()
        self._background.put("the end")
        self._background.close(wait_seconds, rest_at_exit=True)

    def _write(self, _: str) -> None:
        from prometheus_client import generate_latest

        try:
            write_atomic(self._path, generate_latest(self._registry).decode())
        except OSError as error:
            text = (
                f"Expected to write {self._path} for Prometheus. Found: {error}. tfopt keeps trying; the training goes "
                "on. Free the disk or choose another folder."
            )
            warn_once(f"prometheus {self._path}", text)


class _Server:
    """Serves the metrics on a port."""

    def __init__(self, host: str, port: int, exported: Exported):
        from prometheus_client import start_http_server

        self._process = os.getpid()
        self._closing: threading.Thread | None = None
        self._server, self._thread = start_http_server(port, host, _registry(exported))
        self._connections = _tracked_connections(self._server)
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self._server.server_port}/metrics"

    def close(self, wait_seconds: float = _LONGEST_SECONDS) -> None:
        """Closes the port. A second call does nothing."""
        # A forked child has this object, but not its threads, and must not close the parent's port.
        if self._closing is not None or os.getpid() != self._process:
            return
        # In a thread: garbage collection may call this in the server's own thread, which would wait for itself.
        self._closing = threading.Thread(target=self._close, name="tfopt-prometheus-closing", daemon=True)
        with contextlib.suppress(RuntimeError):  # no thread can be started: the port stays open until Python exits
            self._closing.start()
            if threading.current_thread() is not self._thread:
                self._closing.join(wait_seconds)

    def _close(self) -> None:
        with contextlib.suppress(OSError):
            # First, since it wakes the server, which looks for `shutdown` only every half second. Closing alone leaves
            # the socket open in processes forked since, and the port taken.
            self._server.socket.shutdown(socket.SHUT_RDWR)
        self._server.shutdown()
        self._server.server_close()
        # Otherwise the thread of a client that never asks, or never reads, stays.
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def _tracked_connections(server: Any) -> "weakref.WeakSet[socket.socket]":
    """The open ones among all future connections of a server."""
    connections: weakref.WeakSet[socket.socket] = weakref.WeakSet()
    process = server.process_request

    def process_and_track(connection: socket.socket, address: object) -> None:
        connections.add(connection)
        process(connection, address)

    server.process_request = process_and_track
    return connections


def _serve(host: str, port: int, exported: Exported) -> _Server | None:
    try:
        return _Server(host, port, exported)
    except (OSError, ValueError, RuntimeError) as error:  # ValueError: a bad host; RuntimeError: no thread
        text = (
            f"Expected to listen on {host}:{port} for Prometheus. Found: {error}. Nothing can be scraped there; the "
            "training goes on. Choose another port, or 0 for any free one."
        )
        warn_once(f"prometheus {host}:{port}", text)
        return None


def _prom_file(textfile: Any) -> Path:
    path = file("textfile", textfile, 'Name a file that ends in ".prom".')
    if path.suffix != ".prom":
        raise ValueError(
            f'Expected textfile to be a file that ends in ".prom". Received: {str(textfile)!r}. node_exporter reads no '
            "others."
        )
    return path
