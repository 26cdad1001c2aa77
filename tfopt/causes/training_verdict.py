"""What held a training back, in a sentence for its report."""

from dataclasses import replace
from statistics import fmean

from tfopt.causes.alert_causes import input_limits
from tfopt.causes.between_gpus import Replicas, Straggler, straggler, unused_gpus
from tfopt.causes.catalogue import (
    BUSY_PERCENT,
    FLOAT32,
    INPUT,
    SHORT_KERNELS,
    SM_ACTIVE_PERCENT,
    TENSOR_ACTIVE_PERCENT,
    THROTTLED,
    THROTTLED_PERCENT,
)
from tfopt.causes.readings import Readings
from tfopt.page import duration


def verdict(
    readings: Readings, *, seconds: float, first_step_end: float | None, replicas: Replicas | None = None
) -> str:
    """Says in a sentence what held a training back: the first of these that the readings show.

    Most of the time went into the first step; waiting for input; (no GPU was read); a GPU that the others wait for;
    throttling; many short kernels; idle tensor cores. Otherwise the model sets the pace. GPUs that no replica uses are
    named and left out of the means.

    Args:
        readings: The means since the first step, which traces and compiles, has ended.
        seconds: How long the training took.
        first_step_end: When the first step ended, in seconds since the training began; None if none did.
        replicas: How the model was spread over devices, None if unknown.
    """
    if first_step_end is None:
        return "No step ended, so there is nothing to judge."
    if first_step_end > seconds / 2:
        return (
            f"{duration(first_step_end)} of {duration(seconds)} had passed when the first step, which traces and "
            "compiles, ended: a verdict needs a longer training."
        )
    unused = unused_gpus(readings.gpus, replicas)
    slow = straggler(readings.gpus, replicas)
    if unused is None:
        return _held_back(readings, slow)
    used = replace(readings, gpus=tuple(gpu for gpu in readings.gpus if gpu.index not in unused.idle))
    in_order = [unused.text, _held_back(used, slow)]
    return " ".join(in_order if unused.mistake and not input_limits(readings) else reversed(in_order))


def _held_back(readings: Readings, slow: Straggler | None) -> str:
    """Says what was measured on the GPUs in use, and what follows from it."""
    measured = _measured(readings)
    if input_limits(readings):
        return f"{measured}: the {INPUT.name} is the limit. {INPUT.remedy}"
    if slow is not None:
        return f"{measured}, but {slow.text}"
    if not _known(readings, "gpu_utilization_percent"):
        unknown = readings.input_wait_percent is None
        return f"{measured}: {'nothing more can be said' if unknown else 'the input is not the limit'}."
    return f"{measured}{_shown_by_gpus(readings)}"


def _measured(readings: Readings) -> str:
    """Says how busy the devices were and how long steps waited."""
    busy, cpu = _known(readings, "gpu_utilization_percent"), readings.host_cpu_percent
    if busy:
        several = f"The {len(busy)} GPUs were" if len(busy) > 1 else "The GPU was"
        spread = f" ({min(busy):.0f} to {max(busy):.0f}\u00a0%)" if max(busy) - min(busy) >= 5 else ""
        first = f"{several} busy {fmean(busy):.0f}\u00a0% of the time{spread}"
    elif cpu is not None:
        first = f"No GPU was read; the host's CPUs were busy {cpu:.0f}\u00a0% of the time"
    else:
        first = "Neither a GPU nor the host was read"
    if readings.input_wait_percent is None:
        return f"{first}; whether steps waited for input is unknown"
    wait = f"steps waited for input in {readings.input_wait_percent:.0f}\u00a0%"
    return f"{first} and {wait} of it" if busy or cpu is not None else f"{first}; {wait} of the time"


def _known(readings: Readings, name: str) -> list[float]:
    """Known means of a quantity, one per GPU."""
    return [value for gpu in readings.gpus if (value := getattr(gpu, name)) is not None]


def _shown_by_gpus(readings: Readings) -> str:
    """Says what the GPUs' readings show, given that input is not the limit or unknown."""

    def mean(name: str) -> float | None:
        values = _known(readings, name)
        return fmean(values) if values else None

    throttled, busy = readings.throttled_percent, mean("gpu_utilization_percent")
    sm_active, tensor_active = mean("sm_active_percent"), mean("tensor_active_percent")
    if throttled is not None and throttled >= THROTTLED_PERCENT:
        cause = THROTTLED["heat or power"]
        return f", but {cause.name} held the clocks back in {throttled:.0f}\u00a0% of it. {cause.remedy}"
    if busy is not None and busy < BUSY_PERCENT:
        if readings.input_wait_percent is None:
            return ": check the input first (tfopt.pipelines.profile_pipeline), then try tfopt.fit.overlap."
        return f": {SHORT_KERNELS.name}. {SHORT_KERNELS.remedy}"
    if sm_active is not None and sm_active < SM_ACTIVE_PERCENT:
        return (
            f", yet only {sm_active:.0f}\u00a0% of the multiprocessors worked: {SHORT_KERNELS.name}. "
            f"{SHORT_KERNELS.remedy}"
        )
    if tensor_active is not None and tensor_active < TENSOR_ACTIVE_PERCENT:
        return f", yet the tensor cores worked in only {tensor_active:.1f}\u00a0% of it. {FLOAT32.remedy}"
    return ": the model sets the pace."
