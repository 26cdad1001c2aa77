"""How long a training step takes: real steps, raw samples with an interval, and an unchanged model."""

# Not by lazy_loader: its stubs cannot name what belongs to another package, as `one_batch` and `preserved` do.
from tfopt.measure.environment_record import environment as environment
from tfopt.measure.peak import matmul_tflops as matmul_tflops
from tfopt.measure.timers import FitTimer as FitTimer
from tfopt.measure.timers import StepTimer as StepTimer
from tfopt.measure.timers import fit_time as fit_time
from tfopt.measure.timers import step_time as step_time
from tfopt.measure.times import Comparison as Comparison
from tfopt.measure.times import StepTimes as StepTimes
from tfopt.measure.times import compare as compare
from tfopt.measure.times import interleave as interleave
from tfopt.model.batches import one_batch as one_batch
from tfopt.model.state import preserved as preserved
