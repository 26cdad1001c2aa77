"""GPU memory at the peak of a measurement."""

from collections.abc import Callable

from tfopt.hardware.gpu_memory import first_gpu, in_use_bytes, peak_bytes, reset_peak
from tfopt.measure import StepTimes

_MIB = 2**20


class MemoryMeter:
    """Makes a timer and notes how much memory of the first GPU one of its calls needs at its peak.

    What other variants keep on the GPU is not counted.

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
        device = first_gpu()
        if device:
            reset_peak(device)
        times = self._timer()
        if device:
            # The least: the first call also compiles, and later ones may keep a copy of the model's state on the GPU.
            peak_mib = (self._own + peak_bytes(device) - before) / _MIB
            self.peak_mib = peak_mib if self.peak_mib is None else min(self.peak_mib, peak_mib)
            self._own += _current() - before
        return times


def _current() -> int:
    device = first_gpu()
    return in_use_bytes(device) if device else 0
