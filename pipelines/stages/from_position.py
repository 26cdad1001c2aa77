"""A pipeline that begins in the middle: whether it can, what the plan says of it, and the two datasets it joins."""

import math
from collections.abc import Iterator, Sequence

from tfopt.errors import UnsupportedError
from tfopt.pipelines.inspection.facts import Facts
from tfopt.pipelines.shared.nondeterminism import CHANGING
from tfopt.pipelines.shared.options import PipelineOptions
from tfopt.pipelines.shared.position import Position
from tfopt.pipelines.shared.seeding import moved
from tfopt.pipelines.stages.batch_stages import Batch, Workers
from tfopt.pipelines.stages.buckets import WINDOW
from tfopt.pipelines.stages.example_stages import Cache, chunk_of
from tfopt.pipelines.stages.mixture_stages import MixedPart, Mixture
from tfopt.pipelines.stages.order_stages import Read
from tfopt.pipelines.stages.stage import Flow, Stage, all_of, split_at_cache


def expect_repeatable(stages: Sequence[Stage]) -> None:
    """Refuses a pipeline whose batches may differ the next time it is built.

    Raises:
        UnsupportedError: If there is any reason for that.
    """
    made = (stage for stage in all_of(stages) if isinstance(stage, Cache | Mixture))
    for found, remedy in (each for stage in made for each in _obstacles(stage.options, stage.facts)):
        raise UnsupportedError(
            f"Expected a pipeline that yields the same batches each time, to begin at a position. Found {found}. "
            f"What to do: {remedy}"
        )


def _obstacles(options: PipelineOptions, facts: Facts) -> Iterator[tuple[str, str]]:
    """Yields what was found, and what to do."""
    if options.service is not None:
        yield "a tf.data service, whose workers deliver in any order", "leave `service` out."
    if facts.source.changes:
        remedy = "pass a keras.utils.PyDataset whose batches depend on their index alone, or another source."
        yield facts.source.changes, remedy
    random_crop = options.crop is not None and options.crop.random
    draws = {"a shuffle": options.shuffle, "an `augment`": options.augmentations, "a RandomCrop": random_crop}
    for what in (what for what, is_there in draws.items() if is_there and options.seed is None):
        yield f"{what} without a seed", "pass seed=, from the start of the training on."
    for place, findings in (("the source", facts.in_source), ("`transform`", facts.traced.in_transform)):
        for found in findings:
            if found.kind in CHANGING:
                yield f"{found} in {place}", "take it out, and leave order and draws to `shuffle`, `augment` and seed=."


def described_position(position: Position, stages: Sequence[Stage]) -> tuple[str, str, str]:
    """Returns the plan's row on where it begins."""
    begun = f"{position.opened} iterations begun before, of which {position.epoch} read; "
    return "begin", str(position), (begun if position.opened != position.epoch else "") + _how(position, stages)


def _how(position: Position, stages: Sequence[Stage]) -> str:
    if not position.batch:
        return "epochs before it are not read"
    if parts := [part for part in stages if isinstance(part, MixedPart)]:
        ways = {part.name: _how(position, part.stages) for part in parts}
        same = len(set(ways.values())) == 1
        return ways[parts[0].name] if same else "; ".join(f"{name}: {way}" for name, way in ways.items())
    on = next(stage.choice.on for stage in stages if isinstance(stage, Cache))
    read = next(stage for stage in stages if isinstance(stage, Read))
    if on == "device" or (on is None and read.ordered and read.skips):
        return "examples before it are not read"
    if on is not None:
        return "examples before it in its epoch are read for the cache, and dropped"
    return "examples before it in its epoch are read and dropped"


def start(flow: Flow, stages: Sequence[Stage], position: Position) -> Sequence[Stage]:
    """Has the flow begin at a position, and returns the stages that follow.

    The first iteration and the later ones differ up to the batches. What a cache holds is made once for both.
    """
    at_batch, batch = next((at, stage) for at, stage in enumerate(stages) if isinstance(stage, Batch))
    bucketed = bool(batch.boundaries)  # examples change places on their way into batches, which are moved instead
    at_batch += bucketed
    common, apart = split_at_cache(stages[:at_batch])
    chunk = chunk_of(apart)
    turns = position.turns(batch.size, math.lcm(chunk, WINDOW * batch.size) if bucketed else chunk)
    flow.position = position
    if not position.batch:
        flow.turn = turns[0]
        return stages
    for stage in common:
        stage.apply(flow)
    branches = [flow.branch(turn) for turn in turns]
    for branch in branches:
        for stage in apart:
            stage.apply(branch)
    first, later = (branch.flush() for branch in branches)
    unit = batch.size if bucketed else 1
    if turns[0].late:
        first = first.skip(turns[0].late // unit)
    for part in (stage.part for stage in stages if isinstance(stage, Workers)):
        first = first.take(max(0, part.used - position.batch * batch.size) // unit)
    flow.dataset, flow.turn = moved(first, later), turns[0]
    return stages[at_batch:]
