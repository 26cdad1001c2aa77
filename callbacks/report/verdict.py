"""What held a training back, in a sentence, from what was measured."""

from statistics import fmean

from tfopt.callbacks.report.timeline import Timeline
from tfopt.callbacks.thresholds import (
    BUSY_PERCENT,
    SHORT_KERNELS,
    SM_ACTIVE_PERCENT,
    TENSOR_ACTIVE_PERCENT,
    WAITING_PERCENT,
)
from tfopt.page import duration


def verdict(timeline: Timeline, *, seconds: float, first_step_end: float | None) -> str:
    """Says what held a training back: the first of these that the readings show.

    Most of the time went into the first step. Steps waited for input in at least 20 % of the time. No GPU was read.
    Clocks were held back in at least 20 % of the time. The GPUs were busy in less than 80 % of it. Less than 50 % of
    their multiprocessors were. The tensor cores were in less than 1 % of the time. Otherwise the model set the pace.
    Readings from before the first step's end, which traces and compiles, do not count. What is unknown shows nothing.

    Args:
        timeline: With the quantities of `GpuSample`, of `throughput.csv`, and `slowed_percent`: 100 where
            `tfopt.callbacks.throttling` finds a GPU slowed down, else 0.
        seconds: How long the training took.
        first_step_end: When the first step had ended, in seconds; None where none did.
    """
    if first_step_end is None:
        return "No step ended, so there is nothing to judge."
    if first_step_end > seconds / 2:
        return (
            f"{duration(first_step_end)} of {duration(seconds)} had passed when the first step, which traces and "
            "compiles, had ended: a longer training is needed for a verdict."
        )
    read = _Means(timeline, first_step_end)
    wait = read.mean("input_wait_percent")
    known = _said(read, wait)
    if wait is not None and wait >= WAITING_PERCENT:
        return f"{known}: the input is the limit. tfopt.pipelines.profile_pipeline tells which stage of it is slow."
    if not read.devices("gpu_utilization_percent"):
        end = "the input is not the limit" if wait is not None else "nothing more can be said"
        return f"{known}: {end}."
    return f"{known}{_of_gpus(read, wait)}"


class _Means:
    """Means of quantities after the first step."""

    def __init__(self, timeline: Timeline, since: float):
        self._timeline, self._since = timeline, since

    def devices(self, quantity: str) -> list[float]:
        """The mean of each device."""
        means = (series.mean(self._since) for series in self._timeline.series.get(quantity, {}).values())
        return [mean for mean in means if mean is not None]

    def mean(self, quantity: str) -> float | None:
        """The mean over the devices."""
        found = self.devices(quantity)
        return fmean(found) if found else None


def _said(read: _Means, wait: float | None) -> str:
    busy, cpu = read.devices("gpu_utilization_percent"), read.mean("host_cpu_percent")
    if busy:
        several = f"The {len(busy)} GPUs were" if len(busy) > 1 else "The GPU was"
        spread = f" ({min(busy):.0f} to {max(busy):.0f}\u00a0%)" if max(busy) - min(busy) >= 5 else ""
        first = f"{several} busy {fmean(busy):.0f}\u00a0% of the time{spread}"
    elif cpu is not None:
        first = f"No GPU was read; the host's CPUs were busy {cpu:.0f}\u00a0% of the time"
    else:
        first = "Neither a GPU nor the host was read"
    if wait is None:
        return f"{first}; whether steps waited for input is unknown"
    return (
        f"{first} and steps waited for input in {wait:.0f}\u00a0% of it"
        if busy or cpu is not None
        else (f"{first}; steps waited for input in {wait:.0f}\u00a0% of the time")
    )


def _of_gpus(read: _Means, wait: float | None) -> str:
    """What the GPUs' readings show, where steps did not wait for input or that is unknown."""
    slowed, busy = read.mean("slowed_percent"), read.mean("gpu_utilization_percent")
    sm_active, tensor_active = read.mean("sm_active_percent"), read.mean("tensor_active_percent")
    if slowed is not None and slowed >= WAITING_PERCENT:
        return (
            f", but heat or power held the clocks back in {slowed:.0f}\u00a0% of it: see to the cooling and the power "
            "limit (nvidia-smi -q -d PERFORMANCE shows which)."
        )
    if busy is not None and busy < BUSY_PERCENT:
        if wait is None:
            return ": try the input first (tfopt.pipelines.profile_pipeline), then tfopt.fit.overlap."
        return f": {SHORT_KERNELS}"
    if sm_active is not None and sm_active < SM_ACTIVE_PERCENT:
        return f", but with only {sm_active:.0f}\u00a0% of its multiprocessors: {SHORT_KERNELS}"
    if tensor_active is not None and tensor_active < TENSOR_ACTIVE_PERCENT:
        return (
            f", but its tensor cores only {tensor_active:.0f}\u00a0% of it: tfopt.precision.recommend tells which "
            "precision uses them."
        )
    return ": the model sets the pace."
