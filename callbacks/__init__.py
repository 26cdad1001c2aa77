"""Callbacks for `model.fit(callbacks=[...])`. Put them before Keras' own loggers, which otherwise miss their keys."""

from tfopt.callbacks.compilation_logger import CompilationLogger
from tfopt.callbacks.loss_scale_logger import LossScaleLogger
from tfopt.callbacks.throughput_logger import ThroughputLogger
from tfopt.callbacks.utilization_logger import UtilizationLogger

__all__ = ["CompilationLogger", "LossScaleLogger", "ThroughputLogger", "UtilizationLogger"]
