"""What is kept of a training for its report."""

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tfopt.callbacks.readings import HOST_KEYS
from tfopt.callbacks.report.charts import QUANTITIES
from tfopt.callbacks.report.page import Epoch, Record
from tfopt.callbacks.report.timeline import Event, Kept, Timeline
from tfopt.callbacks.throttling import Throttling
from tfopt.hardware import GpuSample

if TYPE_CHECKING:
    from tfopt.callbacks.compilation_logger import CompilationLogger
    from tfopt.callbacks.throughput_logger import ThroughputLogger

_NAMES = [quantity.name for quantity in QUANTITIES]
_OF_HOST = [name for name in _NAMES if name in HOST_KEYS]
_OF_GPUS = [name for name in _NAMES if name in GpuSample.__dataclass_fields__ and name not in HOST_KEYS]
_OF_STEPS = [*(name for name in _NAMES if name not in GpuSample.__dataclass_fields__), "mfu_percent"]
_EPOCHS = 1000


class Recording:
    """Collects readings and events of one training, from several threads.

    Args:
        name: The model's.
        throughput: Knows when the first step had ended, and how many examples it had.
        compilations: The one in fit's list, if there is one.
        clock: Seconds, monotonic.
        optimizer: The name of its class.
    """

    def __init__(
        self,
        name: str,
        throughput: "ThroughputLogger",
        compilations: "CompilationLogger | None",
        clock: Callable[[], float],
        optimizer: str | None = None,
    ):
        self._name, self._throughput, self._compilations, self._clock = name, throughput, compilations, clock
        self._optimizer = optimizer
        self._lock = threading.Lock()  # held for a millisecond at most
        self._timeline = Timeline()
        self._throttling = Throttling()
        self._epochs: Kept[Epoch] = Kept(_EPOCHS)
        self._first_epoch: float | None = None
        self._epoch_begin = 0.0
        self._compiled = 0
        self._seen = 0.0  # when the training was last seen at work
        self._began = clock()

    @property
    def now(self) -> float:
        """Seconds since it began."""
        return self._clock() - self._began

    def take_samples(self, rows: tuple[GpuSample, ...]) -> None:
        """Adds a reading of the GPUs and the host."""
        now = self.now
        with self._lock:
            for name in _OF_HOST:
                self._timeline.add(name, None, now, getattr(rows[0], name))
            for row in rows:
                if row.index is None:
                    continue
                for name in _OF_GPUS:
                    self._timeline.add(name, row.index, now, getattr(row, name))
                reasons = self._throttling.reasons(row)
                slowed = None if reasons is None else 100.0 * bool(reasons)
                self._timeline.add("slowed_percent", row.index, now, slowed)
        self._take_compilations()

    def take_steps(self, row: Mapping[str, Any]) -> None:
        """Adds what `ThroughputLogger` tells of the steps since the last time."""
        now = self.now
        with self._lock:
            self._seen = now
            for name in _OF_STEPS:
                self._timeline.add(name, None, now, row.get(name))

    def take_event(self, kind: str, text: str) -> None:
        """Adds an event that has just happened."""
        now = self.now
        with self._lock:
            self._timeline.events[kind].add(Event(now, text))

    def begin_epoch(self) -> None:
        """Notes the time."""
        self._epoch_begin = self.now
        if self._first_epoch is None:
            self._first_epoch = self._epoch_begin

    def end_epoch(self, epoch: int, logs: Mapping[str, Any]) -> None:
        """Adds an epoch with its logs, to which callbacks further back in the list may still add."""
        now = self.now
        with self._lock:
            self._seen = now
            self._epochs.add(Epoch(number=epoch + 1, begin=self._epoch_begin, end=now, logs=logs))

    def record(self, *, ended: bool, interrupted: bool, written: str, environment: Mapping[str, Any]) -> Record:
        """What there is so far; of an interrupted training up to when it was last seen at work."""
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
        """Adds those that were reported since the last time; it is not known exactly when they ended."""
        # Before the first epoch a CompilationLogger further back in the list still has those of the fit before.
        if self._compilations is None or self._first_epoch is None or self._compilations.compilations is None:
            return
        events = self._compilations.compilations.events
        now = self.now
        with self._lock:
            for event in events[self._compiled :]:
                self._timeline.events["compilation"].add(Event(now, str(event)))
            self._compiled = max(self._compiled, len(events))
