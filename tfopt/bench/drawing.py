"""Times what comes one after the other and is thrown away: the batches of an input, the results of a function."""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tfopt.measure import StepTimes
from tfopt.measure.steps import wait


class DrawTimer:
    """Times how long it takes to draw a batch.

    Args:
        make: Returns new input: batches without end, or as often as they come to one. The device is waited for at the
            end of each sample.
        batch_size: Examples in a batch.
        clock: Seconds, monotonic.
    """

    def __init__(
        self, make: Callable[[], Iterable[Any]], batch_size: int, *, clock: Callable[[], float] = time.perf_counter
    ):
        self._make, self._batch_size, self._clock = make, batch_size, clock
        self._first_step_seconds: float | None = None

    def __call__(self, steps: int, *, warmup: int, samples: int) -> StepTimes:
        """Draws new input from its start; what was prepared ahead before the first sample is used up by the warm-up.

        Args:
            steps: Batches to time.
            warmup: Batches before them.
            samples: How many samples to divide them into.
        """
        block = -(-steps // samples)
        started = self._clock()
        batches = self._batches()
        _draw(batches, 1)
        if self._first_step_seconds is None:
            self._first_step_seconds = self._clock() - started
        _draw(batches, warmup)
        marks = [self._clock()]
        for _ in range(samples):
            _draw(batches, block)
            marks.append(self._clock())
        return StepTimes(
            repeats_ms=(tuple((end - start) * 1000 / block for start, end in itertools.pairwise(marks)),),
            steps_per_sample=block,
            first_step_seconds=self._first_step_seconds,
            examples_per_step=self._batch_size,
        )

    def _batches(self) -> Iterator[Any]:
        while True:
            batches = iter(self._make())
            yield next(batches)  # an error where there is none, and no search without end
            yield from batches


def _draw(batches: Iterator[Any], number: int) -> None:
    for _ in range(number):
        next(batches)
    wait()
