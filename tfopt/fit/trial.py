"""Whether launches of several steps pay: tried while the model trains."""

import math
import time
from statistics import median

from tfopt.fit.launching import InFlight
from tfopt.internals.fit_door import RunningFit, first_step

_SIZES = range(32, 7, -1)
_SIZE = 16  # in epochs of unknown length
_TURNS = 5  # of each kind, after the first ones, which trace and compile
_FASTER = 0.95  # of the time of steps launched alone, at most
# Assumed, to leave out trainings too short to gain: seconds for the program, and the share of a step's time it saves.
_MAKING_SECONDS, _SAVED = 1.0, 0.2


class Trial:
    """Launches as many steps alone and together, in turn, and chooses what is faster for all the model's trainings.

    Nothing is tried where the device is the limit, in epochs of fewer than 16 steps, and in trainings that are too
    short to repay it.
    """

    def __init__(self) -> None:
        self.chosen: int | None = None
        """Steps per launch; None while undecided."""
        self._size = _SIZE
        self._turns: list[float] = []  # seconds; three of steps alone, then together and alone in turn
        self._began = (0, 0.0, 0)  # the turn's first step, when it began, and how often the device was waited for
        self._expected = -1  # the step of the next call, unless something comes between

    @property
    def most(self) -> int:
        """The most steps that a launch may have now."""
        return self.chosen or self._size

    def steps_now(self, running: RunningFit, in_flight: InFlight) -> int:
        """How many steps to launch now."""
        if self.chosen is not None or running.callbacks is None:
            return self.chosen or 1
        steps = running.callbacks.params.get("steps")
        if steps is not None and steps < 2 * min(_SIZES):
            return 1
        if not self._turns and steps is not None:
            self._size = min((size for size in _SIZES if 2 * size <= steps), key=lambda size: steps % size)
        step, here = first_step(running.epochs), time.perf_counter()
        if step != self._expected:  # a new epoch, or fewer steps than wanted were launched
            self._began = (step, here, in_flight.waited)
        elif step - self._began[0] >= self._size:
            self._end_turn(here, in_flight, steps, running.callbacks.params.get("epochs", 1))
            self._began = (step, here, in_flight.waited)
        together = len(self._turns) > 2 and len(self._turns) % 2 == 1
        self._expected = step + (self._size if together else 1)
        return self.chosen or (self._size if together else 1)

    def _end_turn(self, now: float, in_flight: InFlight, steps: int | None, epochs: int) -> None:
        self._turns.append(now - self._began[1])
        if len(self._turns) == 2:
            if in_flight.waited > self._began[2]:
                self.chosen = 1
            planned = math.inf if steps is None else steps * epochs
            if planned * self._turns[1] / self._size * _SAVED < _MAKING_SECONDS:
                self._turns.clear()
        if len(self._turns) == 4 + 2 * _TURNS:
            alone, together = median(self._turns[4::2]), median(self._turns[5::2])
            self.chosen = self._size if together < _FASTER * alone else 1
