"""Callbacks for `model.fit(callbacks=[...])`. Put them before Keras' own loggers, which otherwise miss their keys."""

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
