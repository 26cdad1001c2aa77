"""How long steps take: their times over a window or an epoch, and the time left of a `fit`."""

import math

from tfopt.callbacks.shared.histogram import Histogram

_PERCENTS = (50, 95, 99)
_STEP_TIMES = ("step_time_ms", "step_time_p95_ms", "step_time_p99_ms")


class StepWindow:
    """A number of steps, their total time, and samples of the time of one."""

    def __init__(self) -> None:
        self.steps = 0
        self.seconds = 0.0
        self.samples: list[float] = []
        """Seconds."""
        self.steps_of_samples: list[int] = []
        """How many steps each is the mean of."""

    def add(self, steps: int, seconds: float, *, sampled: bool) -> None:
        """Adds steps with their total time; if `sampled`, their mean is a sample of one step's time."""
        self.steps += steps
        self.seconds += seconds
        if sampled:
            self.samples.append(seconds / steps)
            self.steps_of_samples.append(steps)

    def step_times(self) -> dict[str, float]:
        """Returns the samples' percentiles in ms, by log key; of the mean if there are no samples."""
        samples = sorted(self.samples or [self.seconds / self.steps])
        return _by_key([_percentile(samples, percent) for percent in _PERCENTS])

    def examples_per_second(self, batch_size: float | None) -> float | None:
        """Returns the rate if every batch is of this size; None if the size or the time is unknown."""
        return self.steps * batch_size / self.seconds if batch_size and self.seconds > 0 else None


class EpochSteps:
    """An epoch's steps, their total time, and how the times of one are distributed, in memory that does not grow."""

    def __init__(self) -> None:
        self.steps = 0
        self.seconds = 0.0
        self._times = Histogram()

    def add(self, window: StepWindow) -> None:
        """Adds the steps of a window."""
        self.steps += window.steps
        self.seconds += window.seconds
        self._times.add(window.samples)

    def step_times(self) -> dict[str, float]:
        """Returns what `StepWindow.step_times` would for all steps, within 1 %."""
        if not self._times.count:
            return _by_key([self.seconds / self.steps] * len(_PERCENTS))
        return _by_key(self._times.percentiles(*_PERCENTS))


def _percentile(ordered: list[float], percent: float) -> float:
    """Returns what `numpy.percentile` would, which takes as long as a short step."""
    place = (len(ordered) - 1) * percent / 100
    low, high = ordered[int(place)], ordered[math.ceil(place)]
    return low + (high - low) * (place % 1)


def _by_key(seconds: list[float]) -> dict[str, float]:
    """Percentiles of step times, in ms by log key."""
    return {key: 1000 * value for key, value in zip(_STEP_TIMES, seconds, strict=True)}


class TimeLeft:
    """Estimates what is left of a `fit` from its steps so far and the time between one epoch's steps and the next's."""

    def __init__(self) -> None:
        self._steps = self._ends = 0
        self._step_seconds = self.end_seconds = 0.0

    def add_steps(self, steps: int, seconds: float) -> None:
        """Adds steps with their total time."""
        self._steps += steps
        self._step_seconds += seconds

    def add_end(self, seconds: float) -> None:
        """Adds the end of an epoch, which took this long after its last step."""
        self._ends += 1
        self.end_seconds += seconds

    def seconds(self, *, steps: int, ends: int) -> float | None:
        """Returns the time for so many more steps and ends of epochs; None before the first step.

        Ends of epochs count as free until one was seen.
        """
        if not self._steps:
            return None
        end = self.end_seconds / self._ends if self._ends else 0.0
        return steps * self._step_seconds / self._steps + ends * end
