"""Batch shapes of a dataset, each of which XLA compiles, and the gain from padding them to one shape."""

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import keras
import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.measure import StepTimer, StepTimes
from tfopt.model.batches import as_dataset, one_batch

Shape = tuple[tuple[int, ...], ...]
"""The shape of each tensor in a batch."""

_MOST_BATCHES = 1000
# Tensor Cores' multiple for 16-bit numbers: NVIDIA, "Matrix Multiplication Background User's Guide".
_MULTIPLE = 8
_SAMPLES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShapes:
    """Shapes of the batches in a dataset."""

    seen: tuple[Shape, ...]
    """Shapes, most frequent first."""
    batches: tuple[int, ...]
    """Number of batches read with each shape."""
    complete: bool
    """Whether the dataset was read to its end."""
    steps_per_epoch: int | None = None
    """Batches in the dataset; None if unknown or infinite."""

    @property
    def count(self) -> int:
        """Number of shapes."""
        return len(self.seen)

    @property
    def batches_read(self) -> int:
        """Number of batches read; 0 if the element_spec alone shows that there is one shape."""
        return sum(self.batches)

    @property
    def new_per_batch(self) -> float:
        """Probability that the next batch has a new shape.

        Estimated by the share of batches whose shape was seen only once (Good, "The population frequencies of
        species", Biometrika 1953). One of those may be the smaller last batch, so one is subtracted, and with only two
        shapes the estimate is 0.
        """
        return (self.batches.count(1) - 1) / self.batches_read if self.count > 2 and 1 in self.batches else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON values."""
        derived = {"count": self.count, "batches_read": self.batches_read, "new_per_batch": self.new_per_batch}
        return asdict(self) | derived

    def __str__(self) -> str:
        shapes = f"{self.count} batch shape{'s' * (self.count > 1)}"
        if not self.batches_read:
            return shapes
        whole = "all of the dataset" if self.complete else "not all of the dataset"
        return f"{shapes} in the {self.batches_read:,} batches read ({whole})"


def batch_shapes(data: Any, *, seconds: float, clock: Callable[[], float] = time.perf_counter) -> BatchShapes:
    """Counts the batch shapes of a dataset, from its element_spec if that is static, otherwise by reading it.

    Reading stops after `seconds` or 1,000 batches.

    Raises:
        TypeError: If `data` is neither a dataset nor a batch.
        tfopt.errors.PipelineError: If the dataset is empty or fails while it is read.
    """
    dataset = as_dataset(data)
    cardinality = int(dataset.cardinality())
    steps = cardinality if cardinality >= 0 else None
    spec = [part.shape for part in tf.nest.flatten(dataset.element_spec, expand_composites=True)]
    if all(shape.is_fully_defined() for shape in spec):
        only = tuple(tuple(shape.as_list()) for shape in spec)
        return BatchShapes(seen=(only,), batches=(0,), complete=True, steps_per_epoch=steps)
    found: Counter[Shape] = Counter()
    end = clock() + seconds
    complete = True
    try:
        for batch in dataset:
            found[shape_of(batch)] += 1
            if found.total() >= _MOST_BATCHES or clock() > end:
                complete = found.total() == cardinality
                break
    except tf.errors.OpError as error:
        raise unreadable(error) from error
    if not found:
        one_batch(dataset)  # raises the error for an empty dataset
    seen, batches = zip(*found.most_common(), strict=True)
    return BatchShapes(seen=seen, batches=batches, complete=complete, steps_per_epoch=steps)


def unreadable(error: tf.errors.OpError) -> PipelineError:
    """Returns what to raise if reading a dataset raised `error`."""
    found = error.message.splitlines()[0]
    return PipelineError(
        f"Expected a dataset that can be read to its end. Found: {found}. Fix its source, or pass one batch."
    )


def shape_of(batch: Any) -> Shape:
    """Returns the shape of each tensor in a batch, counting the components of ragged and sparse tensors."""
    return tuple(tuple(part.shape.as_list()) for part in tf.nest.flatten(batch, expand_composites=True))


def elements(shape: Shape) -> int:
    """Number of elements in a batch of this shape."""
    return sum(tf.TensorShape(part).num_elements() for part in shape)


def format_shape(shape: Shape) -> str:
    """Formats a shape as "(32, 8), (32,)"."""
    return ", ".join(map(str, shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pad:
    """One shape for every batch, and what XLA would gain with it."""

    shape: Shape
    """Shape of each tensor: the largest size seen per dimension, rounded up to a multiple of 8 where sizes vary, except
    in the batch dimension."""
    step_ms: float
    """A step with XLA at that shape."""
    measured: bool
    """Whether `step_ms` was measured. If not, the measured step is scaled by the elements in a batch."""
    saved_ms: float
    """Time saved per step against training without XLA on unpadded batches (scaled to the mean batch)."""
    break_even_steps: int | None
    """Steps after which the one compilation has paid for itself; None if it never does."""

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        how = "measured" if self.measured else "estimated"
        pays = "XLA would not pay either"
        if self.break_even_steps is not None:
            pays = f"XLA would pay after {self.break_even_steps:,} steps"
        return f"Padded to one shape, {format_shape(self.shape)}, {pays} ({self.step_ms:.3g} ms a step, {how})"


def padded(
    model: keras.Model,
    batch: Any,
    found: BatchShapes,
    times: dict[str, StepTimes],
    *,
    compile_seconds: float,
    steps: int,
) -> Pad | None:
    """Finds one shape for all batches and measures a step with XLA at that shape, which compiles once.

    `times` ("off" and "on") and `compile_seconds` were measured on `batch`. Returns None if tensors differ in rank or
    are not dense.
    """
    shape = _fixed(found)
    if shape is None or not all(isinstance(part, tf.Tensor) for part in tf.nest.flatten(batch)):
        return None
    here = elements(shape_of(batch))
    mean = sum(elements(seen) * number for seen, number in zip(found.seen, found.batches, strict=True))
    off_ms = times["off"].median_ms * mean / found.batches_read / here
    on_ms = _step_ms(model, batch, shape, times["on"], steps)
    estimate = times["on"].median_ms * elements(shape) / here
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
    """Largest size per dimension, rounded up where examples vary."""
    tensors = [set(shape) for shape in zip(*found.seen, strict=True)]
    if any(len({len(shape) for shape in seen}) > 1 for seen in tensors):
        return None
    return tuple(
        tuple(_size(axis, set(sizes)) for axis, sizes in enumerate(zip(*seen, strict=True))) for seen in tensors
    )


def _size(axis: int, sizes: set[int]) -> int:
    return max(sizes) if axis == 0 or len(sizes) == 1 else -(-max(sizes) // _MULTIPLE) * _MULTIPLE


def _step_ms(model: keras.Model, batch: Any, shape: Shape, on: StepTimes, steps: int) -> float | None:
    """Milliseconds per step with XLA at that shape; None if the model cannot take a batch padded with zeros."""
    if shape == shape_of(batch):
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
