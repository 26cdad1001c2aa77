"""From where on a reading says that something holds a training back, and its name, for alerts and the report."""

# From a fifth on, mending it makes the training up to a quarter faster: worth somebody's time.
WAITING_PERCENT = 20.0
BUSY_PERCENT = 100 - WAITING_PERCENT
# DCGM's documentation (profiling metrics): SM activity of less than 0.5 "likely indicates ineffective GPU usage".
SM_ACTIVE_PERCENT = 50.0
# Too little for any matrix product that takes time, yet above the noise of a counter at rest.
TENSOR_ACTIVE_PERCENT = 1.0

# Of a GPU that is idle though its input is there, or in use with few of its multiprocessors.
SHORT_KERNELS = (
    "many short kernels. Take a larger batch, let XLA fuse them (tfopt.xla.decide(model, dataset) measures whether "
    "jit_compile pays), and let steps overlap (tfopt.fit.overlap(model))."
)
