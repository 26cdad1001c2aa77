"""A thread that samples the GPUs and the host while something else runs."""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Self

from tfopt import checks
from tfopt.hardware.gpu_memory import AllocatorReading, read_allocator
from tfopt.hardware.gpu_reader import GpuReader
from tfopt.hardware.host_activity import HostMeter, HostReading
from tfopt.hardware.nvml import driver
from tfopt.hardware.nvml.gpu_reading import Reading
from tfopt.warn import warn_once

# close() must return within a second, whatever hangs.
_JOIN_SECONDS = 0.5


@dataclass(frozen=True)
class _Moment:
    """When and of which GPU a sample was taken."""

    time_seconds: float
    """Wall clock, in seconds since 1970."""
    elapsed_seconds: float
    """Seconds since the sampler started, by a monotonic clock."""
    index: int | None = None
    """The GPU's position among the process's GPUs, as in TensorFlow's `GPU:index`."""
    uuid: str | None = None
    """The GPU's UUID."""


# Fields come from the last base first: moment, GPU, allocator, host.
@dataclass(frozen=True)
class GpuSample(HostReading, AllocatorReading, Reading, _Moment):
    """One GPU at one moment, and the host at the same moment. None means unknown, never 0.

    On a machine without a GPU, `index`, `uuid` and the GPU's fields are None. The fields are documented in `_Moment`,
    `Reading`, `AllocatorReading` and `HostReading`.
    """

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        reasons = None if self.throttle_reasons is None else list(self.throttle_reasons)
        return asdict(self) | {"throttle_reasons": reasons}


Rows = tuple[GpuSample, ...]


class GpuSampler:
    """Samples the GPUs that this process may use, and the host, in a background thread.

    Use it around a run to see what the hardware did. Starting, `samples` and `close()` never wait for the driver. If
    the driver hangs or a GPU falls off the bus, its fields are None, one warning is logged, and sampling continues. A
    row waits up to 0.9 s for the driver; while the driver takes longer, rows continue with the host's fields alone. No
    field is further than that from its row's time.

    Args:
        interval_seconds: Time between samples. If a sample takes longer, the next ones are skipped; they never pile up.
            A GPU takes about 10 ms; without GPM about 50, of which 42 are for PCIe traffic. Default: 1.
        keep: How many samples (of all GPUs) to keep; older ones are dropped. Default: 3600, one hour.
        on_sample: Called in the sampler's thread with the rows of each sample.
        environ: Where CUDA_VISIBLE_DEVICES is read. Default: this process's environment.
        deadline_seconds: How long a GPU may take to answer before the driver counts as hung. Default: 10.

    Raises:
        ValueError: If `interval_seconds`, `deadline_seconds` or `keep` is not positive.
        TypeError: If an argument has the wrong type.

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
        environ: Mapping[str, str] = os.environ,
        deadline_seconds: float = driver.DEADLINE_SECONDS,
    ):
        if on_sample is not None and not callable(on_sample):
            raise TypeError(f"Expected on_sample to be a function of the rows, or None. Received: {on_sample!r}.")
        self.interval_seconds = checks.number("interval_seconds", interval_seconds, "Give seconds.", above=0)
        self._on_sample = on_sample
        self._environ = environ
        self._deadline_seconds = checks.number("deadline_seconds", deadline_seconds, "Give seconds.", above=0)
        self._keep = checks.integer("keep", keep, "Give a number of samples.", least=1)
        self._thread: threading.Thread | None = None
        self._begin()

    @property
    def samples(self) -> Rows:
        """The rows of the last `keep` samples, oldest first; one row per GPU."""
        with self._lock:
            return tuple(row for rows in self._ticks for row in rows)

    def start(self) -> Self:
        """Starts sampling unless it is running. After `close()`, discards the old samples first."""
        if self._thread is None or not self._thread.is_alive():  # a fork keeps the object and loses the thread
            self._begin()
            # Each thread has its own end signal, so that one that hung through close() still ends.
            thread = threading.Thread(target=self._run, args=(self._ended,), name="tfopt-sampler", daemon=True)
            thread.start()
            self._thread = thread  # only now: a thread that failed to start cannot be joined
        return self

    def close(self) -> None:
        """Stops sampling within a second, whatever hangs, and keeps the samples. A second call does nothing."""
        self._ended.set()
        self._gpus.close()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():  # on_sample may close its sampler
            thread.join(_JOIN_SECONDS)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _begin(self) -> None:
        """Resets everything that belongs to one run."""
        self._lock = threading.Lock()  # a forked child may find the old one locked
        self._ticks: deque[Rows] = deque(maxlen=self._keep)
        self._ended = threading.Event()
        self._gpus = GpuReader(self._environ, self._deadline_seconds)
        self._host = HostMeter()
        self._started_at = time.monotonic()

    def _run(self, ended: threading.Event) -> None:
        due = 0.0
        while not ended.is_set():
            try:
                self._tick(ended)
            except Exception as error:  # noqa: BLE001  a thread that dies silently would look like an idle GPU
                warn_once(f"tick {type(error).__name__}", f"A sample failed and is left out: {error!r}", error=error)
            elapsed = time.monotonic() - self._started_at
            due = _next_due(due, elapsed, self.interval_seconds)
            ended.wait(min(due - elapsed, threading.TIMEOUT_MAX))

    def _tick(self, ended: threading.Event) -> None:
        """Samples every GPU and keeps the rows, unless the run has ended meanwhile."""
        now, elapsed = time.time(), time.monotonic() - self._started_at
        host = vars(self._host.read())
        rows = tuple(
            GpuSample(
                now,
                elapsed,
                index=gpu.index,
                uuid=gpu.uuid,
                **vars(reading),
                **vars(read_allocator(gpu.index)),
                **host,
            )
            for gpu, reading in self._gpus.read()
        ) or (GpuSample(now, elapsed, **host),)
        with self._lock:
            if ended.is_set():
                return
            self._ticks.append(rows)
        self._report(rows)

    def _report(self, rows: Rows) -> None:
        if self._on_sample is None:
            return
        try:
            self._on_sample(rows)
        except Exception as error:  # noqa: BLE001  the caller's function, in our thread
            name = getattr(self._on_sample, "__qualname__", type(self._on_sample).__name__)
            text = f"Expected on_sample ({name}) to return. Found: {error!r}. What to do: fix it; sampling goes on."
            warn_once(f"on_sample {name}", text, error=error)


def _next_due(due: float, elapsed: float, interval: float) -> float:
    """When the sample after the one at `due` is due. Missed samples are skipped; delays do not add up."""
    following = due + interval
    return following if elapsed <= following else elapsed + interval - (elapsed - due) % interval
