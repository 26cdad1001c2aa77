"""The functions that an example passes, in order, and their mapping over a dataset."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import tensorflow as tf

from tfopt.pipelines.cropped import crop_example
from tfopt.pipelines.layout import Layout
from tfopt.pipelines.shared.elements import accepts_seed, apply_stage, element_of
from tfopt.pipelines.shared.options import PerBatch, PipelineOptions, unmarked
from tfopt.pipelines.shared.seeding import element_seed, with_drawn_words, with_words
from tfopt.pipelines.sources.source import Source


@dataclass(frozen=True, slots=True)
class Step:
    """A function that an example, or a batch, passes.

    Args:
        name: The stage that it belongs to.
        function: Called as `Dataset.map` calls its function.
        seeded: Whether it takes a keyword `seed`.
    """

    name: str
    function: Callable[..., Any]
    seeded: bool = False


def before_and_behind(source: Source, options: PipelineOptions, layout: Layout) -> tuple[list[Step], list[Step]]:
    """Returns the steps up to the cache, and those behind it; all of them behind it where there is none."""
    steps = []
    decode = source.encoded if layout.crop_encoded else source.decode
    if decode is not None:
        steps.append(Step("decode", decode))
    at = len(steps)
    if options.crop is not None:
        steps.append(
            Step(
                "crop", partial(crop_example, crop=options.crop, only_jpeg=source.only_jpeg), seeded=options.crop.random
            )
        )
        at += not options.crop.random
    if options.transform is not None:
        steps.append(Step("transform", options.transform))
    if layout.cache.on is None:
        at = 0
    elif layout.cache.after == "transform":
        at = len(steps)
    return steps[:at], steps[at:]


def augmentations(options: PipelineOptions, *, by_batch: bool) -> list[Step]:
    """Returns the functions of `augment` for single examples, or those for batches."""
    chosen = [function for function in options.augmentations if isinstance(function, PerBatch) is by_batch]
    return [Step("augment", function, accepts_seed(function)) for function in map(unmarked, chosen)]


# Not marked do_not_convert: AutoGraph must reach the user's functions, as in Dataset.map.
def passed(steps: Sequence[Step], element: Any, word: Any, number: int = 0) -> Any:
    """Returns what an element is behind the steps, in a graph.

    Args:
        steps: The functions.
        element: The element, or a batch.
        word: What the seeds of its steps are made of; None where none takes one.
        number: How many steps with a seed came before.
    """
    # Among the seeded ones, so that what is not does not change their seeds.
    for step in steps:
        keywords = {"seed": element_seed(word, number)} if step.seeded else {}
        number += step.seeded
        element = apply_stage(step.name, step.function, element, **keywords)
    return element


def run(
    dataset: Any,
    steps: Sequence[Step],
    seed: int | None,
    *,
    deterministic: bool | None = None,
    check: Callable[[Any, Any], Any] | None = None,
    served: bool = False,
) -> Any:
    """Returns a dataset whose elements have passed the steps, in one parallel map.

    Args:
        dataset: The elements.
        steps: The functions.
        seed: What the seeds of single elements are derived from; None for a random one.
        deterministic: Whether the order is kept. Default: as the whole pipeline has it.
        check: Takes the element before and behind the steps, and returns the latter.
        served: Whether it runs on the workers of a tf.data service.
    """
    if not steps and check is None:
        return dataset
    spec, seeded = dataset.element_spec, any(step.seeded for step in steps)

    def checked(before: Any, word: Any) -> Any:
        element = passed(steps, before, word)
        return element if check is None else check(before, element)

    def unseeded(*arguments: Any) -> Any:
        return checked(element_of(arguments, spec), None)

    name = "_and_".join(dict.fromkeys(step.name for step in steps)) or "check"
    elements, function = dataset, unseeded
    if seeded:
        elements, function = with_drawn_words(dataset) if served else with_words(dataset, seed), checked
    return elements.map(function, num_parallel_calls=tf.data.AUTOTUNE, deterministic=deterministic, name=name)
