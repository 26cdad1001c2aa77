"""Bounds the batch size before any is tried: by the model, the arguments and the memory."""

from contextlib import suppress
from dataclasses import dataclass, replace

import keras
import tensorflow as tf

from tfopt import hardware, memory
from tfopt.batch.examples import Examples
from tfopt.errors import UnsupportedError
from tfopt.hardware import gpu_memory
from tfopt.memory import MemoryEstimate
from tfopt.memory.gpus import room_mib

_OF_HOST = 0.9  # of the memory available: the system and the rest of the process need some, too
_CONTEXT_MIB = 1024.0  # of a GPU, for CUDA and its libraries in another process


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest batch to try, and what steps take."""

    most: int | None
    """Examples; None: unknown."""
    why: str
    """What sets `most`."""
    known_mib: dict[int, float]
    """Estimated MiB of a step by batch size, and of the model alone at 0; empty if there is no estimate."""
    fixed: bool = False
    """Whether the model takes batches of `most` examples only."""

    def estimated_mib(self, size: int) -> float | None:
        """What a step on `size` examples takes, on straight lines between the known sizes."""
        sizes = sorted(self.known_mib)
        if not sizes:
            return None
        high = next((known for known in sizes[1:] if known >= size), sizes[-1])
        low = sizes[sizes.index(high) - 1]
        begin, end = self.known_mib[low], self.known_mib[high]
        return begin + (end - begin) * (size - low) / (high - low)


def limits(model: keras.Model, examples: Examples, largest: int | None, limit_mib: float | None) -> Limits:
    """Returns how large a batch may be, by the model, the arguments and the memory.

    Raises:
        ValueError: If the model's Input demands more examples than `largest`.
        tfopt.errors.UnsupportedError: If there is `limit_mib`, and no estimate to compare with it.
    """
    given = _given(model, largest)
    try:
        estimate = memory.estimate(model, examples.first)
    except UnsupportedError:  # such as a model that runs eagerly
        if limit_mib is not None:
            raise
        return given
    given = replace(given, known_mib={0: estimate.model_mib, estimate.batch_size: estimate.total_mib})
    limit, why = _free(estimate) if limit_mib is None else (limit_mib, f"limit_mib={limit_mib:g}")
    try:
        return _by_memory(estimate, given, limit, why)
    except (UnsupportedError, ValueError):  # no other batch size, or nothing is free: the trials will show
        if limit_mib is not None:
            raise
        return given


def _by_memory(estimate: MemoryEstimate, given: Limits, limit: float | None, why: str) -> Limits:
    """The limits by an estimate and by what is `given`, whichever are tighter."""
    known = dict(given.known_mib)
    if given.most is not None and given.most not in known:
        known[given.most] = estimate.total_mib_at(given.most)
    if limit is None or (given.most is not None and known[given.most] <= limit):
        return replace(given, known_mib=known)
    if given.fixed:
        return Limits(0, why, known)
    most = estimate.largest_batch(limit)
    if given.most is not None:
        most = min(most, given.most - 1)  # under XLA a larger batch may take less
    shown = max(most, 1)  # what the smallest batch takes, if none fits
    if shown not in known:
        with suppress(UnsupportedError):  # of a model that takes no other batch size
            known[shown] = estimate.total_mib_at(shown)
    return Limits(most, why, known)


def room_outside_mib() -> float:
    """What another process can take of the GPU's memory: infinity without a GPU, 0 if that is unknown."""
    if not tf.config.list_logical_devices("GPU"):
        return float("inf")
    usage = next(iter(memory.usage()), None)
    if usage is None or usage.total_mib is None or usage.held_mib is None or usage.others_mib is None:
        return 0.0
    return usage.total_mib - usage.held_mib - usage.others_mib - _CONTEXT_MIB


def _free(estimate: MemoryEstimate) -> tuple[float | None, str]:
    """What a training of this model may take in all, of the host's memory without a GPU, and what sets that."""
    if gpu_memory.first_gpu() is None:
        free = hardware.host().memory_available_mib
        return (None, "") if free is None else (_OF_HOST * free + estimate.model_mib, "the memory that is available")
    usage = next(iter(memory.usage()), None)
    free = None if usage is None else room_mib(usage, estimate.model_mib)
    return free, "the GPU memory that is free for TensorFlow"


def _given(model: keras.Model, largest: int | None) -> Limits:
    """The limits by the model's Input and the argument."""
    shapes = [tensor.shape for tensor in tf.nest.flatten(getattr(model, "inputs", None) or [])]
    fixed = next((shape[0] for shape in shapes if shape and shape[0] is not None), None)
    if fixed is None:
        return Limits(largest, "" if largest is None else f"largest={largest}", {})
    if largest is not None and largest < fixed:
        raise ValueError(
            f"Expected largest to be at least {fixed}, the batch size in the Input of {model.name!r}. Received: "
            f"largest={largest}. Leave the batch size out of the Input."
        )
    return Limits(fixed, f"the model's Input, which takes batches of {fixed} only", {}, fixed=True)
