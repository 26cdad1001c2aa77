"""Readings of `fit` for Prometheus."""

import contextlib
import math
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras

from tfopt.callbacks.background import Background, end_with_fit
from tfopt.callbacks.prometheus_metrics import Readings, registry, require_client
from tfopt.callbacks.readings import finite, take_readings
from tfopt.callbacks.throughput_logger import THROUGHPUT_KEYS
from tfopt.checks import file, integer, number
from tfopt.files import write_atomic
from tfopt.hardware import GpuSample
from tfopt.warn import warn_once

_WAIT_SECONDS = 2.0
_PORT = "Take 0 for any port that is free."


class PrometheusExporter(keras.callbacks.Callback):
    """Offers the readings of `model.fit` to Prometheus, in a file for node_exporter or on a port of its own.

    Use the file where node_exporter runs (its textfile collector), and the port where Prometheus can reach the machine.
    Readings come from the `UtilizationLogger` and `ThroughputLogger` in fit's list, or from ones that it adds. They
    keep their names and units, with `tfopt_` before them and the GPU as a label:
    `tfopt_gpu_utilization_percent{gpu="0",uuid="GPU-…"}`, `tfopt_host_cpu_percent`, `tfopt_step_time_ms`; the energy
    counter is `tfopt_gpu_energy_joules_total`. Beside them `tfopt_throttled{gpu,uuid,reason}`, `tfopt_steps_total` and
    `tfopt_epochs_total` of this fit, `tfopt_log{key="loss"}` for each finite number in the logs of the last epoch, and
    `tfopt_fit_running`. What is unknown has no sample, never 0; nor have the training's pace during validation and,
    after `fit`, anything but the counters and logs. The port is closed then.

    No step waits for it: files are written and scrapes answered in threads of their own. A file that cannot be written
    and a port that is taken are reported once, and the training goes on.

    Args:
        textfile: The file, ending in ".prom", in node_exporter's folder; replaced as a whole. One a process: a second
            training needs another name.
        port: Or the port to listen on; 0 for any that is free.
        host: The address to listen on. Default: this machine alone can connect; "0.0.0.0": everybody can.
        interval_seconds: How often the file is written, at most. Default 15, as often as Prometheus' example asks.
        clock: Seconds, monotonic.

    Attributes:
        url: Where to scrape, while `fit` runs; None otherwise.

    Raises:
        ValueError: Not one of `textfile` and `port`, a file that does not end in ".prom", or what can be no port.
        TypeError: An argument is of the wrong kind.
        tfopt.errors.UnsupportedError: The package prometheus-client is not installed.

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
        clock: Callable[[], float] = time.monotonic,
    ):
        super().__init__()
        require_client()
        if (textfile is None) == (port is None):
            raise ValueError(
                f"Expected a textfile or a port. Received: textfile={textfile!r}, port={port!r}. For both use two."
            )
        self._textfile = None if textfile is None else _prom_file(textfile)
        self._port = None if port is None else integer("port", port, _PORT, least=0, most=65535)
        if not isinstance(host, str) or not host:  # an empty one would listen everywhere
            raise TypeError(f'Expected host to be an address. Received: {host!r}. Take "127.0.0.1".')
        self._host = host
        self._interval_seconds = number("interval_seconds", interval_seconds, "Give seconds.", above=0)
        self._clock = clock
        self._ending = contextlib.ExitStack()
        self._outlet: _Textfile | _Server | None = None
        self._readings = Readings()  # of no fit: `evaluate` and `predict` call callbacks too

    @property
    def url(self) -> str | None:
        """Where to scrape, while `fit` runs; None otherwise."""
        return self._outlet.url if isinstance(self._outlet, _Server) else None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Opens the port, or begins the file."""
        self._end()  # an exception ended the fit before, without on_train_end
        self._readings = Readings()
        self._before = 0
        if self._textfile is not None:
            self._outlet = _Textfile(self._textfile, self._readings, self._interval_seconds, self._clock)
        elif self._port is not None:
            self._outlet = _serve(self._host, self._port, self._readings)
        if self._outlet is None:
            return
        end_with_fit(self, self._outlet.close)
        self._ending.callback(self._outlet.close)
        self._ending.callback(take_readings(self, self._take_samples, self._take_throughput))
        self._outlet.refresh()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts on from the epochs before."""
        self._before = self._readings.steps

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts the steps."""
        self._readings.steps = self._before + batch + 1

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Takes the training's pace away: there is none during validation."""
        self._readings.throughput = {}

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Offers the epoch's logs."""
        self._readings.epochs += 1
        self._readings.logs = {} if logs is None else logs
        self._refresh()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Closes the port, or leaves in the file what stays true."""
        self._end()

    def _end(self) -> None:
        self._ending.close()
        self._outlet = None

    def _take_samples(self, rows: tuple[GpuSample, ...]) -> None:
        """Runs in the sampler's thread."""
        self._readings.rows = rows
        self._refresh()

    def _take_throughput(self, row: Mapping[str, Any]) -> None:
        """Runs in the training thread, about once a second."""
        self._readings.throughput = finite({key: row.get(key) for key in THROUGHPUT_KEYS})
        self._refresh()

    def _refresh(self) -> None:
        outlet = self._outlet
        if outlet is not None:
            outlet.refresh()


class _Textfile:
    """The readings in a file, now and then."""

    def __init__(self, path: Path, readings: Readings, interval_seconds: float, clock: Callable[[], float]):
        self._readings = readings
        self._interval_seconds = interval_seconds
        self._clock = clock
        self._written = -math.inf
        self._background = Background("textfile", _writer(path, readings))

    def refresh(self) -> None:
        """Has the file written, if it is time."""
        now = self._clock()
        if now - self._written >= self._interval_seconds:
            self._written = now
            self._background.put("readings")

    def close(self) -> None:
        """Has the file written for the last time. A second call does nothing."""
        self._readings.end()
        self._background.put("the end")
        self._background.close()


def _writer(path: Path, readings: Readings) -> Callable[[object], None]:
    from prometheus_client import generate_latest

    own = registry(readings)

    def write(_: object) -> None:
        try:
            write_atomic(path, generate_latest(own).decode())
        except OSError as error:
            text = (
                f"Expected to write {path} for Prometheus. Found: {error}. It is tried again; the training goes on. "
                "Free the disk or choose another folder."
            )
            warn_once(f"prometheus {path}", text)

    return write


class _Server:
    """The readings on a port."""

    def __init__(self, host: str, port: int, readings: Readings):
        from prometheus_client import start_http_server

        self._readings = readings
        self._process = os.getpid()
        self._closing: threading.Thread | None = None
        self._server, self._thread = start_http_server(port, host, registry(readings))
        self._connections = _noted_connections(self._server)
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self._server.server_port}/metrics"

    def refresh(self) -> None:
        """Does nothing: each scrape gets what there is then."""

    def close(self) -> None:
        """Closes the port. A second call does nothing."""
        # A fork takes the object along, but neither its threads nor the right to end the parent's port.
        if self._closing is not None or os.getpid() != self._process:
            return
        # In a thread, since the server's own may come here, through the garbage collection, and would wait for itself.
        self._closing = threading.Thread(target=self._close, name="tfopt-prometheus-closing", daemon=True)
        with contextlib.suppress(RuntimeError):  # no thread can be started: the port stays open until Python exits
            self._closing.start()
            if threading.current_thread() is not self._thread:
                self._closing.join(_WAIT_SECONDS)

    def _close(self) -> None:
        self._server.shutdown()
        with contextlib.suppress(OSError):
            # Closing alone leaves it open in a process that was forked meanwhile, and the port taken.
            self._server.socket.shutdown(socket.SHUT_RDWR)
        self._server.server_close()
        # The thread of a client that never asks, or never reads, would stay.
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def _noted_connections(server: Any) -> "weakref.WeakSet[socket.socket]":
    """Those that are open, of all that come from now on."""
    connections: weakref.WeakSet[socket.socket] = weakref.WeakSet()
    process = server.process_request

    def process_and_note(connection: socket.socket, address: object) -> None:
        connections.add(connection)
        process(connection, address)

    server.process_request = process_and_note
    return connections


def _serve(host: str, port: int, readings: Readings) -> _Server | None:
    try:
        return _Server(host, port, readings)
    except (OSError, ValueError, RuntimeError) as error:  # no name of a host; no thread can be started
        text = (
            f"Expected to listen on {host}:{port} for Prometheus. Found: {error}. Nothing can be scraped there; the "
            "training goes on. Choose another port, or 0 for any that is free."
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
