"""Prometheus' metrics of a running `fit`: names, base units, labels and the histogram of step times."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tfopt.callbacks.shared.histogram import Histogram
from tfopt.callbacks.shared.progress import SECONDS_SINCE_STEP, Progress
from tfopt.callbacks.shared.reading_sources import THROUGHPUT_KEYS, finite
from tfopt.callbacks.shared.run import Run
from tfopt.causes.readings import GPU_KEYS, HOST_KEYS
from tfopt.hardware import GpuSample
from tfopt.page.document import printable

if TYPE_CHECKING:  # prometheus-client is an optional extra
    from prometheus_client import Metric

# Readings that never decrease. gpu_ecc_uncorrected_errors counts since the driver was loaded.
_COUNTERS = ("gpu_energy_joules", "gpu_ecc_uncorrected_errors")
# Prometheus wants base units: the end of a key, what becomes of it, and what its value is multiplied by.
_BASE_UNITS = (
    ("_mib_per_second", "_bytes_per_second", 2**20),
    ("_mib", "_bytes", 2**20),
    ("_percent", "_ratio", 1 / 100),
    ("_mhz", "_hertz", 10**6),
    ("_tflops_per_second", "_flops_per_second", 10**12),
)
# Bounds of the histogram, which stands for the keys of step times.
_STEP_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
PACE_KEYS = tuple(key for key in THROUGHPUT_KEYS if not key.startswith("step_time"))
# A pace ends to be exported when no step has ended for so long, and for three times as long as a step took.
_PACE_SECONDS = 10.0
_PACE_STEPS = 3.0


@dataclass(eq=False)  # hashable, as the registry needs it
class Exported:
    """The current values, and the metrics made of them. One thread replaces the values while another collects."""

    run: Run
    running: bool = True
    steps: int = 0
    epochs: int = 0
    rows: tuple[GpuSample, ...] = ()
    progress: Progress = field(default_factory=Progress)
    throughput: Mapping[str, float] = field(default_factory=dict)
    step_seconds: float = 0.0
    """How long the slowest steps took when the throughput was taken, those of an execution together."""
    step_times: Histogram | None = None
    logs: Mapping[str, Any] = field(default_factory=dict)
    """The last epoch's logs: Keras' own dict, to which later callbacks still add."""

    def end(self) -> None:
        """Keeps what stays true after `fit`."""
        self.running, self.rows, self.throughput = False, (), {}

    def _pace(self) -> dict[str, float]:
        """The throughput while steps end, and how long ago the last one did."""
        if not self.running:
            return {}
        seconds = self.progress.seconds_since_step
        fresh = seconds < max(_PACE_SECONDS, _PACE_STEPS * self.step_seconds)
        return {**(self.throughput if fresh else {}), SECONDS_SINCE_STEP: seconds}

    def collect(self) -> "Iterator[Metric]":
        """Builds the metrics for a scrape, so that what is no longer known disappears."""
        of_run = {"run": self.run.id, "rank": "" if self.run.rank is None else str(self.run.rank)}
        for metric in self._metrics():
            metric.samples = [sample._replace(labels=of_run | sample.labels) for sample in metric.samples]
            if metric.samples:
                yield metric

    def _metrics(self) -> "Iterator[Metric]":
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        rows = self.rows
        yield GaugeMetricFamily("tfopt_fit_running", "1 while fit runs, 0 after it.", value=int(self.running))
        yield CounterMetricFamily("tfopt_steps", "Training steps of this fit.", value=self.steps)
        yield CounterMetricFamily("tfopt_epochs", "Epochs of this fit that have ended.", value=self.epochs)
        yield from _gpu_metrics([row for row in rows if row.index is not None])
        host = finite({key: getattr(rows[0], key) for key in HOST_KEYS}) if rows else {}
        for key, value in {**host, **self._pace()}.items():
            name, factor = _in_base_units(key)
            yield GaugeMetricFamily(name, f"{key} of tfopt's callbacks, in base units.", value=value * factor)
        if self.step_times is not None and self.step_times.count:
            yield HistogramMetricFamily(
                "tfopt_step_time_seconds",
                "Times of this fit's steps, without the first.",
                buckets=_buckets(self.step_times),
                sum_value=self.step_times.total,
            )
        logs = GaugeMetricFamily("tfopt_log", "Keras' logs of the last epoch that has ended.", labels=["key"])
        for key, value in finite(dict(self.logs)).items():
            logs.add_metric([printable(key)], value)
        yield logs


def _gpu_metrics(gpus: Sequence[GpuSample]) -> "Iterator[Metric]":
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    for key in GPU_KEYS:
        kind = CounterMetricFamily if key in _COUNTERS else GaugeMetricFamily
        name, factor = _in_base_units(key)
        family = kind(name, f"{key} of tfopt.hardware.GpuSample, in base units.", labels=["gpu", "uuid"])
        for row in gpus:
            for value in finite({key: getattr(row, key)}).values():
                family.add_metric([str(row.index), str(row.uuid)], value * factor)
        yield family
    reasons = GaugeMetricFamily(
        "tfopt_throttled", "1 for each reason that holds a GPU's clocks back.", labels=["gpu", "uuid", "reason"]
    )
    for row in gpus:
        for reason in row.throttle_reasons or ():
            reasons.add_metric([str(row.index), str(row.uuid), reason], 1)
    yield reasons


def _in_base_units(key: str) -> tuple[str, float]:
    """A metric's name, and what a value of the key is multiplied by."""
    for end, base, factor in _BASE_UNITS:
        if key.endswith(end):
            return f"tfopt_{key.removesuffix(end)}{base}", factor
    return f"tfopt_{key}", 1


def _buckets(times: Histogram) -> list[tuple[str, float]]:
    """How many steps took at most so long, by Prometheus' text of the bound."""
    from prometheus_client.utils import floatToGoString

    counts = [*times.counts_up_to(_STEP_SECONDS), times.count]  # that of all last: steps may be added meanwhile
    bounds = (*_STEP_SECONDS, math.inf)
    return [(floatToGoString(bound), count) for bound, count in zip(bounds, counts, strict=True)]
