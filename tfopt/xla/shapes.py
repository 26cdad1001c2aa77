"""The batch shapes that a dataset yields: XLA compiles the training step once for each of them."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.model.batches import as_dataset, one_batch

Shape = tuple[tuple[int, ...], ...]
"""The shape of each tensor in a batch."""

_MOST_BATCHES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShapes:
    """The shapes of the batches that a dataset yields.

    Attributes:
        seen: Each shape, most frequent first. A shape is that of every tensor in the batch.
        batches: How many of the batches read had each of them.
        complete: Whether the dataset yields no others. False: reading stopped before its end.
        steps_per_epoch: Batches in the dataset; None where that is not known, or without end.
    """

    seen: tuple[Shape, ...]
    batches: tuple[int, ...]
    complete: bool
    steps_per_epoch: int | None = None

    @property
    def count(self) -> int:
        """How many shapes were seen."""
        return len(self.seen)

    @property
    def batches_read(self) -> int:
        """How many batches were read; 0 where the dataset says by itself that all have one shape."""
        return sum(self.batches)

    @property
    def new_per_batch(self) -> float:
        """How likely a further batch has a shape not seen yet.

        The share of batches whose shape was seen only once estimates it (Good, "The population frequencies of
        species", Biometrika 1953). One of them may be the last, smaller batch, and two shapes are no more than that.
        """
        return (self.batches.count(1) - 1) / self.batches_read if self.count > 2 and 1 in self.batches else 0.0

    def to_dict(self) -> dict[str, Any]:
        """JSON."""
        derived = {"count": self.count, "batches_read": self.batches_read, "new_per_batch": self.new_per_batch}
        return asdict(self) | derived

    def __str__(self) -> str:
        shapes = f"{self.count} batch shape{'s' * (self.count > 1)}"
        if not self.batches_read:
            return shapes
        whole = "all of the dataset" if self.complete else "not all of the dataset"
        return f"{shapes} in the {self.batches_read:,} batches read ({whole})"


def batch_shapes(data: Any, *, seconds: float, clock: Callable[[], float] = time.perf_counter) -> BatchShapes:
    """Counts the shapes of a dataset's batches: from its element_spec where that is static, else by reading it.

    Args:
        data: A tf.data.Dataset of batches, or one batch.
        seconds: How long to read at most. It ends after 1,000 batches in any case.
        clock: Seconds, monotonic.

    Returns:
        The shapes, and how many batches were read for them.

    Raises:
        TypeError: `data` is neither a dataset nor a batch.
        tfopt.errors.PipelineError: The dataset is empty, or fails while it is read.

    Example:
        >>> print(batch_shapes(dataset, seconds=1.0))
        2 batch shapes in the 23 batches read (all of the dataset)
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
        raise PipelineError(
            f"Expected a dataset that can be read to its end. Found after {found.total():,} batches: "
            f"{error.message.splitlines()[0]}. Mend its source, or give one batch."
        ) from error
    if not found:
        one_batch(dataset)  # raises the error for an empty dataset
    seen, batches = zip(*found.most_common(), strict=True)
    return BatchShapes(seen=seen, batches=batches, complete=complete, steps_per_epoch=steps)


def shape_of(batch: Any) -> Shape:
    """The shape of each tensor in a batch; those that a ragged or sparse one is made of are tensors too."""
    return tuple(tuple(part.shape.as_list()) for part in tf.nest.flatten(batch, expand_composites=True))


def elements(shape: Shape) -> int:
    """How many numbers a batch of this shape holds."""
    return sum(tf.TensorShape(part).num_elements() for part in shape)


def words(shape: Shape) -> str:
    """A shape for a sentence: "(32, 8), (32,)"."""
    return ", ".join(map(str, shape))
