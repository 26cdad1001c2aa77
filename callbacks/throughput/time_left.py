"""How long a `fit` will still take."""


class TimeLeft:
    """The pace of a `fit` so far: of its steps, and of what lies between one epoch's steps and the next's.

    Example:
        >>> left = TimeLeft()
        >>> left.add_steps(10, 2.0)
        >>> left.seconds(steps=5, ends=1)
        1.0
    """

    def __init__(self) -> None:
        self._steps = self._ends = 0
        self._step_seconds = self.end_seconds = 0.0

    def add_steps(self, steps: int, seconds: float) -> None:
        """Adds steps that took so long together."""
        self._steps += steps
        self._step_seconds += seconds

    def add_end(self, seconds: float) -> None:
        """Adds an epoch that ended so long after its last step."""
        self._ends += 1
        self.end_seconds += seconds

    def seconds(self, *, steps: int, ends: int) -> float | None:
        """What so many steps and ends of epochs will take; None before there was a step.

        The end of an epoch is taken to cost nothing until one was seen.
        """
        if not self._steps:
            return None
        end = self.end_seconds / self._ends if self._ends else 0.0
        return steps * self._step_seconds / self._steps + ends * end
