"""The stages of a source that makes whole batches itself: a loader of another framework."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from tfopt.errors import UnsupportedError
from tfopt.pipelines.cache.choice import CacheChoice, reads_by_position
from tfopt.pipelines.device.placing import choose_placement
from tfopt.pipelines.inspection.facts import Facts
from tfopt.pipelines.shared.options import PipelineOptions
from tfopt.pipelines.shared.seeding import of_length
from tfopt.pipelines.sources.source import Source
from tfopt.pipelines.stages.batch_stages import (
    Batch,
    Order,
    length_of,
    plan_batch_functions,
    plan_memory,
    plan_prefetch,
)
from tfopt.pipelines.stages.device_stages import plan_device
from tfopt.pipelines.stages.example_stages import Cache
from tfopt.pipelines.stages.order_stages import Read
from tfopt.pipelines.stages.stage import Flow, Stage

_EXAMPLES = "pass loader(..., batched=False) of a loader that yields single examples"
_REFUSED = {
    "batch_size": f"let the loader make batches of that size; or {_EXAMPLES}",
    "crop": f"crop in the loader; or {_EXAMPLES}",
    "crop_with": f"crop in the loader; or {_EXAMPLES}",
    "transform": f"pass augment=per_batch(function), or do it in the loader; or {_EXAMPLES}",
    "cache": f"leave it out; or {_EXAMPLES}",
    "cache_after": "leave it out",
    "cache_key": "leave it out",
    "cache_limit_gib": "leave it out",
    "balance": f"draw examples by class in the loader; or {_EXAMPLES}",
    "split": "make two loaders, one to train and one to validate on",
    "pack": f"pack in the loader; or {_EXAMPLES}",
    "pad": f"pad in the loader; or {_EXAMPLES}",
    "bucket": f"do it in the loader; or {_EXAMPLES}",
    "remainder": "leave it out: every batch is passed on as it is (in PyTorch and Grain, drop_last and drop_remainder)",
    "service": "leave it out: the loader runs in this process",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeBatches(Batch):
    """The loader's batches, unchanged."""

    def apply(self, flow: Flow) -> None:
        """Says how many there are; a loader is asked for its end."""
        flow.dataset = of_length(flow.flush(), self.length, ends=True)


def choose_options(source: Source, asked: PipelineOptions, given: Mapping[str, Any]) -> PipelineOptions:
    """Returns the options for a source of batches.

    Args:
        source: A source of batches.
        asked: The options.
        given: Those that the caller gave.

    Raises:
        UnsupportedError: If one needs single examples, or an order other than the loader's.
    """
    defaults = {field.name: field.default for field in fields(PipelineOptions)}
    harmless = {"cache": ("auto", None), "remainder": (None, "keep")}
    for name, remedy in _REFUSED.items():
        if name in given and (name == "batch_size" or given[name] not in harmless.get(name, (defaults[name],))):
            raise UnsupportedError(
                f"Expected no {name!r} for a source of whole batches. Found {name}={given[name]!r} for {source.name}. "
                f"What to do: {remedy}."
            )
    for function in asked.augmentations:
        if not function.by_batch:
            raise UnsupportedError(
                f"Expected functions of batches in `augment`, since {source.name} makes whole ones. Found: "
                f"{function.name}. What to do: let it take a batch, and pass per_batch({function.name})."
            )
    if source.at is None and given.get("shuffle"):
        raise UnsupportedError(
            f"Expected the order of {source.name}, whose batches cannot be read by position. Found shuffle=True. What "
            "to do: leave it out, and shuffle in the loader."
        )
    shuffle = asked.shuffle and source.at is not None
    return replace(asked, cache=None, remainder="keep", shuffle=shuffle, batch_size=1)


def plan_loader(options: PipelineOptions, facts: Facts) -> tuple[Stage, ...]:
    """Returns all stages of a pipeline over a source of batches, with the options that `choose_options` returned."""
    placement = choose_placement(options, facts)
    reason = "whole batches of a loader are not cached, since nothing tells whether they have changed"
    return (
        _plan_reading(options, facts),
        Cache(
            name="cache",
            setting="none",
            reason=reason,
            choice=CacheChoice(None, "decode", reason),
            key=None,
            options=options,
            facts=facts,
        ),
        _plan_batches(facts),
        *plan_batch_functions(options, placement.held),
        plan_prefetch(options),
        plan_device(placement, facts),
        _plan_order(options, facts.source),
        plan_memory(options, facts, None),
    )


def _plan_reading(options: PipelineOptions, facts: Facts) -> Read:
    source, count = facts.source, facts.count
    permuted = "each" if reads_by_position(options, facts) else ""
    if facts.infinite:
        number = "endless: give fit its steps_per_epoch"
    elif count is None:
        number = "number of batches unknown: Keras' fit counts one optimizer iteration too many in each epoch"
    else:
        number = f"{count:,} batches{', in another order in each epoch' if permuted else ''}"
    return Read(
        name="read",
        setting=source.name,
        reason="; ".join(filter(None, (number, source.note))),
        source=source,
        count=count,
        used=count,
        shuffled=False,
        lasting=False,
        permuted=permuted,
        ordered=True,
        seed=options.seed,
        local=True,
    )


def _plan_batches(facts: Facts) -> MadeBatches:
    steps = "" if facts.steps is None else f"; {facts.steps:,} steps an epoch"
    return MadeBatches(
        name="batch",
        setting="the loader's",
        reason=f"passed on as they are{steps}; several processes cannot divide them",
        size=1,  # of the source's elements
        steps=facts.steps,
        length=length_of(facts),
        full=False,
        served=False,
        pinned=False,
        padded=False,
        boundaries=(),
    )


def _plan_order(options: PipelineOptions, source: Source) -> Order:
    draws = "what the loader draws itself follows its own seeds"
    if source.at is None:
        setting, seeded = "the loader's", "`augment` alone"
    else:
        setting, seeded = ("shuffled" if options.shuffle else "kept"), "the order of batches, and `augment`"
    seed = f"seed {options.seed} holds for {seeded}; " if options.seed is not None else ""
    position = f"; no position (`at`): {source.changes}" if source.changes else ""
    return Order(name="order", setting=setting, reason=f"{seed}{draws}{position}", deterministic=True)
