"""Which stages a pipeline has, and in which order; each stage decides how it is set."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tfopt.pipelines.cache.choice import choose_cache
from tfopt.pipelines.device.placing import OnDevice, choose_placement, is_gpu
from tfopt.pipelines.inspection.facts import Facts
from tfopt.pipelines.shared.epochs import Place, Position, in_epochs
from tfopt.pipelines.shared.options import PipelineOptions
from tfopt.pipelines.sources.parts import own_seed
from tfopt.pipelines.stages.batch_stages import (
    find_held_mib,
    plan_batch,
    plan_batch_functions,
    plan_memory,
    plan_order,
    plan_padding,
    plan_prefetch,
    plan_service,
    plan_workers,
)
from tfopt.pipelines.stages.device_stages import plan_device, plan_overlap
from tfopt.pipelines.stages.example_stages import (
    Cache,
    ManyAtOnce,
    plan_augment,
    plan_cache,
    plan_functions,
)
from tfopt.pipelines.stages.mixture_stages import MixedPart, Mixture
from tfopt.pipelines.stages.order_stages import Shuffle, plan_reading, plan_shuffle
from tfopt.pipelines.stages.stage import Flow, Stage
from tfopt.text import percent


@dataclass(frozen=True, slots=True)
class ExampleStages:
    """The stages up to the batch."""

    ordered: tuple[Stage, ...]  # all of them, as elements go through them
    whole: tuple[Stage, ...]  # functions that follow the batch, since they take whole ones
    loading: tuple[Stage, ...]  # those that make examples, without a shuffle
    reading: tuple[Stage, ...]
    cache: Cache
    shuffle: Shuffle


def plan_examples(
    options: PipelineOptions,
    facts: Facts,
    held: OnDevice | str | None,
    *,
    mixed: bool = False,
    taken_bytes: float = 0,
) -> ExampleStages:
    """Returns the stages up to the batch.

    Args:
        options: Those of the pipeline, with the seed of this process.
        facts: What is known of the source and the functions.
        held: As in `Placement`.
        mixed: Whether the examples are mixed with others before they are batched.
        taken_bytes: Memory that the caches of other parts of a mixture take.
    """
    cache = plan_cache(options, facts, choose_cache(options, facts, held, taken_bytes))
    shuffle = plan_shuffle(options, facts, cache)
    reading = plan_reading(options, facts, cache.choice)
    before, after = plan_functions(options, facts, cache.choice)
    # On a device examples lie in the source's order, or in that of a cache on disk.
    if cache.choice.folder is not None:
        loading: tuple[Stage, ...] = (*reading, *before, cache, *after)
    else:
        loading = (reading[0].in_own_order(), *before, cache.without(), *after)
    augment = plan_augment(options, by_batch=False)
    whole: list[Stage] = []
    alone = cache.choice.on is not None or augment or facts.check is not None or (options.shuffle and not shuffle.first)
    while not (alone or mixed) and after and isinstance(last := after[-1], ManyAtOnce):
        # No single examples come between: the function gets the batches themselves.
        after, whole = after[:-1], [last.with_batches(), *whole]
    if options.service is not None:
        # On its workers, chunks of records lost examples and gave others twice.
        after = [stage.one_by_one() if isinstance(stage, ManyAtOnce) else stage for stage in after]
    if cache.choice.on is not None:
        examples: list[Stage] = [*before, cache, shuffle, *after]
    elif shuffle.first:
        examples = [shuffle, *after, cache]
    else:
        examples = [*after, cache, shuffle]
    return ExampleStages((*reading, *examples, *augment), tuple(whole), loading, reading, cache, shuffle)


def plan_stages(asked: PipelineOptions, facts: Facts) -> tuple[Stage, ...]:
    """Returns all stages of a pipeline over one source."""
    options = replace(asked, seed=own_seed(asked.seed, facts.part))
    placement = choose_placement(options, facts)
    examples = plan_examples(options, facts, placement.held)
    batch = plan_batch(options, facts)
    return (
        *examples.ordered,
        batch,
        *examples.whole,
        *plan_service(options, facts, batch),
        *plan_workers(options, facts),
        *plan_batch_functions(options, placement.held),
        *plan_padding(options),
        plan_prefetch(options),
        plan_device(placement, facts),
        *plan_overlap(options, facts, placement.held, examples.loading),
        plan_order(asked),
        plan_memory(options, facts, _held_mib(facts, examples, placement.device)),
    )


def plan_part(
    name: str, options: PipelineOptions, facts: Facts, *, share: float, taken: int | None, taken_bytes: float
) -> MixedPart:
    """Returns the stage of a part of a mixture, which says what is read of it.

    Args:
        name: Of the stage.
        options: As for `plan_examples`, and `facts` and `taken_bytes` too.
        share: Of the examples of the mixture.
        taken: How many examples of it an epoch reads; None if unknown or endless.
    """
    examples = plan_examples(options, facts, None, mixed=True, taken_bytes=taken_bytes)
    part = MixedPart(
        name=name,
        setting=percent(share),
        reason=f"{facts.source.name}: {_reading(facts.count, taken)}{_in_short(examples.ordered)}",
        stages=examples.ordered,
        options=options,
        facts=facts,
        share=share,
        taken=taken,
        held_mib=_held_mib(facts, examples, None),
        element_spec=None,
    )
    flow = Flow("", Place(Position(0)))
    cached = part.cached(flow)
    epochs = in_epochs(flow.place, lambda epoch: part.examples(cached, epoch))  # nothing is drawn for the spec
    return replace(part, element_spec=epochs.element_spec)


def plan_mixture(mixture: Mixture, asked: PipelineOptions, facts: Facts) -> tuple[Stage, ...]:
    """Returns all stages of a mixture; of `asked`, only options that hold for mixed examples count."""
    parts = mixture.parts
    placement = choose_placement(asked, facts)
    held = [part.held_mib for part in parts]
    return (
        *parts,
        mixture,
        *plan_augment(asked, by_batch=False),
        plan_batch(asked, facts),
        *plan_workers(asked, facts),
        *plan_batch_functions(asked, None),
        *plan_padding(asked),
        plan_prefetch(asked),
        plan_device(placement, facts),
        plan_order(asked),
        plan_memory(asked, facts, None if None in held else sum(filter(None, held))),
    )


def _held_mib(facts: Facts, examples: ExampleStages, device: str | None) -> float | None:
    return find_held_mib(facts, examples.cache.choice, examples.shuffle, examples.reading, on_gpu=is_gpu(device))


def _reading(count: int | None, taken: int | None) -> str:
    if count is None:
        return "of unknown number" if taken is None else f"{taken:,} examples an epoch"
    if taken is None:
        return f"{count:,} examples"
    if taken == count:
        return f"all {count:,} examples in each epoch"
    return f"{taken:,} examples an epoch, {taken / count:.3g} times its {count:,}"


def _in_short(stages: Sequence[Stage]) -> str:
    """Names the stages of a part and their settings; leaves out what it does not have."""
    return "".join(f"; {each.name} {each.setting}" for each in stages if each.name != "read" and each.setting != "none")
