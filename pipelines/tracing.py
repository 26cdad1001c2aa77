"""Traces the functions of a pipeline on a few elements, one stage at a time, so that an error names its stage."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.pipelines.elements import apply, element_of
from tfopt.pipelines.options import PipelineOptions, function_name
from tfopt.pipelines.randomness import Finding, find_in_dataset, find_in_function
from tfopt.pipelines.sources.source import Source

SAMPLED = 32  # elements that the planner looks at


@dataclass(frozen=True, slots=True)
class Traced:
    """A few elements of a source, as datasets behind each stage; the same object where a stage is not there.

    Args:
        raw: As the source reads them.
        decoded: Behind the source's `decode`.
        examples: Behind `transform`.
        augmented: Behind `augment`.
        takes_seed: Whether `augment` has a parameter `seed`.
        in_source: What may differ from call to call, in the source's dataset and its `decode`.
        in_transform: The same, in `transform`.
        in_augment: The same, in `augment`.
    """

    raw: Any
    decoded: Any
    examples: Any
    augmented: Any
    takes_seed: bool
    in_source: list[Finding]
    in_transform: list[Finding]
    in_augment: list[Finding]


def trace(source: Source, whole: Any, options: PipelineOptions) -> Traced:
    """Traces the stages.

    Args:
        source: The source.
        whole: All its raw elements.
        options: The pipeline's options.

    Raises:
        PipelineError: A function raised; the cause is chained.
    """
    raw = source.sample(SAMPLED) if source.sample else whole.take(SAMPLED)
    decoded, in_decode = _traced("decode", source.decode, raw)
    examples, in_transform = _traced("transform", options.transform, decoded)
    takes_seed = options.augment is not None and accepts_seed(options.augment)
    seed = {"seed": tf.zeros(2, tf.int32)} if takes_seed else {}
    augmented, in_augment = _traced("augment", options.augment, examples, **seed)
    in_source = find_in_dataset(whole) + in_decode
    return Traced(raw, decoded, examples, augmented, takes_seed, in_source, in_transform, in_augment)


def accepts_seed(function: Callable[..., Any]) -> bool:
    """Whether a function has a parameter `seed` that can be passed by keyword."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # built-in functions have none
        return False
    keyword = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return "seed" in parameters and parameters["seed"].kind in keyword


def mapped(function: Callable[..., Any], dataset: Any, stage: str, **options: Any) -> Any:
    """Maps a function over a dataset, under the stage's name in the graph."""
    spec = dataset.element_spec

    # Not marked do_not_convert: AutoGraph must reach the user's function, as in Dataset.map.
    def call(*arguments: Any) -> Any:
        with tf.name_scope(stage):
            return apply(function, element_of(arguments, spec))

    return dataset.map(call, name=stage, **options)


def _traced(stage: str, function: Any, dataset: Any, **keywords: Any) -> tuple[Any, list[Finding]]:
    if function is None:
        return dataset, []

    def call(*arguments: Any) -> Any:
        return function(*arguments, **keywords)

    try:
        traced = mapped(call, dataset, stage)
    except Exception as error:
        raise PipelineError(
            f"The pipeline's stage {stage!r} ({function_name(function)}) failed while TensorFlow traced it, on "
            f"elements {dataset.element_spec}: {type(error).__name__}: {error}"
        ) from error
    return traced, find_in_function(traced._map_func.function)
