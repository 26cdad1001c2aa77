"""How long a training step takes: real steps, raw samples, an interval, and the model unchanged."""

from tfopt.measure.environment import environment
from tfopt.measure.interleaving import interleave
from tfopt.measure.peak import matmul_tflops
from tfopt.measure.state import preserved
from tfopt.measure.steps import FitTimer, StepTimer, fit_time, step_time
from tfopt.measure.times import Comparison, StepTimes, compare
from tfopt.model.batches import one_batch

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
