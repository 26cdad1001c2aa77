"""A few elements of a source, read through the functions: their sizes, shapes and times."""

import hashlib
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.errors import PipelineError, UnsupportedError
from tfopt.pipelines.inspection.tracing import Traced
from tfopt.pipelines.shared.elements import apply, first_line, in_single_examples, size_bytes, without_autograph
from tfopt.pipelines.shared.options import PipelineOptions
from tfopt.pipelines.sources.source import Source

SAMPLED = 32  # elements the planner looks at
MEASURED = 1024  # of which it takes the lengths, for `bucket`

Shape = tuple[int, ...]
Shapes = tuple[Shape | None, ...]  # per leaf; None for ragged and sparse tensors, which batch whatever their shape


@dataclass(frozen=True, slots=True)
class Sample:
    """What the sampled elements showed. Sizes are means in bytes; times are on one core."""

    names: tuple[str, ...]  # how errors name each of them
    digest: str  # of their contents as they are read
    decoded_spec: str  # element spec of what a cache before `transform` holds
    example_spec: str  # element spec of the examples after `transform`
    shapes: tuple[Shapes, ...]  # of each element's example, leaf by leaf
    raw_bytes: float
    decoded_bytes: float  # of what a cache before `transform` holds
    example_bytes: float  # of an example after `transform`
    decode_seconds: float  # to read and decode one
    transform_seconds: float  # what `transform` adds to that

    def seconds(self, after: str) -> float:
        """Returns the time to compute what a cache after "decode" or "transform" holds of an example."""
        return self.decode_seconds + (self.transform_seconds if after == "transform" else 0.0)

    def common_shapes(self) -> Shapes:
        """Returns the shapes all sampled examples have.

        Raises:
            PipelineError: If they differ, so that the examples cannot be batched.
        """
        first = self.shapes[0]
        for name, shapes in zip(self.names, self.shapes, strict=True):
            if shapes != first:
                ours, theirs = next(pair for pair in zip(first, shapes, strict=True) if pair[0] != pair[1])
                raise PipelineError(
                    f"Expected examples of one shape, to batch them. {self.names[0]} has shape {ours}, {name} has "
                    f"{theirs}. Bring them to one in `transform`, for images with tf.image.resize(image, (height, "
                    "width)); pass crop=RandomCrop(224) or CentralCrop(224); or pad them with pad='batch'."
                )
        return first


@dataclass(frozen=True, slots=True)
class ShapeCheck:
    """Checks in the graph that examples have the shapes of the sampled ones."""

    shapes: Shapes
    source: str  # the source's name
    origin: Callable[..., Any] | None  # names a raw element

    def checker(self, *, is_raw: bool) -> Callable[[Any, Any], Any]:
        """Returns a function of an element before and after a map; `is_raw` says whether the former is a raw one."""
        origin = self.origin if is_raw else None

        @without_autograph
        def checked(before: Any, example: Any) -> Any:
            name = tf.constant(f"An element of {self.source}") if origin is None else apply(origin, before)
            pairs = zip(tf.nest.flatten(example), self.shapes, strict=True)
            fixed = [
                leaf if shape is None or leaf.shape.is_fully_defined() else _expect_shape(leaf, shape, name)
                for leaf, shape in pairs
            ]
            return tf.nest.pack_sequence_as(example, fixed)

        return checked


def open_source(source: Source, sampled: int = SAMPLED) -> tuple[Any, Any, int | None, bool]:
    """Returns a source's dataset, the elements of it the planner looks at, its count, and whether it never ends."""
    whole = source.dataset()
    if source.sample is not None:
        raw = source.sample(sampled)
    elif sampled > SAMPLED and source.at is not None and source.count is not None:
        # Spread over the data, which may be sorted by length.
        raw = source.at(
            tf.data.Dataset.from_tensor_slices(np.unique(np.linspace(0, source.count - 1, sampled, dtype=np.int64)))
        )
    else:
        raw = whole.take(sampled)
    cardinality = int(whole.cardinality())
    infinite = cardinality == tf.data.INFINITE_CARDINALITY
    if source.count is not None and (infinite or (cardinality >= 0 and cardinality != source.count)):
        found = "no end" if infinite else str(cardinality)
        raise PipelineError(
            f"Expected {source.count} elements, which {source.name} gives as its `count`. Its dataset has {found}. "
            "Correct the source's `count`, or leave it out."
        )
    return whole, raw, (cardinality if cardinality >= 0 else source.count), infinite


def take_sample(source: Source, options: PipelineOptions, traced: Traced) -> Sample:
    """Reads, decodes and transforms the sampled elements; refuses one that fails, by its name and the stage's."""
    names, raw_bytes, digest = _read(source, traced)
    decoded = _run(traced.decoded, names, "decode")
    examples = decoded
    if traced.examples is not traced.decoded:
        stage = "crop" if options.transformation is None else f"transform ({options.transformation.name})"
        examples = _run(traced.examples, names, stage)
    for name, alone, batch in traced.together:
        _expect_one_by_one(name, alone, batch, names)
    return Sample(
        names=tuple(names),
        digest=digest,
        decoded_spec=repr(traced.decoded.element_spec),
        example_spec=repr(traced.examples.element_spec),
        shapes=examples.shapes,
        raw_bytes=sum(raw_bytes) / len(names),
        decoded_bytes=decoded.bytes,
        example_bytes=examples.bytes,
        decode_seconds=decoded.seconds,
        transform_seconds=max(0.0, examples.seconds - decoded.seconds),
    )


def expect_same_again(source: Source, traced: Traced, sample: Sample, where: str) -> None:
    """Refuses to divide a source by position whose sampled elements differ when read again.

    Raises:
        UnsupportedError: If they do.
    """
    if _read(source, traced)[2] != sample.digest:
        raise UnsupportedError(
            f"Expected a source that has the same order {where}. Found that the first {len(sample.names)} elements of "
            f"{source.name} differ when read again: if their order does, some examples would be in both parts, and "
            "others in neither. What to do: let its function return the same each time, and leave the order to "
            "`shuffle` and random changes to `augment`."
        )


def _read(source: Source, traced: Traced) -> tuple[list[str], list[int], str]:
    """Returns the names of the sampled elements, their sizes, and the hash of their contents."""
    names, sizes, digest = [], [], hashlib.sha256()
    elements = iter(traced.raw)
    for index in itertools.count():
        try:
            raw = next(elements)
        except StopIteration:
            break
        except tf.errors.OpError as error:
            raise PipelineError(
                f"Expected to read {source.name}. Reading element {index} of {source.name} failed: "
                f"{first_line(error)}. Fix or remove that element."
            ) from error
        sizes.append(size_bytes(raw))
        origin = None if source.origin is None else apply(source.origin, raw)
        names.append(f"element {index}" if origin is None else repr(origin.numpy().decode(errors="replace")))
        for tensor in tf.nest.flatten(raw, expand_composites=True):
            digest.update(tf.io.serialize_tensor(tensor).numpy())
    if not names:
        raise PipelineError(
            f"Expected at least one example in {source.name}. Found none. Check where the source reads from, and what "
            "it filters out."
        )
    return names, sizes, digest.hexdigest()


def _expect_one_by_one(function: str, alone: Any, batch: Any, names: list[str]) -> None:
    """Refuses a function of batches whose examples depend on which others are in the batch."""
    expected = f"Expected {function} to treat each example of a batch by itself. It"
    try:
        together = list(in_single_examples(batch))
    except tf.errors.OpError as error:
        raise PipelineError(
            f"{expected} failed on a batch of {len(names)}: {first_line(error)}. Bring examples to one shape "
            "before it, such as with `crop`, or pass a function of single examples."
        ) from error
    if len(together) != len(names):
        raise PipelineError(f"{expected} makes {len(together)} examples of {len(names)}. Return as many as it gets.")
    for name, *pair in zip(names, alone, together, strict=True):
        parts = [[np.asarray(part.numpy()) for part in tf.nest.flatten(each, expand_composites=True)] for each in pair]
        if not all(map(_about_equal, *parts)):
            raise PipelineError(
                f"{expected} makes something else of {name} alone than in a batch of {len(names)}. Compute what "
                "depends on the other examples in augment=per_batch(...), which gets the batches that are trained on."
            )


def _about_equal(a: Any, b: Any) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.dtype.kind not in "fcV":
        return bool(np.all(a == b))
    # Kernels add in another order where there are more rows; bfloat16 is of NumPy's kind "V".
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    a, b = a.astype(wide), b.astype(wide)
    largest = np.max(np.abs(a[np.isfinite(a)]), initial=0)
    return bool(np.allclose(a, b, rtol=1e-2, atol=1e-3 * largest, equal_nan=True))


@dataclass(frozen=True, slots=True)
class _Run:
    shapes: tuple[Shapes, ...]
    bytes: float
    seconds: float


def _run(dataset: Any, names: list[str], stage: str) -> _Run:
    """Runs the sampled elements up to a stage, one after the other."""
    one_by_one = tf.data.Options()
    one_by_one.experimental_optimization.map_parallelization = False
    one_by_one.experimental_optimization.inject_prefetch = False
    one_by_one.autotune.enabled = False
    shapes, sizes, seconds = [], [], []
    elements = iter(dataset.with_options(one_by_one))
    for name in names:
        started = time.perf_counter()
        try:
            element = next(elements)
        except (tf.errors.OpError, StopIteration) as error:
            raise PipelineError(
                f"Expected every example to pass the pipeline's functions. The pipeline's stage {stage} failed on "
                f"{name}: {first_line(error)}. Fix the function, or remove that example."
            ) from error
        seconds.append(time.perf_counter() - started)
        shapes.append(
            tuple(tuple(leaf.shape) if isinstance(leaf, tf.Tensor) else None for leaf in tf.nest.flatten(element))
        )
        sizes.append(size_bytes(element))
    # The first one also starts the iterator; the median ignores whatever else the machine does.
    return _Run(tuple(shapes), sum(sizes) / len(sizes), statistics.median(seconds[1:] or seconds))


@without_autograph
def _expect_shape(leaf: Any, shape: tuple[int, ...], name: Any) -> Any:
    """Gives a leaf this shape; one that has another shape at run time raises an error that names the example."""
    # Compared as text: shapes of different ranks cannot be compared element by element.
    found = tf.strings.reduce_join(tf.as_string(tf.shape(leaf)), separator=", ")
    expected = ", ".join(map(str, shape))
    remedy = f"), unlike the first, ({expected}). Bring all to one shape in `transform`."
    message = [name, " has shape (", found, remedy]
    with tf.control_dependencies([tf.debugging.Assert(tf.equal(found, expected), [tf.strings.join(message)])]):
        leaf = tf.identity(leaf)
    leaf.set_shape(shape)
    return leaf
