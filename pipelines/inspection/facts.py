"""`inspect_source()`: everything the planner learns about a source and the functions before it decides."""

import hashlib
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.pipelines.inspection.tracing import Traced, trace
from tfopt.pipelines.service.client import refuse_unserved
from tfopt.pipelines.shared.elements import (
    apply,
    expect_lengths,
    expect_paddable,
    first_line,
    in_single_examples,
    is_static,
    size_bytes,
    without_autograph,
)
from tfopt.pipelines.shared.nondeterminism import Finding, find_in_dataset, refuse_draws
from tfopt.pipelines.shared.options import PipelineOptions, Remainder, choose_remainder
from tfopt.pipelines.sources.parts import Part, expect_one_order, take_part
from tfopt.pipelines.sources.source import Source
from tfopt.pipelines.sources.split import take_split

MIB = 2**20
# For the shuffle's buffer. Fixed, not a share of the free memory: under a seed the order must not depend on what else
# runs.
SHUFFLE_MIB = 1024
SHUFFLE_MOST = 100_000  # elements in that buffer, if these are read or computed for it
SAMPLED = 32  # elements the planner looks at
MEASURED = 1024  # of which it takes the lengths, for `bucket`
_LARGE_BYTES = 32 * 2**10  # of an example; a batch of smaller ones is copied quickly from any memory
_DOUBTS = {
    "opaque": "calls Python, which may be random; cache='memory' says that it is not",
    "reading": "reads a variable, which may change; cache='memory' says that it does not",
}

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the decisions rest on."""

    source: Source  # where several processes train together, the part this one reads
    part: Part | None  # which part that is; None if this process reads everything
    count: int | None  # examples of `source`; None if unknown
    used: int | None  # examples to read: without a shuffle, not those that fill no batch and would always be dropped
    steps: int | None  # batches per epoch; None if unknown or endless
    last_batch: tuple[Remainder, str]  # what becomes of a smaller one, and why
    mixed: bool  # whether each epoch is shuffled as a whole, so that a dropped remainder consists of others each time
    infinite: bool  # whether the source never ends
    in_source: list[Finding]  # in the source's dataset and its `decode`
    doubt: str  # why what a cache would hold may come out differently later; "" if it will not
    traced: Traced
    sample: Sample
    check: ShapeCheck | None  # of examples; None if TensorFlow knows their shapes
    raw_examples: bool  # whether raw elements are examples: nothing decodes, crops or transforms them
    by_batch: bool  # whether `decode_batch` is quicker for these examples than `decode`
    pinned: bool  # whether batches are worth the map-and-batch that makes them in memory pinned for the GPU


def inspect_source(source: Source, options: PipelineOptions) -> Facts:
    """Traces the functions, reads a sample through them, and refuses what could not be trained on.

    Raises:
        PipelineError: If data is missing, empty, damaged or of different shapes, a function failed, or there are too
            few examples.
        TypeError: If a function is a Keras layer of one input, and examples are tuples.
        ValueError: If random draws would be frozen, repeated or out of the seed's control, or examples cannot be
            cropped or padded, or a tf.data service could not run the pipeline.
        UnsupportedError: If several processes train together and cannot divide the source.
    """
    if options.split is not None:
        source = take_split(source, options.split, training=options.training)
    source, part = take_part(source, options)
    whole, raw, count, infinite = open_source(source, MEASURED if options.bucket else SAMPLED)
    traced = trace(source, options, raw)
    in_source = find_in_dataset(whole) + traced.in_decode
    if part is not None and options.service is None:
        expect_one_order(source, in_source, "in each of several processes, which divide it")
    if options.split is not None:
        expect_one_order(source, in_source, "each time, for `split`")
    refuse_draws(options, in_source, traced.in_transform, traced.in_augment)
    if options.pad is not None:
        expect_lengths(traced.examples.element_spec, bucket=options.bucket)
    if options.remainder == "pad":
        expect_paddable(traced.augmented.element_spec)
    sample = take_sample(source, options, traced)
    if options.service is not None:
        sent = count if part is None else part.whole  # a process sends all its arrays, whatever it reads of them
        refuse_unserved(
            source,
            options,
            in_source=in_source,
            in_transform=traced.in_transform,
            in_augment=traced.in_augment,
            decoded_bytes=sample.decoded_bytes * (sent or 0),
            infinite=infinite,
        )
    mixed = _is_mixed(options, source, sample, count)
    return _concluded(source, options, part, count, traced, sample, in_source, infinite=infinite, mixed=mixed)


def inspect_mixture(
    source: Source,
    options: PipelineOptions,
    sampled: Any,
    *,
    part: Part | None,
    count: int | None,
    infinite: bool,
    mixed: bool,
) -> Facts:
    """Learns the same about mixed examples, of which some are given, and the functions that follow.

    Args:
        source: The mixture, whose elements are examples.
        options: Without those that hold for its parts alone.
        sampled: A dataset of a few examples of each part.
        part: What this process has of the mixture; None if it trains alone.
        count: Examples that this process mixes in an epoch; None if unknown.
        infinite: Whether the mixture never ends.
        mixed: Whether each epoch is shuffled as a whole.

    Raises what `inspect_source` does.
    """
    traced = trace(source, options, sampled)
    refuse_draws(options, [], [], traced.in_augment)
    if options.pad is not None:
        expect_lengths(traced.examples.element_spec, bucket=options.bucket)
    if options.remainder == "pad":
        expect_paddable(traced.augmented.element_spec)
    sample = take_sample(source, options, traced)
    return _concluded(source, options, part, count, traced, sample, [], infinite=infinite, mixed=mixed)


def _concluded(
    source: Source,
    options: PipelineOptions,
    part: Part | None,
    count: int | None,
    traced: Traced,
    sample: Sample,
    in_source: list[Finding],
    *,
    infinite: bool,
    mixed: bool,
) -> Facts:
    """Returns the facts, with what follows for the last batch and the steps; refuses too few examples."""
    tail = _tail(options, part, count)
    left_out = None if count is None and not infinite else tail
    last_batch = choose_remainder(options, count, left_out, mixed=mixed) if part is None else part.last_batch
    drops = last_batch[0] == "drop"
    if part is None and count is not None and drops:
        _expect_a_batch(source.name, count, options.batch_size)
    findings = in_source + traced.in_transform
    drops_tail = drops and not options.shuffle and options.service is None
    steps = None if count is None else (count - tail) // options.batch_size + (tail > 0 and not drops)
    # `augment` may bring images of any size to one, as a random crop does.
    augments = bool(options.augmentations)
    static = is_static(traced.examples.element_spec) or (augments and is_static(traced.augmented.element_spec))
    bare = options.crop is None and options.transform is None
    dense = all(isinstance(leaf, tf.TensorSpec) for leaf in tf.nest.flatten(traced.augmented.element_spec))
    pinned = sample.example_bytes >= _LARGE_BYTES and dense and options.pad is None and _copies(options)
    return Facts(
        source=source,
        part=part,
        count=count,
        used=count - tail if count is not None and drops_tail else count,
        steps=steps if part is None else part.steps,
        last_batch=last_batch,
        mixed=mixed,
        infinite=infinite,
        in_source=in_source,
        doubt=next((f"{found} {_DOUBTS[found.kind]}" for found in findings if found.kind in _DOUBTS), ""),
        traced=traced,
        sample=sample,
        check=None
        if static or options.pad is not None
        else ShapeCheck(sample.common_shapes(), source.name, source.origin),
        raw_examples=bare and source.decode is None,
        by_batch=source.decode_batch is not None and not pinned,
        pinned=pinned,
    )


def _expect_a_batch(name: str, count: int, batch_size: int) -> None:
    if count < batch_size:
        raise PipelineError(
            f"Expected at least batch_size={batch_size} examples with remainder='drop'. {name} has {count}: there "
            "would be zero steps. Pass a smaller batch_size, or remainder='keep'."
        )


def _tail(options: PipelineOptions, part: Part | None, count: int | None) -> int:
    """How many examples fill no batch; of a part, those that it leaves out."""
    if part is not None and count is not None and options.service is None:
        return count - part.used if part.last_batch[0] == "drop" else 0
    return 0 if count is None else count % options.batch_size


def _is_mixed(options: PipelineOptions, source: Source, sample: Sample, count: int | None) -> bool:
    """Whether an epoch is surely a permutation of all examples, so that it leaves out others than the one before.

    With cache="auto" as without a cache: its choice differs with free memory, and the number of steps must not.
    """
    if not options.shuffle or count is None:
        return False
    by_position = source.at is not None and options.service is None and options.cache_folder is None
    if by_position or options.cache in ("memory", "device"):
        return True
    # The largest that the shuffle's buffer may hold, wherever it stands.
    each = max(sample.decoded_bytes, sample.example_bytes) if options.cache_folder else sample.raw_bytes
    return count * each <= SHUFFLE_MIB * MIB and (source.is_at_hand or count <= SHUFFLE_MOST)


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


def _copies(options: PipelineOptions) -> bool:
    """Whether batches are copied to a device, by the pipeline or by what trains on them."""
    return options.device not in ("auto", None) or bool(tf.config.list_logical_devices("GPU"))


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
