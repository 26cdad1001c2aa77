"""Epochs of a pipeline, from any position: whether it has one, and what the plan says of it."""

from collections.abc import Iterator, Sequence
from typing import Any

from tfopt.errors import UnsupportedError
from tfopt.pipelines.inspection.facts import Facts
from tfopt.pipelines.shared.epochs import Position
from tfopt.pipelines.shared.nondeterminism import CHANGING
from tfopt.pipelines.shared.options import PipelineOptions
from tfopt.pipelines.stages.batch_stages import Batch
from tfopt.pipelines.stages.buckets import WINDOW
from tfopt.pipelines.stages.example_stages import Cache
from tfopt.pipelines.stages.mixture_stages import MixedPart, Mixture
from tfopt.pipelines.stages.order_stages import Read
from tfopt.pipelines.stages.stage import Flow, Stage, all_of


def expect_repeatable(stages: Sequence[Stage]) -> None:
    """Refuses a pipeline whose batches may differ in another process.

    Raises:
        UnsupportedError: If there is any reason for that.
    """
    for found, remedy in (*_unseeded(stages), *_obstacles(stages)):
        raise UnsupportedError(
            f"Expected a pipeline that yields the same batches each time, to begin at a position. Found {found}. "
            f"What to do: {remedy}"
        )


def is_repeatable(stages: Sequence[Stage]) -> bool:
    """Whether batches follow from the position alone, whose seed may be one that the dataset has drawn."""
    return not any(True for _ in _obstacles(stages))


def ordering(stages: Sequence[Stage]) -> list[Any]:
    """Returns what decides the order besides the position, as JSON values."""
    names = ("permuted", "shuffled", "lasting", "buffer", "first", "drawn", "rests")
    found: list[Any] = [stage.choice.on == "memory" for stage in all_of(stages) if isinstance(stage, Cache)]
    return found + [getattr(stage, name) for stage in all_of(stages) for name in names if hasattr(stage, name)]


def batch_of(stages: Sequence[Stage]) -> Batch:
    """Returns the stage that makes the batches."""
    return next(stage for stage in stages if isinstance(stage, Batch))


def _planned(stages: Sequence[Stage]) -> Iterator[tuple[PipelineOptions, Facts]]:
    """Yields what is asked for and known of each source, and of a mixture of them."""
    for stage in all_of(stages):
        if isinstance(stage, Cache | Mixture):
            yield stage.options, stage.facts


def _unseeded(stages: Sequence[Stage]) -> Iterator[tuple[str, str]]:
    """Yields what draws without a seed, and what to do."""
    for options, _ in _planned(stages):
        random_crop = options.crop is not None and options.crop.random
        draws = {"a shuffle": options.shuffle, "an `augment`": options.augmentations, "a RandomCrop": random_crop}
        for what in (what for what, is_there in draws.items() if is_there and options.seed is None):
            yield f"{what} without a seed", "pass seed=, from the start of the training on."


def _obstacles(stages: Sequence[Stage]) -> Iterator[tuple[str, str]]:
    """Yields what does not follow from a position, and what to do."""
    for options, facts in _planned(stages):
        if options.service is not None:
            yield "a tf.data service, whose workers deliver in any order", "leave `service` out."
        if facts.source.changes:
            remedy = "pass a keras.utils.PyDataset whose batches depend on their index alone, or another source."
            yield facts.source.changes, remedy
        found = [("the source", facts.in_source), ("`transform`", facts.traced.in_transform)]
        # Under a seed such an `augment` is refused.
        found += [("`augment`", each) for each in facts.traced.in_augment]
        for place, finding in ((place, each) for place, findings in found for each in findings):
            if finding.kind in CHANGING:
                remedy = "take it out, and leave order and draws to `shuffle`, `augment` and seed=."
                yield f"{finding} in {place}", remedy
        if facts.part is not None and any(True for _ in _unseeded(stages)):
            yield "several processes, of which each draws a seed", "pass seed=."
    reads = [stage for stage in all_of(stages) if isinstance(stage, Read)]
    if any(stage.shuffled and stage.seed is None and not stage.source.keyed for stage in reads):
        yield "files in another order in each epoch without a seed", "pass seed=."


def described_position(position: Position, stages: Sequence[Stage]) -> tuple[str, str, str]:
    """Returns the plan's row on where it begins."""
    return "begin", str(position), _how(position, stages)


def _how(position: Position, stages: Sequence[Stage]) -> str:
    if not position.batch:
        return "epochs before it are not read"
    if parts := [part for part in stages if isinstance(part, MixedPart)]:
        ways = {part.name: _how(position, part.stages) for part in parts}
        same = len(set(ways.values())) == 1
        return ways[parts[0].name] if same else "; ".join(f"{name}: {way}" for name, way in ways.items())
    on = next(stage.choice.on for stage in stages if isinstance(stage, Cache))
    read = next(stage for stage in stages if isinstance(stage, Read))
    on_disk = on not in (None, "device", "memory")
    if on == "device" or (read.skips and (on_disk or (on is None and read.ordered))):
        return "examples before it are not read"
    if on_disk:
        return "examples before it in its epoch are not read from the cache; to write it, they are read and dropped"
    if on is not None:
        return "examples before it in its epoch are read for the cache, and dropped"
    return "examples before it in its epoch are read and dropped"


def run_through(flow: Flow, stages: Sequence[Stage]) -> None:
    """Takes a flow through all stages."""
    batch = batch_of(stages)
    flow.size, flow.window = batch.size, WINDOW if batch.boundaries else 1
    for stage in stages:
        stage.apply(flow)
