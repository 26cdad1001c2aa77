"""Records a training for its report."""

import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from tfopt.callbacks.report.timeline import BoundedList, Event, Timeline
from tfopt.callbacks.report.training_charts import QUANTITIES
from tfopt.callbacks.report.training_page import Epoch, Record
from tfopt.causes.readings import HOST_KEYS, Throttling
from tfopt.hardware import GpuSample

_NAMES = [quantity.name for quantity in QUANTITIES]
_HOST = [name for name in _NAMES if name in HOST_KEYS]
_GPU = [name for name in _NAMES if name in GpuSample.__dataclass_fields__ and name not in HOST_KEYS]
_STEP = [*(name for name in _NAMES if name not in GpuSample.__dataclass_fields__), "mfu_percent"]
_EPOCHS = 1000


class Throughput(Protocol):
    """A `ThroughputLogger`."""

    first_step_seconds: float | None
    batch_size: float | None


class Recorder:
    """Collects readings and events of one training, from several threads.

    Args:
        name: The model's name.
        throughput: Knows the first step's time and the batch size.
        compilations: The `CompilationLogger` in fit's list, if any.
        clock: Seconds, monotonic.
        optimizer: The name of its class, None if unknown.
    """

    def __init__(
        self,
        name: str,
        throughput: Throughput,
        compilations: Any,
        clock: Callable[[], float],
        optimizer: str | None = None,
    ):
        self._name, self._throughput, self._compilations, self._clock = name, throughput, compilations, clock
        self._optimizer = optimizer
        self._lock = threading.Lock()  # held for a millisecond at most
        self._timeline = Timeline()
        self._throttling = Throttling()
        self._epochs: BoundedList[Epoch] = BoundedList(_EPOCHS)
        self._first_epoch: float | None = None
        self._epoch_begin = 0.0
        self._compiled = 0
        self._seen = 0.0  # when the training last made progress
        self._began = clock()

    @property
    def now(self) -> float:
        """Seconds since the training began."""
        return self._clock() - self._began

    def take_samples(self, rows: tuple[GpuSample, ...]) -> None:
        """Adds a sample of the GPUs and the host."""
        now = self.now
        with self._lock:
            for name in _HOST:
                self._timeline.add(name, None, now, getattr(rows[0], name))
            for row in rows:
                if row.index is None:
                    continue
                for name in _GPU:
                    self._timeline.add(name, row.index, now, getattr(row, name))
                reasons = self._throttling.reasons(row)
                throttled = None if reasons is None else 100.0 * bool(reasons)
                self._timeline.add("throttled_percent", row.index, now, throttled)
        self._take_compilations()

    def take_steps(self, row: Mapping[str, Any]) -> None:
        """Adds what `ThroughputLogger` reports about the steps since the last call."""
        now = self.now
        with self._lock:
            self._seen = now
            for name in _STEP:
                self._timeline.add(name, None, now, row.get(name))

    def take_alert(self, alert: object) -> None:
        """Adds an alert that was just raised."""
        now = self.now
        with self._lock:
            self._timeline.events["alert"].add(Event(now, str(alert)))

    def begin_epoch(self) -> None:
        """Notes when the epoch began."""
        self._epoch_begin = self.now
        if self._first_epoch is None:
            self._first_epoch = self._epoch_begin

    def end_epoch(self, epoch: int, logs: Mapping[str, Any]) -> None:
        """Adds an epoch with its logs, to which later callbacks may still add."""
        now = self.now
        with self._lock:
            self._seen = now
            self._epochs.add(Epoch(number=epoch + 1, begin=self._epoch_begin, end=now, logs=logs))

    def record(self, *, ended: bool, interrupted: bool, written: str, environment: Mapping[str, Any]) -> Record:
        """Returns the record so far; for an interrupted training, up to when it last made progress."""
        self._take_compilations()
        with self._lock:
            seconds = self._seen if interrupted and self._seen else self.now
            timeline, epochs = self._timeline.copy(seconds), self._epochs.copy()
        first = self._throughput.first_step_seconds
        return Record(
            name=self._name,
            seconds=seconds,
            ended=ended,
            written=written,
            first_step_end=None if first is None or self._first_epoch is None else self._first_epoch + first,
            timeline=timeline,
            epochs=epochs,
            environment=environment,
            optimizer=self._optimizer,
            batch_size=self._throughput.batch_size,
        )

    def _take_compilations(self) -> None:
        """Adds the compilations reported since the last call; when exactly they ended is unknown."""
        # Before the first epoch, a CompilationLogger later in the list still has those of the previous fit.
        if self._compilations is None or self._first_epoch is None or self._compilations.compilations is None:
            return
        events = self._compilations.compilations.events
        now = self.now
        with self._lock:
            for event in events[self._compiled :]:
                self._timeline.events["compilation"].add(Event(now, str(event)))
            self._compiled = max(self._compiled, len(events))
