"""GPU memory at the peak of a measurement."""

from collections.abc import Callable

import tensorflow as tf

from tfopt.measure import StepTimes

_MIB = 2**20


class MemoryMeter:
    """Makes a timer and notes how much memory of the first GPU its last call needed at its peak.

    What other variants keep on the GPU is not counted. The first call needs more where XLA tries kernels to compile.

    Args:
        make: Makes the timer, and by that the model that it times.

    Attributes:
        peak_mib: The peak; None before a call, or where the device does not say, as a CPU does not.
    """

    def __init__(self, make: Callable[[], Callable[[], StepTimes]]):
        self.peak_mib: float | None = None
        before = _current()
        self._timer = make()
        self._own = _current() - before

    def __call__(self) -> StepTimes:
        """Calls the timer."""
        before = _current()
        device = _gpu()
        if device:
            tf.config.experimental.reset_memory_stats(device)
        times = self._timer()
        if device:
            peak = tf.config.experimental.get_memory_info(device)["peak"]
            self.peak_mib = (self._own + peak - before) / _MIB
            self._own += _current() - before
        return times


def _gpu() -> str | None:
    gpus = tf.config.list_logical_devices("GPU")
    return f"GPU:{gpus[0].name.rsplit(':', 1)[1]}" if gpus else None


def _current() -> int:
    device = _gpu()
    return int(tf.config.experimental.get_memory_info(device)["current"]) if device else 0
