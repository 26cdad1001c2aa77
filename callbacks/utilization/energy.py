"""The power that a GPU drew over a time, from its energy counter or from readings of its power."""


class MeanPower:
    """The mean power of one GPU since a moment, from readings at any times.

    Between two readings of the energy counter it is the counter's difference over the time between them. A GPU without
    a counter (before Volta) has its power readings integrated over the time instead, by trapezoids: NVML averages
    power over up to a second, and on some GPUs samples only a part of the time (Yang et al., "Part-time Power
    Measurements", 2023), so that this is less exact.

    Example:
        >>> power = MeanPower()
        >>> power.add(0.0, joules=1000.0, watts=200.0)
        >>> power.add(10.0, joules=4000.0, watts=200.0)
        >>> power.watts()
        300.0
    """

    def __init__(self) -> None:
        self._reading: tuple[float, float | None, float | None] = (0.0, None, None)
        self._counter: tuple[float, float] | None = None  # its last known reading, which may be older
        self.start()

    def start(self) -> None:
        """Starts anew, from the last reading."""
        self._first = self._counter
        self._went_back = False
        self._integral = self._integrated_seconds = 0.0

    def add(self, elapsed_seconds: float, *, joules: float | None, watts: float | None) -> None:
        """Adds a reading of the counter and of the power; None: the GPU did not say."""
        before, _, watts_before = self._reading
        self._reading = (elapsed_seconds, joules, watts)
        if joules is not None:
            self._went_back |= self._counter is not None and joules < self._counter[1]
            self._counter = (elapsed_seconds, joules)
            self._first = self._first or self._counter
        if watts is not None and watts_before is not None:
            self._integral += (watts + watts_before) / 2 * (elapsed_seconds - before)
            self._integrated_seconds += elapsed_seconds - before

    def watts(self) -> float | None:
        """The mean since the start, or the last power reading where there was no second one since.

        None: the counter went back, as after a reload of the driver, or the GPU's last reading told nothing: it is
        lost.
        """
        _, joules, watts = self._reading
        if self._went_back or (joules is None and watts is None):
            return None
        if self._first and self._counter and self._counter[0] > self._first[0]:
            return (self._counter[1] - self._first[1]) / (self._counter[0] - self._first[0])
        return self._integral / self._integrated_seconds if self._integrated_seconds > 0 else watts
