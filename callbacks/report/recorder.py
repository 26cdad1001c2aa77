"""Collects what happens in a training, for its page."""

import math
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tfopt.callbacks.report.learning_curves import Epoch, is_quality
from tfopt.callbacks.report.timeline import BoundedList, Event, Series, Timeline
from tfopt.callbacks.report.training_charts import QUANTITIES
from tfopt.callbacks.report.training_page import Record
from tfopt.callbacks.shared.reading_sources import THROUGHPUT_KEYS, finite, throughput_weight
from tfopt.causes.between_gpus import Replicas
from tfopt.causes.readings import GPU_KEYS, HOST_KEYS, SampleSpans, Throttling
from tfopt.hardware import GpuSample

_NAMES = [quantity.name for group in QUANTITIES.values() for quantity in group]
_HOST = [name for name in _NAMES if name in HOST_KEYS]
_GPU = [name for name in _NAMES if name in GPU_KEYS]
_STEP = [name for name in _NAMES if name in THROUGHPUT_KEYS]
# What the verdict compares GPUs by, besides what is drawn: only its mean counts.
_COMPARED = ("sm_clock_mhz", "gpu_memory_others_mib")
_COMPARED_POINTS = 100
# The NVML readings that the page adds up.
_TRAFFIC = {
    f"{bus}_mib_per_second": (f"{bus}_rx_mib_per_second", f"{bus}_tx_mib_per_second") for bus in ("nvlink", "pcie")
}
_JOULES_PER_KWH = 3.6e6
_EPOCHS = 1000
# Keys of the logs within epochs of which the curve is kept.
_CURVES = 12


class Recorder:
    """Collects readings and events of one training, from several threads."""

    def __init__(
        self,
        name: str,
        throughput: Any,  # the ThroughputLogger in fit's list
        compilations: Any,  # the CompilationLogger in fit's list, if any
        setup: Sequence[str] = (),
        replicas: Replicas | None = None,
    ):
        self._name, self._throughput, self._compilations = name, throughput, compilations
        self._setup, self._replicas = setup, replicas
        self._lock = threading.Lock()  # held for a millisecond at most
        self._timeline, self._learning = Timeline(), Timeline()
        self._errors: dict[int, tuple[int | None, int | None]] = {}  # by GPU: its last Xid, and ECC's count
        self._energy: dict[int, list[float]] = {}  # by GPU: its counter's first and last value
        self._throttling, self._spans = Throttling(), SampleSpans()
        self._epochs: BoundedList[Epoch] = BoundedList(_EPOCHS)
        self._first_epoch: float | None = None
        self._first_steps: float | None = None  # when the first steps that ThroughputLogger reports began
        self._epoch_begin = 0.0
        self._compiled = 0
        self._seen = 0.0  # when the training last made progress
        self._ended: float | None = None
        self._began = time.monotonic()

    @property
    def now(self) -> float:
        """Seconds since the training began."""
        return time.monotonic() - self._began

    def take_samples(self, rows: tuple[GpuSample, ...]) -> None:
        """Adds a sample of the GPUs and the host."""
        now = self.now
        with self._lock:
            seconds = self._spans.seconds(rows[0])
            for name in _HOST:
                self._timeline.add(name, None, now, getattr(rows[0], name), weight=seconds)
            both = (rows[0].host_network_rx_mib_per_second, rows[0].host_network_tx_mib_per_second)
            self._timeline.add("host_network_mib_per_second", None, now, _sum(both), weight=seconds)
            for row in rows:
                if row.index is None:
                    continue
                self._note_errors(row.index, row, now)
                for name in _GPU:
                    self._timeline.add(name, row.index, now, getattr(row, name), weight=seconds)
                for name in _COMPARED:
                    self._timeline.series[name].setdefault(row.index, Series(_COMPARED_POINTS))
                    self._timeline.add(name, row.index, now, getattr(row, name), weight=seconds)
                for name, directions in _TRAFFIC.items():
                    traffic = _sum([getattr(row, one) for one in directions])
                    self._timeline.add(name, row.index, now, traffic, weight=seconds)
                reasons = self._throttling.reasons(row)
                throttled = None if reasons is None else 100.0 * bool(reasons)
                self._timeline.add("throttled_percent", row.index, now, throttled, weight=seconds)
            self._timeline.add("gpu_energy_kwh", None, now, self._used(rows))
        self._take_compilations()

    def _note_errors(self, index: int, row: GpuSample, now: float) -> None:
        """Adds an event if the GPU has reported an error since the last sample."""
        xid, ecc = row.gpu_xid, row.gpu_ecc_uncorrected_errors
        last_xid, last_ecc = self._errors.get(index, (xid, ecc))  # those of before the fit are none of its events
        texts = []
        if xid is not None and xid != last_xid:
            texts.append(f"GPU:{index} reported Xid {xid}: NVIDIA's list of Xid errors says what to do.")
        if ecc is not None and last_ecc is not None and ecc > last_ecc:
            count = f"{ecc - last_ecc} memory error{'' if ecc - last_ecc == 1 else 's'}"
            texts.append(f"GPU:{index} had {count} that ECC could not correct: the results may be wrong.")
        for text in texts:
            self._timeline.events["hardware error"].add(Event(now, text))
        self._errors[index] = (last_xid if xid is None else xid, last_ecc if ecc is None else ecc)

    def _used(self, rows: Sequence[GpuSample]) -> float | None:
        """What all GPUs have used since their first readings; None once a counter went back."""
        for row in rows:
            if row.index is None or row.gpu_energy_joules is None:
                return None
            joules = self._energy.setdefault(row.index, [row.gpu_energy_joules] * 2)
            joules[1] = row.gpu_energy_joules if row.gpu_energy_joules >= joules[1] else math.nan
        return sum(last - first for first, last in self._energy.values()) / _JOULES_PER_KWH

    def take_steps(self, row: Mapping[str, Any], ago: float = 0.0) -> None:
        """Adds what `ThroughputLogger` reports about the steps since the last call, the last of which ended `ago`."""
        now = self.now
        end = now - ago
        begin = end - row.get("window_seconds", 0.0)
        with self._lock:
            self._seen = now
            self._first_steps = begin if self._first_steps is None else self._first_steps
            for name in _STEP:
                self._timeline.add(name, None, end, row.get(name), weight=throughput_weight(name, row), begin=begin)

    def take_logs(self, at: float, logs: Mapping[str, Any]) -> None:
        """Adds the logs of a step that ended at this time."""
        with self._lock:
            self._add_logs(at, logs)

    def _add_logs(self, at: float, logs: Mapping[str, Any]) -> None:
        known, series = finite(logs), self._learning.series
        for key in map(str, logs):
            if is_quality(key) and (key in series or (key in known and len(series) < _CURVES)):
                self._learning.add(key, None, at, known.get(key))

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
            self._add_logs(now, {key: value for key, value in logs.items() if not str(key).startswith("val_")})
            self._epochs.add(Epoch(number=epoch + 1, begin=self._epoch_begin, end=now, logs=logs))

    def end(self) -> None:
        """Notes when the training ended: the page may have to wait for a disk."""
        self._ended = self.now

    def record(self, *, ended: bool, interrupted: bool, written: str, environment: Mapping[str, Any]) -> Record:
        """Returns the record so far; for an interrupted training, up to when it last made progress."""
        self._take_compilations()
        with self._lock:
            interrupted = interrupted and bool(self._seen)
            seconds = self._seen if interrupted else self._ended or self.now
            timeline, epochs = self._timeline.copy(seconds), self._epochs.copy()
            learning = self._learning.copy(seconds)
        first, steps = self._throughput.first_step_seconds, self._throughput.step_times
        # A loop that announces no epochs does not tell when its first step began.
        first_step_end = self._first_steps
        if first is not None and self._first_epoch is not None:
            first_step_end = self._first_epoch + first
        return Record(
            name=self._name,
            seconds=seconds,
            ended=ended,
            written=written,
            first_step_end=first_step_end,
            timeline=timeline,
            learning=learning,
            epochs=epochs,
            environment=environment,
            setup=self._setup,
            replicas=self._replicas,
            idle_seconds=self.now - seconds if interrupted else 0.0,
            batch_size=self._throughput.batch_size,
            step_time_ms=1000 * steps.percentiles(50)[0] if steps.count else None,
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


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
