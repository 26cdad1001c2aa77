"""What it would bring to pad every batch to one shape, so that XLA compiles once."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import keras
import tensorflow as tf

from tfopt.measure import StepTimer, StepTimes
from tfopt.xla import shapes
from tfopt.xla.shapes import BatchShapes, Shape

# The Tensor Cores' multiple for 16-bit numbers: NVIDIA, "Matrix Multiplication Background User's Guide".
_MULTIPLE = 8
_SAMPLES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Pad:
    """One shape for every batch, and what XLA would then bring.

    Attributes:
        shape: The shape of each tensor in a batch: the largest seen, in dimensions that vary (but for the first, which
            is the batch's) the next multiple of 8.
        step_ms: A step with XLA on batches of that shape.
        measured: Whether that was measured. Else it is the measured step's time, scaled by the numbers in a batch.
        saved_ms: How much shorter that is than a step without XLA on batches as they are (the measured step's time,
            scaled by the numbers in a mean batch).
        break_even_steps: Steps after which the one compilation has paid for itself; None if it never does.
    """

    shape: Shape
    step_ms: float
    measured: bool
    saved_ms: float
    break_even_steps: int | None

    def to_dict(self) -> dict[str, Any]:
        """JSON."""
        return asdict(self)

    def __str__(self) -> str:
        how = "measured" if self.measured else "estimated"
        pays = "XLA would not pay either"
        if self.break_even_steps is not None:
            pays = f"XLA would pay after {self.break_even_steps:,} steps"
        return f"Padded to one shape, {shapes.words(self.shape)}, {pays} ({self.step_ms:.3g} ms a step, {how})"


def padded(
    model: keras.Model,
    batch: Any,
    found: BatchShapes,
    times: dict[str, StepTimes],
    *,
    compile_seconds: float,
    steps: int,
) -> Pad | None:
    """Finds the shape and measures a step there, which compiles once.

    Args:
        model: A compiled model.
        batch: The batch that was measured.
        found: The shapes that the dataset yields.
        times: The step on that batch, "off" and "on".
        compile_seconds: What compiling it took.
        steps: Steps to time.

    Returns:
        The shape and its figures; None if the batches' tensors differ in more than their sizes, or are not dense.
    """
    shape = _fixed(found)
    if shape is None or not all(isinstance(part, tf.Tensor) for part in tf.nest.flatten(batch)):
        return None
    here = shapes.elements(shapes.shape_of(batch))
    mean = sum(shapes.elements(seen) * number for seen, number in zip(found.seen, found.batches, strict=True))
    off_ms = times["off"].median_ms * mean / found.batches_read / here
    on_ms = _step_ms(model, batch, shape, times["on"], steps)
    estimate = times["on"].median_ms * shapes.elements(shape) / here
    step_ms = estimate if on_ms is None else on_ms
    saved = off_ms - step_ms
    return Pad(
        shape=shape,
        step_ms=step_ms,
        measured=on_ms is not None,
        saved_ms=saved,
        break_even_steps=math.ceil(compile_seconds * 1000 / saved) if saved > 0 else None,
    )


def _fixed(found: BatchShapes) -> Shape | None:
    """The largest size seen in each dimension, rounded up where examples vary."""
    tensors = [set(shape) for shape in zip(*found.seen, strict=True)]
    if any(len({len(shape) for shape in seen}) > 1 for seen in tensors):
        return None
    return tuple(
        tuple(_size(axis, set(sizes)) for axis, sizes in enumerate(zip(*seen, strict=True))) for seen in tensors
    )


def _size(axis: int, sizes: set[int]) -> int:
    return max(sizes) if axis == 0 or len(sizes) == 1 else -(-max(sizes) // _MULTIPLE) * _MULTIPLE


def _step_ms(model: keras.Model, batch: Any, shape: Shape, on: StepTimes, steps: int) -> float | None:
    """Milliseconds a step with XLA at that shape; None where zeros at the end make no batch for this model."""
    if shape == shapes.shape_of(batch):
        return on.median_ms
    tensors = [
        tf.pad(part, [(0, max(0, to - size)) for to, size in zip(target, part.shape, strict=True)])
        for part, target in zip(tf.nest.flatten(batch), shape, strict=True)
    ]
    try:
        timer = StepTimer(model, tf.nest.pack_sequence_as(batch, tensors), jit_compile=True)
        return timer(steps, samples=_SAMPLES).median_ms
    except (tf.errors.OpError, ValueError):
        return None
