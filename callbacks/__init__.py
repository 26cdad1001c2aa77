"""Callbacks for `model.fit(callbacks=[...])`. Put them before Keras' own loggers, which otherwise miss their keys."""

from tfopt.callbacks.throughput_logger import ThroughputLogger
from tfopt.callbacks.utilization_logger import UtilizationLogger

__all__ = ["ThroughputLogger", "UtilizationLogger"]
