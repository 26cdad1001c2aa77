"""The readings that callbacks use during `fit`: how they come by them, their names and their numbers."""

import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

import keras

from tfopt.callbacks.sources import source
from tfopt.callbacks.throughput_logger import ThroughputLogger
from tfopt.callbacks.utilization_logger import UtilizationLogger
from tfopt.hardware import GpuSample
from tfopt.hardware.host_activity import HOST_FIELDS
from tfopt.hardware.nvml.reading import GPU_FIELDS

GPU_KEYS = tuple(name for name in GPU_FIELDS if name != "throttle_reasons")
HOST_KEYS = HOST_FIELDS


def finite(values: Mapping[str, Any]) -> dict[str, float]:
    """Returns those of the values that are finite numbers, as floats, by names that are texts.

    Example:
        >>> finite({"loss": 0.5, "val_loss": math.nan, "name": "first"})
        {'loss': 0.5}
    """
    numbers = {str(name): _number(value) for name, value in values.items() if isinstance(value, Real)}
    return {name: number for name, number in numbers.items() if math.isfinite(number)}


def _number(value: Real) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer or a fraction larger than any float
        return math.inf


def take_readings(
    user: keras.callbacks.Callback,
    samples: Callable[[tuple[GpuSample, ...]], object],
    throughput: Callable[[Mapping[str, Any]], object],
) -> Callable[[], None]:
    """Hands the readings of the fit that runs to a callback. Call it from the callback's `on_train_begin`.

    Args:
        user: The callback.
        samples: Its method for each sample of the GPUs and the host; called in the sampler's thread.
        throughput: Its method for `ThroughputLogger`'s figures; called in the training thread, about once a second.

    Returns:
        A function that ends it.
    """
    utilization, pace = source(UtilizationLogger, user), source(ThroughputLogger, user)
    utilization.listeners.add(samples)
    pace.listeners.add(throughput)

    def end() -> None:
        utilization.listeners.remove(samples)
        pace.listeners.remove(throughput)

    return end
