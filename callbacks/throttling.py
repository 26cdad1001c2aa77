"""When a GPU is slowed down in a way that is worth a word; one measure for logs, alerts and the report."""

from tfopt.hardware import GpuSample

# NVML's reasons that slow a GPU which would run faster, and by what. The others are what its owner has set.
SLOWED_BY = {
    "power_cap": "power",
    "hw_power_brake": "power",
    "thermal": "heat",
    "hw_thermal": "heat",
    "hw_slowdown": "heat or power",
}
# A choice: a data-centre GPU at full work is at its power cap, and as it should be somewhat below its highest clock.
_MARKEDLY = 0.75


class Throttling:
    """Tells what slows each GPU down, from the readings of a fit in their order.

    Heat and the hardware's own brakes do. The power cap does only where it holds the clock markedly down: below three
    quarters of the highest one of this GPU that was seen in the fit.

    Example:
        >>> throttling = Throttling()
        >>> throttling.reasons(GpuSample(0.0, 0.0, index=0, sm_clock_mhz=1980, throttle_reasons=("power_cap",)))
        ()
        >>> throttling.reasons(GpuSample(1.0, 1.0, index=0, sm_clock_mhz=1200, throttle_reasons=("power_cap",)))
        ('power_cap',)
    """

    def __init__(self) -> None:
        self._highest: dict[int | None, float] = {}

    def reasons(self, row: GpuSample) -> tuple[str, ...] | None:
        """Returns those of a reading's reasons that slow the GPU down; None where they are unknown."""
        clock = row.sm_clock_mhz or 0
        highest = self._highest[row.index] = max(clock, self._highest.get(row.index, 0))
        if row.throttle_reasons is None:
            return None
        capped = 0 < clock < _MARKEDLY * highest
        return tuple(name for name in row.throttle_reasons if name in SLOWED_BY and (capped or name != "power_cap"))
