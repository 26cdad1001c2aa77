"""A thread that reads the GPUs and the host at regular times while something else runs."""

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self, TypeVar

from tfopt.hardware import nvml
from tfopt.hardware.gpus import Gpu, find_gpus
from tfopt.hardware.host import HostMeter
from tfopt.hardware.nvml_errors import NO_DRIVER, NvmlError, unexpected
from tfopt.hardware.nvml_values import Reading
from tfopt.hardware.sample import GpuSample
from tfopt.hardware.visible import hides_all
from tfopt.warn import warn_once

Answer = TypeVar("Answer")
Rows = tuple[GpuSample, ...]

# close() promises to return within one second whatever hangs.
_JOIN_SECONDS = 0.5


class GpuSampler:
    """Samples the GPUs that this process may use, and the host, in a thread of its own.

    Use it around a run to see what the hardware did meanwhile. Nothing here waits for the driver: not the start, not
    `samples`, not `close()`. A driver that hangs or a GPU that falls off the bus leaves its fields None and one
    warning, and the rest goes on.

    Args:
        interval_seconds: Time from one sample to the next. A sample that takes longer lets the next ones fall out;
            they never pile up. A GPU takes about 10 ms, and one without GPM about 50, of which 42 for PCIe traffic.
            Default: 1.
        keep: How many samples (of all GPUs) to keep; older ones are dropped. Default: 3600, one hour.
        on_sample: Called in the sampler's thread with the rows of each sample.
        clock: Monotonic clock, in seconds.
        wall_clock: Seconds since 1970.
        environ: Where CUDA_VISIBLE_DEVICES is read. Default: this process's environment.
        deadline_seconds: How long a sample waits for the driver. Default: 10.

    Raises:
        ValueError: `interval_seconds` or `keep` is not positive.
        TypeError: An argument is of the wrong kind.

    Example:
        >>> with GpuSampler(interval_seconds=0.1) as sampler:
        ...     time.sleep(0.3)
        >>> len(sampler.samples) > 0
        True
    """

    def __init__(
        self,
        interval_seconds: float = 1.0,
        keep: int = 3600,
        *,
        on_sample: Callable[[Rows], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        environ: Mapping[str, str] = os.environ,
        deadline_seconds: float = nvml.DEADLINE_SECONDS,
    ):
        _check_seconds("interval_seconds", interval_seconds)
        _check_seconds("deadline_seconds", deadline_seconds)
        _check_keep(keep)
        if on_sample is not None and not callable(on_sample):
            raise TypeError(f"Expected on_sample to be a function of the rows, or None. Received: {on_sample!r}.")
        self.interval_seconds = interval_seconds
        self._on_sample = on_sample
        self._clock = clock
        self._wall_clock = wall_clock
        self._environ = environ
        self._deadline_seconds = deadline_seconds
        self._lock = threading.Lock()
        self._ticks: deque[Rows] = deque(maxlen=keep)
        self._thread: threading.Thread | None = None
        self._begin()

    @property
    def samples(self) -> Rows:
        """The rows of the last `keep` samples, oldest first; one row a GPU."""
        with self._lock:
            return tuple(row for rows in self._ticks for row in rows)

    def start(self) -> Self:
        """Starts sampling; does nothing while it runs. After `close()` it starts anew, without the old samples."""
        if self._thread is None or not self._thread.is_alive():  # a fork keeps the object and loses the thread
            self._begin()
            # The thread gets its own end signal: one that hangs through close() stays ended after the next start().
            thread = threading.Thread(target=self._run, args=(self._ended,), name="tfopt-sampler", daemon=True)
            thread.start()
            self._thread = thread  # not before: one that could not be started cannot be waited for
        return self

    def close(self) -> None:
        """Ends sampling within a second, whatever hangs. The samples stay. A second call does nothing."""
        self._ended.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():  # on_sample may close its sampler
            thread.join(_JOIN_SECONDS)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _begin(self) -> None:
        """Sets everything that belongs to one run."""
        with self._lock:
            self._ticks.clear()
        self._ended = threading.Event()
        self._gpus: tuple[Gpu, ...] | None = None
        self._read_before: set[str] = set()
        self._host = HostMeter(self._clock)
        self._started_at = self._clock()

    def _run(self, ended: threading.Event) -> None:
        due = 0.0
        while not ended.is_set():
            try:
                self._tick(ended)
            except Exception as error:  # noqa: BLE001  a thread that dies in silence would look like an idle GPU
                warn_once(f"tick {type(error).__name__}", f"A sample failed and is left out: {error!r}", error=error)
            elapsed = self._clock() - self._started_at
            due = _next_due(due, elapsed, self.interval_seconds)
            ended.wait(min(due - elapsed, threading.TIMEOUT_MAX))

    def _tick(self, ended: threading.Event) -> None:
        """Takes one sample of every GPU and keeps it, unless the run has ended meanwhile."""
        now, elapsed = self._wall_clock(), self._clock() - self._started_at
        host = self._host.read()._asdict()
        gpus = self._find_gpus()
        rows = tuple(
            GpuSample(now, elapsed, index=gpu.index, uuid=gpu.uuid, **self._read(gpu)._asdict(), **host) for gpu in gpus
        ) or (GpuSample(now, elapsed, **host),)
        with self._lock:
            if ended.is_set():
                return
            self._ticks.append(rows)
        self._report(rows)

    def _find_gpus(self) -> tuple[Gpu, ...]:
        """The GPUs to read. Looked for once, but after a hang again, since a hung driver may come back."""
        if self._gpus is None:
            try:
                door, environ = nvml.door(), self._environ
                self._gpus = () if hides_all(environ) else self._ask(lambda: find_gpus(door, environ))
            except NvmlError as error:
                without = error.cause in NO_DRIVER
                warn_once(
                    error.cause, f"No NVIDIA GPU to read; the host is read alone. ({error})" if without else str(error)
                )
                if error.cause == "hung":
                    return ()
                self._gpus = ()
        return self._gpus

    def _read(self, gpu: Gpu) -> Reading:
        door, anew = nvml.door(), gpu.uuid not in self._read_before
        self._read_before.add(gpu.uuid)
        try:
            return self._ask(lambda: door.read(gpu.uuid, anew=anew))
        except NvmlError as error:
            # A hung driver is one cause, however many GPUs wait for it; a lost GPU is a cause of its own.
            warn_once(
                error.cause if error.cause == "hung" else f"{error.cause} {gpu.uuid}", f"GPU:{gpu.index}: {error}"
            )
            return Reading()

    def _ask(self, question: Callable[[], Answer]) -> Answer:
        try:
            return nvml.door().call(question, deadline_seconds=self._deadline_seconds)
        except NvmlError:
            raise
        except Exception as error:  # the host, and the other GPUs, are to be read all the same
            raise unexpected(error) from error

    def _report(self, rows: Rows) -> None:
        if self._on_sample is None:
            return
        try:
            self._on_sample(rows)
        except Exception as error:  # noqa: BLE001  the caller's function, in our thread
            name = getattr(self._on_sample, "__qualname__", type(self._on_sample).__name__)
            text = f"Expected on_sample ({name}) to return. Found: {error!r}. What to do: mend it; sampling goes on."
            warn_once(f"on_sample {name}", text, error=error)


def _next_due(due: float, elapsed: float, interval: float) -> float:
    """When the sample after the one due at `due` is due. Missed times are skipped, and lateness does not add up."""
    following = due + interval
    return following if elapsed <= following else elapsed + interval - (elapsed - due) % interval


def _check_seconds(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"Expected {name} to be a number of seconds. Received: {value!r}.")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"Expected {name} to be a positive number of seconds. Received: {value!r}.")


def _check_keep(value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"Expected keep to be a whole number of samples. Received: {value!r}.")
    if value < 1:
        raise ValueError(f"Expected keep to be 1 or more. Received: {value!r}.")
