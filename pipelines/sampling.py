"""Looks at a few elements before anything is built: do the functions trace and run, how large are the examples?

First each stage's function is traced, so that an error names its stage; then the elements are read through them.
"""

import hashlib
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.pipelines.cropped import crop_example, expect_image
from tfopt.pipelines.refusals import refuse_bare_layer, refuse_varying
from tfopt.pipelines.shared.elements import accepts_seed, apply, apply_stage, element_of, first_line, leaves, size_bytes
from tfopt.pipelines.shared.nondeterminism import Finding, contents, find_in_dataset, find_in_function
from tfopt.pipelines.shared.options import PerBatch, PipelineOptions, function_name, unmarked
from tfopt.pipelines.sources.source import Source

SAMPLED = 32  # elements that the planner looks at
Shape = tuple[int, ...]
Shapes = tuple[Shape | None, ...]  # a shape a leaf; None for ragged and sparse ones, which batch whatever their shape


@dataclass(frozen=True, slots=True)
class Traced:
    """A few elements of a source, as datasets behind each stage; the same object where a stage is not there.

    Args:
        raw: As the source reads them.
        decoded: Behind the source's `decode`, and behind a crop that is the same in every epoch: what a cache before
            `transform` holds.
        examples: Behind `transform`.
        augmented: Behind `augment`; batches, where it has functions of batches.
        in_source: What may differ from call to call, in the source's dataset and its `decode`.
        in_transform: The same, in `transform`.
        in_augment: The same, in each function of `augment`.
    """

    raw: Any
    decoded: Any
    examples: Any
    augmented: Any
    in_source: list[Finding]
    in_transform: list[Finding]
    in_augment: list[list[Finding]]


@dataclass(frozen=True, slots=True)
class Sample:
    """What the sampled elements showed.

    Args:
        names: What to call each of them.
        digest: Of their contents as they are read.
        decoded_spec: The element spec of what a cache before `transform` holds, as text.
        example_spec: That of the examples behind `transform`.
        shapes: The shapes of each one's example, leaf by leaf.
        raw_bytes: The mean size of a raw element.
        decoded_bytes: The mean size of what a cache before `transform` holds.
        example_bytes: The mean size of an example behind `transform`.
        decode_seconds: What an element takes to be read and decoded, on one core.
        transform_seconds: What `transform` adds to that.
    """

    names: tuple[str, ...]
    digest: str
    decoded_spec: str
    example_spec: str
    shapes: tuple[Shapes, ...]
    raw_bytes: float
    decoded_bytes: float
    example_bytes: float
    decode_seconds: float
    transform_seconds: float

    def unlike(self) -> int | None:
        """The number of the first element whose shapes differ from the first one's."""
        return next((index for index, shapes in enumerate(self.shapes) if shapes != self.shapes[0]), None)


def trace(source: Source, whole: Any, options: PipelineOptions) -> Traced:
    """Traces the stages.

    Args:
        source: The source.
        whole: All its raw elements.
        options: The pipeline's options.

    Raises:
        PipelineError: A function raised (the cause is chained), or gives something that is no tensor.
        TypeError: A function is a Keras layer of one input, and examples are tuples.
        ValueError: A function is another one each time that it is traced, or examples hold no image to crop.
    """
    raw = source.sample(SAMPLED) if source.sample else whole.take(SAMPLED)
    _expect_tensors("read", source.name, raw)
    decoded, in_decode = _traced("decode", source.decode, raw)
    cropped = _cropped(source, options, raw, decoded)
    examples, in_transform = _traced("transform", options.transform, cropped)
    augmented, in_augment, batched = examples, [], False
    for function in options.augmentations:
        by_batch, plain = isinstance(function, PerBatch), unmarked(function)
        before = augmented.batch(options.batch_size) if by_batch and not batched else augmented
        batched = batched or by_batch
        augmented, found = _traced("augment", plain, before, **_seed_for(plain))
        in_augment.append(found)
    in_source = find_in_dataset(whole) + in_decode
    if options.crop is not None and not options.crop.random:
        decoded = cropped
    return Traced(raw, decoded, examples, augmented, in_source, in_transform, in_augment)


def take_sample(source: Source, options: PipelineOptions, traced: Traced) -> Sample:
    """Reads, decodes and transforms the sampled elements.

    Raises:
        PipelineError: There is none, or one failed; the message names it and the stage.
    """
    names, raw_bytes, digest = _names_and_sizes(source, traced)
    decoded = _run(traced.decoded, names, "decode")
    examples = decoded
    if traced.examples is not traced.decoded:
        stage = "crop" if options.transform is None else f"transform ({function_name(options.transform)})"
        examples = _run(traced.examples, names, stage)
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


@dataclass(frozen=True, slots=True)
class _Run:
    shapes: tuple[Shapes, ...]
    bytes: float
    seconds: float


def _run(dataset: Any, names: list[str], stage: str) -> _Run:
    """Runs the sampled elements up to a stage, one after the other."""
    shapes, sizes, seconds = [], [], []
    elements = iter(dataset.with_options(_one_by_one()))
    for name in names:
        started = time.perf_counter()
        try:
            element = next(elements)
        except (tf.errors.OpError, StopIteration) as error:
            raise PipelineError(
                f"Expected every example to pass the pipeline's functions. The pipeline's stage {stage} failed on "
                f"{name}: {first_line(error)}. Mend the function, or remove that example."
            ) from error
        seconds.append(time.perf_counter() - started)
        shapes.append(tuple(tuple(leaf.shape) if isinstance(leaf, tf.Tensor) else None for leaf in leaves(element)))
        sizes.append(size_bytes(element))
    # The first one also starts the iterator; the median is not moved by what else the machine does.
    return _Run(tuple(shapes), sum(sizes) / len(sizes), statistics.median(seconds[1:] or seconds))


def _one_by_one() -> Any:
    options = tf.data.Options()
    options.experimental_optimization.map_parallelization = False
    options.experimental_optimization.inject_prefetch = False
    options.autotune.enabled = False
    return options


def _cropped(source: Source, options: PipelineOptions, raw: Any, decoded: Any) -> Any:
    if options.crop is None:
        return decoded
    before = decoded if source.encoded is None else _mapped("decode", source.encoded, raw, {})
    expect_image(before.element_spec)
    return _mapped("crop", partial(crop_example, crop=options.crop, seed=tf.zeros(2, tf.int32)), before, {})


def _seed_for(function: Any) -> dict[str, Any]:
    return {"seed": tf.zeros(2, tf.int32)} if accepts_seed(function) else {}


def mixed_shapes(sample: Sample) -> PipelineError:
    """Returns the error for examples that cannot be batched."""
    other = sample.unlike() or 0
    pairs = zip(sample.shapes[0], sample.shapes[other], strict=True)
    first, second = next(pair for pair in pairs if pair[0] != pair[1])
    return PipelineError(
        f"Expected examples of one shape, to batch them. {sample.names[0]} has shape {first}, "
        f"{sample.names[other]} has {second}. Bring them to one in `transform`, for images with "
        "tf.image.resize(image, (height, width)), or pass crop=RandomCrop(224) or CentralCrop(224)."
    )


def _traced(stage: str, function: Any, dataset: Any, **keywords: Any) -> tuple[Any, list[Finding]]:
    if function is None:
        return dataset, []
    refuse_bare_layer(stage, function, dataset.element_spec)
    traced = _mapped(stage, function, dataset, keywords)
    _expect_tensors(stage, function_name(function), traced)
    plain = getattr(function, "python_function", function)  # a tf.function would keep its first trace
    first, second = traced, _mapped(stage, plain, dataset, keywords)
    # The first trace of a Keras layer may also build it.
    if plain is not function or _contents(first) != _contents(second):
        first, second = second, _mapped(stage, plain, dataset, keywords)
        refuse_varying(stage, _contents(first), _contents(second))
    return traced, find_in_function(traced._map_func.function)


def _mapped(stage: str, function: Callable[..., Any], dataset: Any, keywords: dict[str, Any]) -> Any:
    spec, returned = dataset.element_spec, []

    def call(*arguments: Any) -> Any:
        result = apply_stage(stage, function, element_of(arguments, spec), **keywords)
        returned.append(result)
        return result

    try:
        return dataset.map(call, name=stage)
    except Exception as error:
        # Dataset.map takes a None beside a tensor, and fails obscurely where there is nothing else.
        if returned and all(leaf is None for leaf in leaves(returned[0])):
            raise _no_tensors(stage, function_name(function), "None", "") from error
        # Its own arguments, as against those of a function that it calls, stand in the first line.
        spread = isinstance(error, TypeError) and type(spec) is tuple and "positional argument" in str(error)
        hint = f" Examples are tuples: a function of them takes {len(spec)} arguments." if spread else ""
        raise PipelineError(
            f"The pipeline's stage {stage!r} ({function_name(function)}) failed while TensorFlow traced it, on "
            f"elements {spec}.{hint} {type(error).__name__}: {error}"
        ) from error


def _contents(mapped: Any) -> Any:
    return contents(mapped._map_func.function)


def _expect_tensors(stage: str, name: str, dataset: Any) -> None:
    for leaf in leaves(dataset.element_spec):
        if leaf is None or isinstance(leaf, tf.data.DatasetSpec) or type(leaf).__name__ == "NoneTensorSpec":
            found = "a dataset" if isinstance(leaf, tf.data.DatasetSpec) else "None"
            raise _no_tensors(stage, name, found, f" in its elements {dataset.element_spec}")


def _no_tensors(stage: str, name: str, found: str, where: str) -> PipelineError:
    return PipelineError(
        f"Expected tensors from the pipeline's stage {stage!r} ({name}). Found {found}{where}. Return tensors only, "
        "and leave out what is not there."
    )


def _names_and_sizes(source: Source, traced: Traced) -> tuple[list[str], list[int], str]:
    """Returns what to call the sampled elements, their sizes, and the hash of their contents."""
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
                f"{first_line(error)}. Mend or remove that element."
            ) from error
        names.append(_name(source, index, raw))
        sizes.append(size_bytes(raw))
        for tensor in tf.nest.flatten(raw, expand_composites=True):
            digest.update(tf.io.serialize_tensor(tensor).numpy())
    if not names:
        raise PipelineError(
            f"Expected at least one example in {source.name}. Found none. Check where the source reads from, and what "
            "it filters out."
        )
    return names, sizes, digest.hexdigest()


def _name(source: Source, index: int, raw: Any) -> str:
    if source.origin is None:
        return f"element {index}"
    return repr(apply(source.origin, raw).numpy().decode(errors="replace"))
