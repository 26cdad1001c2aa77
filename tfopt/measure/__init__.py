"""How long a training step takes: real steps, raw samples with an interval, and an unchanged model."""

from tfopt.measure.environment_record import environment
from tfopt.measure.peak import matmul_tflops
from tfopt.measure.timers import FitTimer, StepTimer, fit_time, step_time
from tfopt.measure.times import Comparison, StepTimes, compare, interleave
from tfopt.model.batches import one_batch
from tfopt.model.state import preserved

__all__ = [
    "Comparison",
    "FitTimer",
    "StepTimer",
    "StepTimes",
    "compare",
    "environment",
    "fit_time",
    "interleave",
    "matmul_tflops",
    "one_batch",
    "preserved",
    "step_time",
]
