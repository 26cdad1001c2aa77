"""The times of some steps of `fit`."""

from collections import deque

import numpy as np


class StepWindow:
    """Steps: how many, their time, and samples of the time of one.

    Args:
        keep: Samples kept, the last ones. None: all.

    Attributes:
        steps: How many.
        seconds: What they took together.
    """

    __slots__ = ("_samples", "seconds", "steps")

    def __init__(self, keep: int | None = None):
        self.steps = 0
        self.seconds = 0.0
        self._samples: deque[float] = deque(maxlen=keep)

    def add(self, steps: int, seconds: float, *, sampled: bool) -> None:
        """Adds steps that took so long together; their mean is a sample, or says nothing of a step."""
        self.steps += steps
        self.seconds += seconds
        if sampled:
            self._samples.append(seconds / steps)

    def step_times(self) -> dict[str, float]:
        """The percentiles of its samples, or the mean where it has none, in ms and under the keys of the logs."""
        samples = list(self._samples) or [self.seconds / self.steps]
        median, p95, p99 = (1000 * np.percentile(samples, (50, 95, 99))).tolist()
        return {"step_time_ms": median, "step_time_p95_ms": p95, "step_time_p99_ms": p99}

    def examples_per_second(self, batch_size: float | None) -> float | None:
        """Taking each batch as large as this one; None where that or the time is unknown."""
        return self.steps * batch_size / self.seconds if batch_size and self.seconds > 0 else None
