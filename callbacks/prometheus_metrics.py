"""Readings as Prometheus' metrics."""

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tfopt.callbacks.readings import GPU_KEYS, HOST_KEYS, finite
from tfopt.errors import UnsupportedError
from tfopt.hardware import GpuSample
from tfopt.page.markup import printable

if TYPE_CHECKING:  # it is in an extra, and whoever does without need not have it
    from prometheus_client import CollectorRegistry, Metric

_ENERGY = "gpu_energy_joules"  # the one that only grows


@dataclass(slots=True)
class Readings:
    """What there is to be scraped now. One thread replaces values while another one reads them.

    Attributes:
        running: Whether `fit` runs.
        steps: Steps of this `fit`.
        epochs: Epochs of it that have ended.
        rows: The last reading of each GPU; empty where there is none.
        throughput: The last figures of the training's pace.
        logs: The logs of the last epoch that has ended: Keras' own, to which callbacks further back still add.
    """

    running: bool = True
    steps: int = 0
    epochs: int = 0
    rows: tuple[GpuSample, ...] = ()
    throughput: Mapping[str, float] = field(default_factory=dict)
    logs: Mapping[str, Any] = field(default_factory=dict)

    def end(self) -> None:
        """Leaves what stays true after `fit`."""
        self.running, self.rows, self.throughput = False, (), {}


def require_client() -> None:
    """Raises `UnsupportedError` where the package prometheus-client is not installed; loads nothing."""
    if importlib.util.find_spec("prometheus_client") is None:
        raise UnsupportedError(
            "Expected the package prometheus-client, which PrometheusExporter writes with. Found that it is not "
            "installed. Run: pip install 'tfopt[prometheus]'"
        )


def registry(readings: Readings) -> "CollectorRegistry":
    """Returns a registry of its own, of these readings alone."""
    from prometheus_client import CollectorRegistry

    own = CollectorRegistry()
    own.register(_Collector(readings))
    return own


class _Collector:
    """Makes the metrics anew for each scrape: what is no longer known is no longer there."""

    def __init__(self, readings: Readings):
        self._readings = readings

    def collect(self) -> "Iterator[Metric]":
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        now = self._readings
        rows, gpus = now.rows, [row for row in now.rows if row.index is not None]
        yield GaugeMetricFamily("tfopt_fit_running", "1 while fit runs, 0 after it.", value=int(now.running))
        yield CounterMetricFamily("tfopt_steps", "Training steps of this fit.", value=now.steps)
        yield CounterMetricFamily("tfopt_epochs", "Epochs of this fit that have ended.", value=now.epochs)
        for key in GPU_KEYS:
            kind = CounterMetricFamily if key == _ENERGY else GaugeMetricFamily
            family = kind(f"tfopt_{key}", f"{key} of tfopt.hardware.GpuSample.", labels=["gpu", "uuid"])
            for row in gpus:
                for value in finite({key: getattr(row, key)}).values():
                    family.add_metric([str(row.index), str(row.uuid)], value)
            if family.samples:
                yield family
        reasons = GaugeMetricFamily(
            "tfopt_throttled", "1 for each reason that holds a GPU's clocks back.", labels=["gpu", "uuid", "reason"]
        )
        for row in gpus:
            for reason in row.throttle_reasons or ():
                reasons.add_metric([str(row.index), str(row.uuid), reason], 1)
        if reasons.samples:
            yield reasons
        host = finite({key: getattr(rows[0], key) for key in HOST_KEYS}) if rows else {}
        for key, value in {**host, **now.throughput}.items():
            yield GaugeMetricFamily(f"tfopt_{key}", f"{key}, as tfopt's callbacks log it.", value=value)
        logs = GaugeMetricFamily("tfopt_log", "Keras' logs of the last epoch that has ended.", labels=["key"])
        for key, value in finite(dict(now.logs)).items():
            logs.add_metric([printable(key)], value)
        if logs.samples:
            yield logs
