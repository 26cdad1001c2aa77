"""Looks at a few elements before anything is built: do they decode, how large are they, do their shapes agree?"""

import itertools
import re
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.pipelines.elements import apply, leaves, size_bytes
from tfopt.pipelines.options import PipelineOptions, function_name
from tfopt.pipelines.sources.source import Source
from tfopt.pipelines.tracing import Traced

Shape = tuple[int, ...]
Shapes = tuple[Shape | None, ...]  # a shape a leaf; None for ragged and sparse ones, which batch whatever their shape


@dataclass(frozen=True, slots=True)
class Sample:
    """What the sampled elements showed.

    Args:
        names: What to call each of them.
        shapes: The shapes of each one's example, leaf by leaf.
        raw_bytes: The mean size of a raw element.
        example_bytes: The mean size of an example behind `transform`.
    """

    names: tuple[str, ...]
    shapes: tuple[Shapes, ...]
    raw_bytes: float
    example_bytes: float

    def unlike(self) -> int | None:
        """The number of the first element whose shapes differ from the first one's."""
        return next((index for index, shapes in enumerate(self.shapes) if shapes != self.shapes[0]), None)


def take_sample(source: Source, options: PipelineOptions, traced: Traced) -> Sample:
    """Reads, decodes and transforms the sampled elements.

    Raises:
        PipelineError: There is none, or one failed; the message names it and the stage.
    """
    names, raw_bytes = _names_and_sizes(source, traced)
    shapes, example_bytes = [], []
    examples = iter(traced.examples)
    for index, name in enumerate(names):
        try:
            example = next(examples)
        except (tf.errors.OpError, StopIteration) as error:
            raise _failure(options, traced, index, name, error) from error
        shapes.append(tuple(tuple(leaf.shape) if isinstance(leaf, tf.Tensor) else None for leaf in leaves(example)))
        example_bytes.append(size_bytes(example))
    mean_bytes = sum(raw_bytes) / len(names), sum(example_bytes) / len(names)
    return Sample(tuple(names), tuple(shapes), *mean_bytes)


def mixed_shapes(sample: Sample) -> PipelineError:
    """Returns the error for examples that cannot be batched."""
    other = sample.unlike() or 0
    pairs = zip(sample.shapes[0], sample.shapes[other], strict=True)
    first, second = next(pair for pair in pairs if pair[0] != pair[1])
    return PipelineError(
        f"Expected examples of one shape, to batch them. {sample.names[0]} has shape {first}, "
        f"{sample.names[other]} has {second}. Bring them to one in `transform`, for images with "
        "tf.image.resize(image, (height, width))."
    )


def first_line(error: BaseException) -> str:
    """Returns what an error of TensorFlow says, without the names of its functions and nodes."""
    text = re.sub(r"\{\{[^}]*\}\}", "", str(error)).strip()
    if not text:
        return type(error).__name__
    line = re.sub(r"^Error in user-defined function passed to .*?: Iterator::\S+: ", "", text.splitlines()[0])
    return re.sub(r"\s*\[Op:\w+\].*", "", line).strip()


def _names_and_sizes(source: Source, traced: Traced) -> tuple[list[str], list[int]]:
    names, sizes = [], []
    elements = iter(traced.raw)
    for index in itertools.count():
        try:
            raw = next(elements)
        except StopIteration:
            break
        except tf.errors.OpError as error:
            raise PipelineError(f"Reading element {index} of {source.name} failed: {first_line(error)}") from error
        names.append(_name(source, index, raw))
        sizes.append(size_bytes(raw))
    if not names:
        raise PipelineError(f"Expected at least one example in {source.name}. Found none.")
    return names, sizes


def _name(source: Source, index: int, raw: Any) -> str:
    if source.origin is None:
        return f"element {index}"
    return repr(apply(source.origin, raw).numpy().decode(errors="replace"))


def _failure(
    options: PipelineOptions, traced: Traced, index: int, name: str, error: tf.errors.OpError | StopIteration
) -> PipelineError:
    stage = "decode" if options.transform is None or _fails_at(traced.decoded, index) else "transform"
    if stage == "transform" and options.transform is not None:
        stage = f"transform ({function_name(options.transform)})"
    return PipelineError(f"The pipeline's stage {stage} failed on {name}: {first_line(error)}")


def _fails_at(dataset: Any, index: int) -> bool:
    try:
        for _ in dataset.skip(index).take(1):
            return False
    except tf.errors.OpError:
        pass
    return True
