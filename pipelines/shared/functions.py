"""The functions examples and batches go through, called in turn in one parallel map."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfopt.pipelines.shared.elements import accepts_seed, apply_stage, element_of
from tfopt.pipelines.shared.options import PerBatch, PipelineOptions, unmarked
from tfopt.pipelines.shared.seeding import element_seed, with_drawn_bits, with_random_bits


@dataclass(frozen=True, slots=True)
class StageFunction:
    """A function that a stage calls on each example, or on each batch."""

    stage: str
    call: Callable[..., Any]  # called as `Dataset.map` calls its function
    seeded: bool = False  # whether it takes a keyword `seed`


def augment_functions(options: PipelineOptions, *, by_batch: bool) -> list[StageFunction]:
    """Returns the functions of `augment` that take single examples, or those that take batches."""
    chosen = [function for function in options.augmentations if isinstance(function, PerBatch) is by_batch]
    return [StageFunction("augment", function, accepts_seed(function)) for function in map(unmarked, chosen)]


# Not marked do_not_convert: AutoGraph must reach the user's functions, as in Dataset.map.
def call_in_turn(functions: Sequence[StageFunction], element: Any, bits: Any, number: int = 0) -> Any:
    """Returns an element after all functions, in a graph.

    Args:
        functions: The functions.
        element: The element, or a batch.
        bits: Random bits for the seeds; None if no function takes a seed.
        number: How many functions with a seed were called before.
    """
    # Counted among the seeded ones, so that other functions do not change their seeds.
    for function in functions:
        keywords = {"seed": element_seed(bits, number)} if function.seeded else {}
        number += function.seeded
        element = apply_stage(function.stage, function.call, element, **keywords)
    return element


def map_functions(
    dataset: Any,
    functions: Sequence[StageFunction],
    seed: int | None,
    *,
    deterministic: bool | None = None,
    check: Callable[[Any, Any], Any] | None = None,
    served: bool = False,
) -> Any:
    """Returns a dataset whose elements have gone through the functions, in one parallel map.

    Args:
        dataset: The elements.
        functions: The functions.
        seed: What the elements' seeds are derived from; None for a random one.
        deterministic: Whether the order is kept. Default: as in the whole pipeline.
        check: Takes an element before and after the functions, and returns the latter.
        served: Whether this runs on the workers of a tf.data service.
    """
    if not functions and check is None:
        return dataset
    spec, seeded = dataset.element_spec, any(function.seeded for function in functions)

    def checked(before: Any, bits: Any) -> Any:
        element = call_in_turn(functions, before, bits)
        return element if check is None else check(before, element)

    def unseeded(*arguments: Any) -> Any:
        return checked(element_of(arguments, spec), None)

    name = "_and_".join(dict.fromkeys(function.stage for function in functions)) or "check"
    elements, call = dataset, unseeded
    if seeded:
        elements, call = with_drawn_bits(dataset) if served else with_random_bits(dataset, seed), checked
    return elements.map(call, num_parallel_calls=tf.data.AUTOTUNE, deterministic=deterministic, name=name)
