"""`mix`: examples of several sources or plans in fixed proportions, as one pipeline."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any, Literal, Unpack

import tensorflow as tf

from tfopt import checks
from tfopt.errors import PipelineError, UnsupportedError
from tfopt.pipelines.inspection.facts import Facts, Take, inspect_mixture, inspect_source
from tfopt.pipelines.inspection.sample import MEASURED, SAMPLED
from tfopt.pipelines.loaders.loader import is_loader
from tfopt.pipelines.plan import PipelinePlan, plan_pipeline, unknown_option, warn_left_out
from tfopt.pipelines.shared.elements import element_of, without_autograph
from tfopt.pipelines.shared.epochs import Position
from tfopt.pipelines.shared.mixture_turns import OwnTurns, Schedule, schedule
from tfopt.pipelines.shared.nondeterminism import refuse_draws
from tfopt.pipelines.shared.options import Choices, PipelineOptions, expect_name
from tfopt.pipelines.shared.seeding import mixed_seed
from tfopt.pipelines.sources.parts import (
    Part,
    mixing_place,
    own_count,
    own_seed,
    part_of,
    take_part,
    take_positions,
)
from tfopt.pipelines.sources.source import Source, named_leaves
from tfopt.pipelines.stages.arrangement import plan_mixture, plan_part
from tfopt.pipelines.stages.example_stages import Cache
from tfopt.pipelines.stages.mixture_stages import MixedPart, Mixture
from tfopt.warn import warn_once

Stop = Literal["first", "all"]

_OF_MIXTURE = ("seed", "remainder", "prefetch", "device", "augment", "service")  # not of parts that are sources


def mix(parts: Sequence[tuple[Any, float]], *, stop: Stop = "first", **options: Unpack[Choices]) -> PipelinePlan:
    """Plans a pipeline whose examples come from several sources or plans, in fixed proportions.

    Use it to train on several data sets at once, each with a transform, cache, augment and shuffle of its own. The
    parts take turns in a fixed order: among any n consecutive examples, each of two parts has its share of n, rounded
    up or down; each of three or more is off by less than four examples (counted from the first example, half an example
    and two). The mixture is not shuffled again, since the parts are.

    Args:
        parts: Pairs of a part and its weight, a positive number; shares are weights divided by their sum. A part is a
            plan that `plan_pipeline` made, or what it takes for a source. Of a plan, the stages up to the batch are
            mixed; its `batch_size`, `pad`, `bucket`, `remainder`, `prefetch` and `device` are not used.
        stop: When an epoch ends. "first": when it is the turn of a part that has no examples left. "all": when each
            part has been read whole at least once; the shorter ones are read again, in a new order each time.
        **options: Those of `plan_pipeline`. `batch_size`, `pad`, `bucket`, `remainder`, `prefetch` and `device` hold
            for the mixture; `augment` is called with mixed examples, after that of each part, or with mixed batches
            (`per_batch`). The others hold for the parts that are not plans. `seed` gives each part its own seed, except
            plans that have one.

    Returns:
        The plan. It has everything that one of `plan_pipeline` has, `at` included.

    Raises:
        TypeError: If `parts` are not pairs of a part and a number, or an option is of the wrong type.
        ValueError: If a weight or `stop` is out of range, or parts differ in `training` from the mixture; and what
            `plan_pipeline` raises.
        PipelineError: If the parts' examples differ in structure, dtype or shape, or in the order of their class names;
            or there are too few for a batch.
        UnsupportedError: If a part or the mixture has a `service` or cache="device"; a part is a mixture, has a
            position or functions of batches in its `augment`, or was planned outside of the strategy's scope; or a
            part's number of examples is unknown or endless, with stop="all".

    Example:
        >>> import numpy as np
        >>> plan = mix([(np.arange(70), 0.7), (-np.arange(30), 0.3)], batch_size=10, seed=1)
        >>> [int(sum(batch < 0)) for batch in plan.build()][:3]
        [3, 3, 3]
    """
    for name in options:
        if name not in PipelineOptions.__slots__:
            raise unknown_option(name, list(PipelineOptions.__slots__))
    asked = PipelineOptions(**options)
    expect_name("stop", stop, ("first", "all"))
    turns = schedule(_weights(parts))
    _refuse_options("the mixture", asked)
    plans = [_plan(number, part, asked, options) for number, (part, _) in enumerate(parts)]
    found = [_facts(plan) for plan in plans]
    _expect_one_numbering([each.source for each in found])
    index, processes = mixing_place(asked, [each.part for each in found])
    if processes > 1:
        found, turns, counts = _divided(plans, turns, stop, asked.batch_size // processes)
    else:
        counts = (_count(found, [[each.count] for each in found], turns, stop),)
    count = counts[index]
    mixed = _parts(plans, found, asked, turns, [None] * len(plans) if count is None else turns.counts(count))
    own = replace(asked, crop=None, crop_with=(), transform=None, cache=None)  # without those of the parts alone
    facts = _mixed_facts(mixed, own, counts, index)
    decided: Any = {"shuffle": any(part.options.shuffle for part in mixed), "remainder": facts.last_batch[0]}
    chosen, own = replace(asked, **decided), replace(own, **decided)
    if asked.remainder is None:
        warn_left_out(chosen, facts)
    for part in mixed:
        _warn_unread(part)
    mixture = Mixture(
        name="mixture",
        setting=f"stop={stop!r}",
        reason=_reason(facts, turns),
        parts=mixed,
        schedule=turns,
        options=replace(own, shuffle=False, bucket=False),
        facts=facts,
    )
    position = Position(own_seed(asked.seed, facts.part))
    return PipelinePlan(facts.source, chosen, plan_mixture(mixture, own, facts), position)


def _weights(parts: Any) -> list[float]:
    remedy = "Pass positive numbers, such as [(photos, 0.7), (drawings, 0.3)]."
    if not isinstance(parts, Sequence) or isinstance(parts, str) or not parts:
        raise TypeError(
            f"Expected a list of pairs of a part and its weight. Received: {type(parts).__name__}. {remedy}"
        )
    for pair in parts:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise TypeError(f"Expected pairs of a part and its weight. Received: {type(pair).__name__}. {remedy}")
    return [checks.number("a weight", weight, remedy, above=0) for _, weight in parts]


def _refuse_options(whose: str, options: PipelineOptions) -> None:
    if options.service is not None:
        raise UnsupportedError(
            f"Expected no tf.data service in a mixture. Found service={options.service!r} of {whose}: its workers "
            "deliver in any order, and the parts would not keep their shares. What to do: leave `service` out."
        )
    if options.balance is not None:
        raise UnsupportedError(
            f"Expected weights as the only shares in a mixture. Found balance={options.balance!r} of {whose}. What to "
            "do: leave it out, or mix a source of each class."
        )
    if options.on_device:
        raise UnsupportedError(
            f"Expected examples that are mixed on the host. Found cache='device' of {whose}: batches would be made on "
            "the device, of this part alone. What to do: pass cache='memory'; batches are copied to the device ahead."
        )


def _plan(number: int, part: Any, asked: PipelineOptions, options: Choices) -> PipelinePlan:
    """Returns the plan of a part, with its seed."""
    seed = mixed_seed(asked.seed, number)
    name = f"part {number + 1}"
    source = part.source if isinstance(part, PipelinePlan) else part
    if is_loader(source) or (isinstance(source, Source) and source.batched):
        raise UnsupportedError(
            f"Expected sources of single examples. Found a loader of whole batches as {name}. What to do: pass "
            "loader(..., batched=False) of a loader that yields single examples."
        )
    if not isinstance(part, PipelinePlan):
        own: Any = {name: value for name, value in options.items() if name not in _OF_MIXTURE}
        return plan_pipeline(part, **own, seed=seed, remainder="keep", device=None)
    _refuse_options(name, part.options)
    if any(isinstance(stage, Mixture) for stage in part.stages):
        raise UnsupportedError(
            f"Expected plans of single sources. Found a mixture as {name}. What to do: pass its parts, each with the "
            "product of both weights."
        )
    if not part.position.is_start:
        raise UnsupportedError(
            f"Expected parts that begin at their start. Found {name} at {part.position}. What to do: move the whole "
            "mixture, with .at(epoch, batch) of its plan."
        )
    if batched := [function.name for function in part.options.augmentations if function.by_batch]:
        raise UnsupportedError(
            f"Expected an `augment` of single examples in a part. Found per_batch({batched[0]}) of {name}, and batches "
            "hold examples of all parts. What to do: pass it to mix(augment=...)."
        )
    if part.options.training != asked.training:
        raise ValueError(
            f"Expected parts with training={asked.training}, as the mixture has. Found training="
            f"{part.options.training} of {name}. What to do: pass the same `training` to both."
        )
    if part.options.seed is not None or seed is None:
        return part
    facts = _facts(part)
    refuse_draws(replace(part.options, seed=seed), facts.in_source, facts.traced.in_transform, facts.traced.in_augment)
    return replace(part, options=replace(part.options, seed=seed))


def _facts(plan: PipelinePlan) -> Facts:
    return next(stage.facts for stage in plan.stages if isinstance(stage, Cache))


def _expect_one_numbering(sources: Sequence[Source]) -> None:
    """Refuses parts whose class names give one label two meanings."""
    known = [source for source in sources if source.class_names]
    for one, other in itertools.combinations(known, 2):
        for number, names in enumerate(zip(one.class_names or (), other.class_names or (), strict=False)):
            if names[0] != names[1]:
                raise PipelineError(
                    f"Expected one numbering of the classes in all parts. Found label {number} for {names[0]!r} in "
                    f"{one.name} and for {names[1]!r} in {other.name}. Pass the same `classes` to both, or if a "
                    "`transform` numbers them alike, dataclasses.replace(source, class_names=None)."
                )


def _count(found: Sequence[Facts], counts: Sequence[Sequence[int | None]], turns: Schedule, stop: Stop) -> int | None:
    """Returns the examples of an epoch; None if unknown or endless.

    `counts` has those of each part, once or in each of the processes: these mix as many as the first or last to end.
    """
    ends = turns.turns_until if stop == "all" else turns.turns_within
    known = []
    for number, facts in enumerate(found):
        if facts.count is None and stop == "all":
            raise UnsupportedError(
                f"Expected a known number of examples in each part for stop='all'. Found: {facts.source.name}, whose "
                "number is unknown or endless. What to do: apply tf.data.experimental.assert_cardinality(number), give "
                "your own Source a `count`, or pass stop='first'."
            )
        if facts.count is None and not facts.infinite:
            return None
        known += [ends(number, count) for count in counts[number] if count is not None]
    return (max if stop == "all" else min)(known, default=None)


def _divided(
    plans: Sequence[PipelinePlan], turns: Schedule, stop: Stop, block: int
) -> tuple[list[Facts], Schedule, Sequence[int | None]]:
    """Returns this process' share of each part, its turns, and how many turns each process has.

    Without a shuffle each batch of the mixture is divided in blocks, as that of a single source is. With one, each
    process mixes its share of each part by itself; all mix as many examples.
    """
    whole = [_facts(plan) for plan in plans]
    parts = [facts.part for facts in whole if facts.part is not None]

    def taking(plan: PipelinePlan, part: Part, take: Take) -> Facts:
        return inspect_source(part.source, replace(plan.options, split=None), take)

    if not any(plan.options.shuffle for plan in plans):
        count = _count(whole, [[part.whole] for part in parts], turns, stop) or 0
        own = OwnTurns(turns.weights, block, parts[0].index, parts[0].parts)
        counts = [own_count(count, block, index, own.parts) for index in range(own.parts)]
        chosen = zip(plans, parts, own.taken(counts[own.index]), strict=True)
        found = [taking(plan, part, _positions(part, at)) for plan, part, at in chosen]
        return found, own, counts
    one_by_one = partial(take_part, one_by_one=True)
    found = [
        facts if plan.options.shuffle else taking(plan, part, one_by_one)
        for plan, part, facts in zip(plans, parts, whole, strict=True)
    ]
    dealt = [facts.part.counts for facts in found if facts.part is not None]
    for part, counts_of_part in zip(parts, dealt, strict=True):
        if not min(counts_of_part):
            raise PipelineError(
                f"Expected examples of each part for each of {part.parts} processes. Found {part.whole:,} in "
                f"{part.source.name}. What to do: train in fewer processes, or leave this part out."
            )
    return found, turns, [_count(found, dealt, turns, stop)] * parts[0].parts


def _positions(part: Part, at: Any) -> Take:
    return lambda source, _: take_positions(source, part, at)


def _parts(
    plans: Sequence[PipelinePlan],
    found: Sequence[Facts],
    asked: PipelineOptions,
    turns: Schedule,
    taken: Sequence[int | None],
) -> tuple[MixedPart, ...]:
    """Returns the stages of the parts, of which later ones leave room for the caches of earlier ones."""
    parts: list[MixedPart] = []
    taken_bytes = 0.0
    for number, (plan, facts) in enumerate(zip(plans, found, strict=True)):
        facts = replace(facts, used=facts.count)
        seed = own_seed(plan.options.seed, facts.part)
        options = replace(plan.options, seed=seed, remainder="keep", batch_size=asked.batch_size)
        part = plan_part(
            f"part {number + 1}",
            options,
            facts,
            share=turns.share(number),
            taken=taken[number],
            taken_bytes=taken_bytes,
        )
        taken_bytes += (part.cache.bytes or 0) if part.cache.on == "memory" else 0
        parts.append(part)
        _expect_alike(parts[0], part)
    return tuple(parts)


def _expect_alike(first: MixedPart, other: MixedPart) -> None:
    """Refuses examples that differ in structure, dtype or shape."""
    ones, others = (dict(named_leaves(part.element_spec, "example")) for part in (first, other))
    if ones.keys() != others.keys():
        expected, found = ", ".join(ones), ", ".join(others)
    else:
        at = next((name for name in ones if ones[name] != others[name]), None)
        if at is None:
            return
        expected, found = f"{_described(ones[at])} at {at}", _described(others[at])
    raise PipelineError(
        f"Expected examples of one structure, dtype and shape in all parts. {first.name} ({first.facts.source.name}) "
        f"has {expected}; {other.name} ({other.facts.source.name}) has {found}. Make them alike in the `transform` of "
        "one of them."
    )


def _described(leaf: Any) -> str:
    return f"{leaf.dtype.name} of shape {leaf.shape}" if isinstance(leaf, tf.TensorSpec) else str(leaf)


def _mixed_facts(parts: Sequence[MixedPart], own: PipelineOptions, counts: Sequence[int | None], index: int) -> Facts:
    """Returns what the stages after the mixture rest on."""
    names = [part.facts.source.name for part in parts]
    sampled = _sampled(parts, MEASURED if own.bucket else SAMPLED)
    source = Source(name=f"a mixture of {' and '.join(dict.fromkeys(names))}", dataset=lambda: sampled)
    mixed = all(part.options.shuffle and part.facts.mixed for part in parts)
    mixes = tuple(part.facts.part for part in parts if part.facts.part is not None)
    share = part_of(source, own, index, [count or 0 for count in counts], mixed=mixed, mixes=mixes) if mixes else None
    infinite = all(part.facts.infinite for part in parts)
    return inspect_mixture(source, own, sampled, part=share, count=counts[index], infinite=infinite, mixed=mixed)


def _sampled(parts: Sequence[MixedPart], number: int) -> Any:
    """Returns a dataset of so many examples, as many of each part."""
    few = -(-number // len(parts))
    each = [_with_shapes(part.facts.traced.augmented.take(few), part.element_spec) for part in parts]
    return reduce(lambda one, other: one.concatenate(other), each)


def _with_shapes(dataset: Any, spec: Any) -> Any:
    @without_autograph
    def shaped(*parts: Any) -> Any:
        def with_shape(leaf: Any, spec: Any) -> Any:
            return tf.ensure_shape(leaf, spec.shape) if isinstance(spec, tf.TensorSpec) else leaf

        return tf.nest.map_structure(with_shape, element_of(parts, spec), spec)

    return dataset.map(shaped)


def _reason(facts: Facts, turns: Schedule) -> str:
    if facts.infinite:
        number = "endless: give fit its steps_per_epoch"
    elif facts.count is None:
        number = "number of examples unknown"
    else:
        number = f"{facts.count:,} examples an epoch"
    within = "1 example" if len(turns.weights) < 3 else "4 examples"
    return (
        f"{number}, in a fixed order of turns that keeps the shares in any stretch of an epoch, to within {within}; "
        "not shuffled again, since the parts are"
    )


def _warn_unread(part: MixedPart) -> None:
    """Logs once that examples are never read, of a part that neither a shuffle nor a longer epoch reaches."""
    count = part.facts.count
    if part.options.shuffle and not part.facts.mixed and count is not None and (part.taken or count) < count:
        warn_once(
            "examples of a part never read",
            f"Expected each epoch to read other examples of {part.facts.source.name}. It reads {part.taken:,} of its "
            f"{count:,}, and a shuffle that does not hold them all gives it mostly the first ones. What to do: pass "
            "stop='all', a larger weight, cache='memory', or a source that can be read by position.",
        )
