"""Callbacks for `model.fit(callbacks=[...])`. Put them before Keras' own loggers, which otherwise miss their keys."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfopt.callbacks.compilation_logger import CompilationLogger
    from tfopt.callbacks.loss_scale_logger import LossScaleLogger
    from tfopt.callbacks.profiler.summary import TraceSummary
    from tfopt.callbacks.prometheus_exporter import PrometheusExporter
    from tfopt.callbacks.report_writer import ReportWriter
    from tfopt.callbacks.step_profiler import StepProfiler
    from tfopt.callbacks.throughput_logger import ThroughputLogger
    from tfopt.callbacks.tracker_logger import TrackerLogger
    from tfopt.callbacks.utilization_alert import Alert, UtilizationAlert
    from tfopt.callbacks.utilization_logger import UtilizationLogger

# Loaded when asked for: all of them take a tenth of a second, and a training uses a few.
_MODULES = {
    "Alert": "utilization_alert",
    "CompilationLogger": "compilation_logger",
    "LossScaleLogger": "loss_scale_logger",
    "PrometheusExporter": "prometheus_exporter",
    "ReportWriter": "report_writer",
    "StepProfiler": "step_profiler",
    "ThroughputLogger": "throughput_logger",
    "TraceSummary": "profiler.summary",
    "TrackerLogger": "tracker_logger",
    "UtilizationAlert": "utilization_alert",
    "UtilizationLogger": "utilization_logger",
}

__all__ = [
    "Alert",
    "CompilationLogger",
    "LossScaleLogger",
    "PrometheusExporter",
    "ReportWriter",
    "StepProfiler",
    "ThroughputLogger",
    "TraceSummary",
    "TrackerLogger",
    "UtilizationAlert",
    "UtilizationLogger",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"tfopt.callbacks.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'tfopt.callbacks' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
