"""Reads a few elements through the traced stages: how large are the examples, and how long do they take?"""

import hashlib
import itertools
import statistics
import time
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.pipelines.inspection.tracing import Traced
from tfopt.pipelines.shared.elements import apply, first_line, leaves, size_bytes
from tfopt.pipelines.shared.options import PipelineOptions, function_name
from tfopt.pipelines.sources.source import Source

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
                    "width)), or pass crop=RandomCrop(224) or CentralCrop(224)."
                )
        return first


def take_sample(source: Source, options: PipelineOptions, traced: Traced) -> Sample:
    """Reads, decodes and transforms the sampled elements.

    Raises:
        PipelineError: If there is none, or one failed; the message names it and the stage.
    """
    names, raw_bytes, digest = _read(source, traced)
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
        shapes.append(tuple(tuple(leaf.shape) if isinstance(leaf, tf.Tensor) else None for leaf in leaves(element)))
        sizes.append(size_bytes(element))
    # The first one also starts the iterator; the median ignores whatever else the machine does.
    return _Run(tuple(shapes), sum(sizes) / len(sizes), statistics.median(seconds[1:] or seconds))


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
